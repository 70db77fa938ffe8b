"""The experiment folder: one run of one stage, complete in itself.

<log_dir>/<dataset>/<name>/<stage>/
    args.json               stage, all arguments, data arguments, parents with digests, versions
    checkpoints/step-000500/  a Hugging Face model folder with its tokenizer
    latest, best            names of checkpoints
    metrics.csv, logs/      numbers (the latter for TensorBoard)
    samples.jsonl           texts
    summary.json            written last: the run is finished
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_stages.data.info import read_json

STAGES = ("sft", "rm", "ppo", "dpo")
_LIBRARIES = ("rlhf_stages", "torch", "lightning", "transformers", "torchmetrics", "peft", "tokenizers")


@dataclass(frozen=True)
class Experiment:
    """A run that is being written."""

    dir: Path

    @classmethod
    def create(
        cls, directory: Path, *, stage: str, overwrite: bool, arguments: Mapping[str, Any], parents: Mapping[str, Path]
    ) -> "Experiment":
        """Make the folder and write `args.json`.

        Args:
            arguments: argument groups by name; dataclasses and dictionaries.
            parents: checkpoint folders that this run starts from, by role.

        Raises:
            FileExistsError: the folder holds a run already and `overwrite` is not set.
        """
        if directory.exists() and any(directory.iterdir()):
            if not overwrite:
                raise FileExistsError(
                    f"{directory} holds a run already; choose another --experiment_name, or replace it with --overwrite"
                )
            if not (directory / "args.json").is_file():
                raise FileExistsError(f"{directory} is not an experiment folder (no args.json), so it is not replaced")
            shutil.rmtree(directory)
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        content = {
            "stage": stage,
            **{name: group if isinstance(group, Mapping) else asdict(group) for name, group in arguments.items()},
            "parents": {role: {"path": str(path), "sha256": digest(path)} for role, path in parents.items()},
            "versions": {name: version(name) for name in _LIBRARIES},
        }
        write_json(directory / "args.json", content)
        return cls(directory)

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.dir / "checkpoints" / f"step-{step:06d}"

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder, then give it its name and make it `latest`: it is there whole or not at all."""
        target = self.checkpoint(step)
        temporary = target.with_name(f".{target.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            for file in temporary.rglob("*"):
                if file.is_file():
                    _flush(file)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        write_text(self.dir / "latest", target.name)
        return target

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of a step."""
        write_text(self.dir / "best", self.checkpoint(step).name)

    def append_sample(self, sample: Mapping[str, Any]) -> None:
        """Add a line to samples.jsonl."""
        with (self.dir / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which says that the run came to its end."""
        write_json(self.dir / "summary.json", summary)


def resolve_checkpoint(path: str | Path) -> Path:
    """The model folder that a path means: an experiment's latest checkpoint, or the folder itself.

    Raises:
        FileNotFoundError: there is no such folder, or no finished checkpoint in the experiment.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; expected an experiment, one of its checkpoints, or a model folder")
    if (path / "config.json").is_file():
        return path
    if (path / "args.json").is_file():
        pointer = path / "latest"
        name = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
        checkpoint = path / "checkpoints" / Path(name[:80]).name  # a longer one would be an error of the system
        if not name or not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no finished checkpoint yet; let its stage run to the first save")
        return checkpoint
    raise FileNotFoundError(f"{path} is neither an experiment (no args.json) nor a model folder (no config.json)")


def parent_checkpoint(path: str | Path, *, stage: str, flag: str) -> tuple[Path, dict[str, Any]]:
    """The checkpoint and the `args.json` of an earlier stage's experiment, given the experiment or a checkpoint of it.

    Raises:
        FileNotFoundError: nothing there. ValueError: it belongs to another stage.
    """
    try:
        checkpoint = resolve_checkpoint(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{flag}={path}: {error}") from None
    args_file = checkpoint.parent.parent / "args.json"
    if not args_file.is_file():
        raise FileNotFoundError(f"{flag}={path}: {checkpoint} does not lie in an experiment folder (no {args_file})")
    args = read_json(args_file)
    if args.get("stage") != stage:
        raise ValueError(f"{flag}={path} is an experiment of stage {args.get('stage')!r}, expected {stage!r}")
    return checkpoint, args


def stage_name(checkpoint: Path, taken: Container[str] = ()) -> str:
    """A short name for a checkpoint in tables: its stage, or its folder; numbered where that is taken."""
    args_file = checkpoint.parent.parent / "args.json"
    name = str(read_json(args_file).get("stage", checkpoint.name)) if args_file.is_file() else checkpoint.name
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


def digest(checkpoint: Path) -> str:
    """SHA-256 over the weight files of a model folder."""
    total = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one piece."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str))


def write_text(path: Path, text: str) -> None:
    """Write a small text file in one piece."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
