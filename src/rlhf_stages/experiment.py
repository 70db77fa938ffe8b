"""The experiment folder: one run of one stage, complete in itself.

<log_dir>/<dataset>/<name>/<stage>/
    args.json               stage, all arguments, data arguments, shards and parents with digests, versions
    checkpoints/step-000500/  see `rlhf_stages.checkpoint`
    latest, best            names of checkpoints
    metrics.csv, timing.csv numbers: those that a second run gives again, and those of the clock
    logs/                   both for TensorBoard
    wandb/                  both for Weights & Biases, and the id of its run
    samples.jsonl           texts
    skipped.jsonl           steps that were skipped for a NaN or an infinity, with their samples
    summary.json            written last: the run is finished
"""

import hashlib
import json
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_stages.checkpoint import Checkpoints, check_whole
from rlhf_stages.files import read_json, write_json, write_text
from rlhf_stages.terminal import printable

STAGES = ("sft", "rm", "ppo", "dpo", "classifier")
_LIBRARIES = ("rlhf_stages", "torch", "lightning", "transformers", "torchmetrics", "peft", "tokenizers")
# arguments that change nothing about the numbers of a run; parents and data are compared by their content
_FREE = {
    *("resume", "resume_override", "overwrite", "max_time", "keep_last", "keep_best", "max_skipped_steps"),
    *("num_workers", "data_dir", "source", "log_dir", "experiment_name", "sft_experiment_dir", "rm_experiment_dir"),
    *("reward_config", "reward"),  # what they say stands under `rewards`
    *("loggers", "wandb_project", "wandb_entity", "wandb_mode"),
    *("gradient_checkpointing", "offload_frozen"),
}


@dataclass(frozen=True)
class Experiment:
    """A run that is being written; `start_step` is the step that it goes on from, 0 if it starts anew."""

    dir: Path
    start_step: int = 0

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        return Checkpoints(self.dir / "checkpoints")

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.dir / "summary.json").is_file()

    @classmethod
    def create(cls, directory: Path, content: Mapping[str, Any], *, overwrite: bool) -> "Experiment":
        """Make the folder and write `args.json`, which is `content` (see `describe`).

        Raises:
            FileExistsError: the folder holds a run already and `overwrite` is not set.
        """
        for leftover in directory.glob(".args.json.*"):  # of a run that was killed before it had begun
            leftover.unlink()
        if directory.exists() and any(directory.iterdir()):
            if not overwrite:
                raise FileExistsError(
                    f"{directory} holds a run already; continue it with --resume, choose another --experiment_name, or"
                    " replace it with --overwrite"
                )
            if not (directory / "args.json").is_file():
                raise FileExistsError(f"{directory} is not an experiment folder (no args.json), so it is not replaced")
            for path in directory.iterdir():
                if path.name != "args.json":  # so that what a kill leaves half-removed can still be replaced
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        write_json(directory / "args.json", content)
        (directory / "checkpoints").mkdir(exist_ok=True)
        return cls(directory)

    def check_same_run(self, content: Mapping[str, Any]) -> None:
        """Refuse to continue the run with `args.json` of other content than its own.

        Raises:
            ValueError: an argument, a shard or a parent differs.
        """
        before, now = read_json(self.dir / "args.json"), json.loads(json.dumps(content, default=str))
        found = sorted(_differences(before, now))
        if found:
            raise ValueError(
                f"--resume: {self.dir} is another run ({'; '.join(found[:5])}); leave the arguments as they were, or"
                " continue with the new ones by --resume_override"
            )

    def checkpoint_to_resume(self, step: int | None = None) -> tuple[int, list[str]]:
        """Step of the newest whole checkpoint, or `step` itself; 0 if there is none.

        Returns:
            The step, and what is wrong with each newer checkpoint that was passed over.

        Raises:
            ValueError: the checkpoint of `step` is damaged, or all of a finished run. FileNotFoundError: there is none.
        """
        steps = self.checkpoints.steps()
        if step is not None:
            if step not in steps:
                raise FileNotFoundError(f"--resume={step}: {self.dir} has checkpoints of the steps {steps}")
            check_whole(self.checkpoints.path(step), resumable=True)
            return step, []
        problems = []
        for candidate in reversed(steps):
            try:
                check_whole(self.checkpoints.path(candidate), resumable=True)
            except ValueError as error:
                problems.append(str(error))
            else:
                return candidate, problems
        if problems and self.finished:  # what is left of it is worth more than a new start
            raise ValueError(f"--resume: the run is finished, but {problems[0]}; --overwrite alone runs it again")
        return 0, problems

    def tidy(self) -> None:
        """Remove what killed runs left half-written."""
        self.checkpoints.tidy()
        for leftover in self.dir.glob(".*"):  # of a small file, see `write_text`
            if re.fullmatch(r"\..+\.\d+", leftover.name):
                leftover.unlink()

    def cut_back(self, step: int) -> None:
        """Take away all checkpoints, samples and notes that came after a step: the run goes on from there."""
        (self.dir / "summary.json").unlink(missing_ok=True)
        self.tidy()
        self.point_to("latest", step)
        for later in self.checkpoints.steps():
            if later > step:
                self.checkpoints.remove(later)
        for name in ("samples.jsonl", "skipped.jsonl"):
            path = self.dir / name
            if path.is_file():
                write_text(path, _lines_up_to(path, step))

    def point_to(self, name: str, step: int) -> None:
        """Let `latest` or `best` name the checkpoint of a step."""
        write_text(self.dir / name, f"{self.checkpoints.path(step).name}\n")

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to samples.jsonl or skipped.jsonl; each has a `step`."""
        with (self.dir / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which says that the run came to its end."""
        write_json(self.dir / "summary.json", summary)


