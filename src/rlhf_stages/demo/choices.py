"""What a demo page offers: experiments, their checkpoints, and where each of those is loaded from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stages.data.dialogue import first_human_turn
from rlhf_stages.experiment import STAGES
from rlhf_stages.files import read_json
from rlhf_stages.reporting.folder import Run, read_checkpoints, read_run
from rlhf_stages.reporting.lineage import parents_of

PRETRAINED = "pretrained"
POLICIES = ("sft", "dpo", "ppo")
_NOT_POLICIES = {
    "rm": "a reward model, which scores texts and cannot talk; choose it under Reward model",
    "classifier": "a classifier, which names what texts are and cannot talk",
}
_SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "min_new_tokens")


@dataclass(frozen=True)
class Source:
    """What to load, the format of its prompts (None: its own), and what to call it."""

    path: str
    chat_template: str | None
    name: str


def find_experiments(root: str | Path, stages: Sequence[str]) -> list[Path]:
    """The experiments of these stages in a folder or at most three folders below, the newest first."""
    found = {}
    for depth in range(4):
        for file in Path(root).glob("/".join(["*"] * depth + ["args.json"])):
            try:
                if read_json(file).get("stage") in stages:
                    found[file.parent] = file.stat().st_mtime
            except (OSError, ValueError, AttributeError):  # it is damaged, or was removed just now
                continue
    return sorted(found, key=lambda path: (-found[path], str(path)))


def checkpoints_of(experiment: str) -> list[tuple[str, str]]:
    """Labels and names of what an experiment offers, the latest first; one nameless entry for any other model.

    Raises:
        ValueError: it is an experiment of another kind, or a damaged one. FileNotFoundError: it has no checkpoint yet.
    """
    directory = _experiment_of(experiment)
    if directory is None:
        return [("as it is", "")]
    stage = read_json(directory / "args.json").get("stage")
    if stage not in POLICIES:
        kind = _NOT_POLICIES.get(str(stage), f"of stage {stage!r}, which this page does not know")
        raise ValueError(f"{experiment} is {kind}. Expected an experiment of {', '.join(POLICIES)}")
    saved = read_checkpoints(directory)
    marks: dict[str, list[str]] = {one.name: [] for one in saved}
    for mark in ("latest", "best"):
        marks.get(_pointer(directory / mark), []).append(mark)
    for one in saved:
        if one.problem:
            marks[one.name].append("damaged")
    ordered = sorted(marks, key=lambda name: ("latest" in marks[name], name), reverse=True)
    entries = [(" · ".join([name, *marks[name]]), name) for name in ordered]
    if not entries:
        raise FileNotFoundError(f"{experiment} has no checkpoint yet; let its stage run to the first save")
    base = _base(directory)
    return [*entries, (f"{PRETRAINED} · {base}", PRETRAINED)] if base else entries


def source_of(experiment: str, checkpoint: str) -> Source:
    """What an experiment and one of its checkpoints stand for.

    The model that a stage started from is asked in the format of the stage's data, so that the two can be compared.

    Raises:
        ValueError, FileNotFoundError: as `checkpoints_of`; or the checkpoint or the model is not there (any more).
    """
    if not experiment.strip():
        raise ValueError("no experiment is chosen")
    directory = _experiment_of(experiment)
    if directory is None:
        return Source(experiment.strip(), None, experiment.strip())
    title = " ".join([*directory.resolve().parts[-2:], checkpoint])
    if checkpoint == PRETRAINED:
        template = read_json(directory / "args.json").get("data_args", {}).get("chat_template")
        return Source(_base(directory), template, title)
    folder = directory / "checkpoints"
    if checkpoint not in {path.name for path in folder.glob("step-*")}:
        names = ", ".join(name for _, name in checkpoints_of(experiment))
        raise FileNotFoundError(
            f"{experiment} has no {checkpoint or 'checkpoint of that name'} (removed since?); it has {names}."
            " Press Refresh and choose again"
        )
    return Source(str(folder / checkpoint), None, title)


def different_data(experiments: Sequence[str]) -> str:
    """A sentence, if the runs of two experiments learned from different data; else, and for other models, nothing."""
    found = [directory for directory in map(_experiment_of, experiments) if directory is not None]
    datasets = list(dict.fromkeys(Run(directory, read_json(directory / "args.json")).dataset for directory in found))
    if len(datasets) < 2:
        return ""
    return f"These are runs on different data ({' and '.join(datasets)}): the replies may differ for that alone."


def settings_of(experiment: str) -> dict[str, Any]:
    """How an experiment sampled its own texts, by flag; empty for a model from elsewhere."""
    directory = _experiment_of(experiment)
    group = read_json(directory / "args.json").get("gen_args") if directory else None
    return {name: group[name] for name in _SETTINGS if name in group} if isinstance(group, dict) else {}


def examples_of(experiment: str) -> list[str]:
    """The prompts among the texts that a run has logged, without the format around them."""
    directory = _experiment_of(experiment)
    samples: Iterable[dict[str, Any]] = read_run(directory).samples if directory else ()
    prompts = (sample.get("prompt") for sample in samples)
    return list(dict.fromkeys(first_human_turn(prompt) for prompt in prompts if isinstance(prompt, str) and prompt))


def _experiment_of(path: str) -> Path | None:
    """The experiment folder, if it is one."""
    directory = Path(path.strip())
    return directory if path.strip() and (directory / "args.json").is_file() else None


def _pointer(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def _base(directory: Path) -> str:
    """Where the model lies that a stage started from: where it was, or beside the experiments if they were moved."""
    run = Run(directory, read_json(directory / "args.json"))
    parent = next((parent for parent in parents_of(run) if parent.role in STAGES and parent.role != "rm"), None)
    if parent is not None:
        return str(parent.found or parent.path)
    name = str(run.group("model_args").get("model_name") or "")
    above = directory.resolve().parents
    beside = above[3] / name if len(above) > 3 else Path(name)
    return str(beside) if name and not Path(name).exists() and beside.is_dir() else name