def describe(
    stage: str, arguments: Mapping[str, Any], shards: Mapping[str, str], parents: Mapping[str, Path]
) -> dict[str, Any]:
    """Content of `args.json`.

    Args:
        arguments: argument groups by name; dataclasses and dictionaries.
        shards: fingerprints of the shards that the run reads, by file name.
        parents: checkpoint folders that this run starts from, by role.
    """
    return {
        "stage": stage,
        **{name: dict(group) if isinstance(group, Mapping) else asdict(group) for name, group in arguments.items()},
        "shards": dict(shards),
        "parents": {role: {"path": str(path), "sha256": digest(path)} for role, path in parents.items()},
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """What makes two runs different, each in a phrase."""
    found = set()
    for group in (before.keys() | now.keys()) - {"versions", "data_args", "parents"}:
        old, new = ({"": side.get(group)} if group == "stage" else side.get(group) or {} for side in (before, now))
        for key in (old.keys() | new.keys()) - _FREE:
            if old.get(key) != new.get(key):
                found.add(f"{key or group}: {old.get(key)} before, {new.get(key)} now")
    for role in before.get("parents", {}).keys() | now["parents"].keys():
        old, new = (side.get("parents", {}).get(role, {}).get("sha256") for side in (before, now))
        if old != new:
            found.add(f"{role}: its weights are not those of before")
    return found


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The whole lines of a .jsonl file that belong to the steps up to one."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
        except (ValueError, KeyError, TypeError):
            continue  # the kill came in the middle of it
    return kept


def resolve_checkpoint(path: str | Path) -> Path:
    """The model folder that a path means: an experiment's latest checkpoint, or the folder itself.

    Raises:
        FileNotFoundError: there is no such folder, or no finished checkpoint in the experiment.
        ValueError: the checkpoint is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; expected an experiment, one of its checkpoints, or a model folder")
    if (path / "config.json").is_file():
        check_whole(path)
        return path
    if (path / "args.json").is_file():
        pointer = path / "latest"
        name = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
        checkpoint = path / "checkpoints" / Path(name[:80]).name  # a longer one would be an error of the system
        if not name or not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no finished checkpoint yet; let its stage run to the first save")
        try:
            check_whole(checkpoint)
        except ValueError as error:
            raise ValueError(f"{error}; run its stage again with --resume, or name an older checkpoint") from None
        return checkpoint
    raise FileNotFoundError(f"{path} is neither an experiment (no args.json) nor a model folder (no config.json)")


def parent_checkpoint(path: str | Path, *, stage: str, flag: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and the `args.json` of an earlier stage's experiment, given the experiment or a checkpoint of it.

    Raises:
        FileNotFoundError: nothing there. ValueError: it belongs to another stage, or it is damaged.
    """
    try:
        checkpoint = resolve_checkpoint(path)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{flag}={path}: {error}") from None
    if checkpoint.is_symlink():
        checkpoint = checkpoint.resolve()  # to where its experiment is
    args_file = checkpoint.parent.parent / "args.json"
    if not args_file.is_file():
        raise FileNotFoundError(f"{flag}={path}: {checkpoint} does not lie in an experiment folder (no {args_file})")
    args = read_json(args_file)
    if args.get("stage") != stage:
        raise ValueError(f"{flag}={path} is an experiment of stage {args.get('stage')!r}, expected {stage!r}")
    return checkpoint, args


def stage_name(checkpoint: Path, taken: Container[str] = ()) -> str:
    """A short name for a checkpoint in tables: its stage, or its folder; numbered where that is taken."""
    experiment = experiment_of(checkpoint)
    name = checkpoint.name if experiment is None else read_json(experiment / "args.json").get("stage", checkpoint.name)
    return unique_name(str(name), taken)


def experiment_of(checkpoint: Path) -> Path | None:
    """The experiment folder that a checkpoint lies in; None for a model folder from elsewhere."""
    experiment = checkpoint.parent.parent
    return experiment if checkpoint.parent.name == "checkpoints" and (experiment / "args.json").is_file() else None


def dataset_of(checkpoint: Path) -> str | None:
    """Name of the data that the run of a checkpoint learned from; None where nothing says it."""
    experiment = experiment_of(checkpoint)
    facts = None if experiment is None else read_json(experiment / "args.json").get("data_args")
    name = facts.get("dataset") if isinstance(facts, dict) else None
    return str(name) if name else None


def unique_name(name: str, taken: Container[str]) -> str:
    """The name, short enough for a table, numbered where it is taken."""
    name, number = printable(name[:40]), 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def digest(checkpoint: Path) -> str:
    """SHA-256 over the weight files of a model folder; empty if it has none."""
    files = sorted(checkpoint.glob("*.safetensors")) or sorted(checkpoint.glob("pytorch_model*.bin"))
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest() if files else ""
