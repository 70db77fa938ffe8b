"""Experiment folders as they are found, for reading only: nothing that is missing or damaged hides the rest."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_stages.checkpoint import MANIFEST, Checkpoints
from rlhf_stages.experiment import STAGES
from rlhf_stages.files import read_json
from rlhf_stages.reporting.numbers import Numbers, read_numbers

# a line of samples.jsonl beyond this is no sample
_LONGEST_LINE = 1_000_000


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its step, bytes, the digest of its weights as `experiment.digest` makes it, and what is wrong."""

    name: str
    step: int
    size: int = 0
    sha256: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """One run of one stage.

    changed: when something was last written, seconds since the epoch. problems: a sentence each.
    """

    dir: Path
    args: Mapping[str, Any] = field(default_factory=dict)
    metrics: Numbers = field(default_factory=Numbers)
    timing: Numbers = field(default_factory=Numbers)
    samples: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] | None = None
    checkpoints: list[Saved] = field(default_factory=list)
    latest: str | None = None
    best: str | None = None
    changed: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def stage(self) -> str:
        """sft, rm, ppo, ...; where args.json does not say it, the name of the folder."""
        stage = self.args.get("stage")
        return stage if stage in STAGES else self.dir.name

    @property
    def name(self) -> str:
        """Name of the experiment: the folder above the stage's."""
        return self.dir.resolve().parent.name

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return str(self.group("data_args").get("dataset") or self.dir.resolve().parent.parent.name)

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        newest = max((saved.step for saved in self.checkpoints), default=0)
        return max(self.metrics.last_step, self.timing.last_step, newest)

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.summary is not None

    def group(self, name: str) -> Mapping[str, Any]:
        """A group of args.json."""
        group = self.args.get(name)
        return group if isinstance(group, Mapping) else {}

    def state(self, now: float | None = None) -> str:
        """Finished or not, in a phrase."""
        if self.finished:
            return f"finished after {self.step:,} steps"
        total = self.group("train_args").get("max_steps")
        of = f" of {total:,}" if isinstance(total, int) else ""
        ago = _span((time.time() if now is None else now) - self.changed)
        return f"not finished: step {self.step:,}{of}, last written {ago} ago"


def experiments_in(path: str | Path) -> list[Path]:
    """The experiment folders that a path means: the folder itself, that of a checkpoint, or all stages of a name.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no folder {path}; expected an experiment such as experiments/<dataset>/<name>/ppo")
    for candidate in (path, path.parent.parent):
        if _is_experiment(candidate):
            return [candidate]
    found = [path / stage for stage in STAGES if _is_experiment(path / stage)]
    if not found:
        raise FileNotFoundError(
            f"no experiment in {path} (no args.json there, nor in a folder called {', '.join(STAGES)});"
            " name a folder that a training stage has written"
        )
    return found


def experiments_of(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The experiment folders of several paths, and a sentence for each path that has none.

    Raises:
        FileNotFoundError: no path has any.
    """
    folders, missing = list[Path](), list[str]()
    for path in paths:
        try:
            folders += experiments_in(path)
        except FileNotFoundError as error:
            missing.append(str(error))
    if not folders:
        raise FileNotFoundError("; ".join(missing))
    return folders, missing


def _is_experiment(path: Path) -> bool:
    return (path / "args.json").is_file() and ((path / "checkpoints").is_dir() or path.name in STAGES)


def read_run(directory: Path) -> Run:
    """Read a folder; nothing is raised, what is wrong stands in `problems`."""
    problems: list[str] = []
    args = _json(directory / "args.json", problems, required=True) or {}
    metrics, wrong = read_numbers(directory / "metrics.csv")
    timing, more = read_numbers(directory / "timing.csv")
    problems += wrong + more
    checkpoints = read_checkpoints(directory)
    problems += [f"Checkpoint {saved.name}: {saved.problem}." for saved in checkpoints if saved.problem]
    pointers = {}
    for pointer in ("latest", "best"):
        pointers[pointer] = name = _pointer(directory / pointer)
        if name and name not in {saved.name for saved in checkpoints}:
            problems.append(f"`{pointer}` names {name}, which is not there (removed by hand, or just now).")
    return Run(
        dir=directory,
        args=args,
        metrics=metrics,
        timing=timing,
        samples=_json_lines(directory / "samples.jsonl", problems),
        skipped=_json_lines(directory / "skipped.jsonl", problems),
        summary=_json(directory / "summary.json", problems, required=False),
        checkpoints=checkpoints,
        **pointers,
        changed=max((_changed(directory / name) for name in ("metrics.csv", "args.json", "checkpoints")), default=0.0),
        problems=problems,
    )


def read_checkpoints(directory: Path) -> list[Saved]:
    """The checkpoints of an experiment; sizes are compared with the manifest, and no weight is read."""
    checkpoints = Checkpoints(directory / "checkpoints")
    found = []
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        try:
            files = read_json(path / MANIFEST)["files"]
            sizes = {name: int(entry["size"]) for name, entry in files.items()}
            sums = [bytes.fromhex(files[name]["sha256"]) for name in sorted(files) if _is_weight(name)]
        except OSError:
            gone = "was removed while it was read" if not path.is_dir() else f"has no {MANIFEST}: not a whole one"
            found.append(Saved(path.name, step, problem=gone))
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            found.append(Saved(path.name, step, problem=f"its {MANIFEST} is damaged"))
            continue
        wrong = [name for name, size in sizes.items() if "/" not in name and _size(path / name) != size]
        problem = f"{wrong[0]} is missing, or not as long as it was written" if wrong else None
        digest = hashlib.sha256(b"".join(sums)).hexdigest() if sums else None
        found.append(Saved(path.name, step, sum(sizes.values()), digest, problem))
    return found


def _is_weight(name: str) -> bool:
    return "/" not in name and name.endswith(".safetensors")


def _json(path: Path, problems: list[str], *, required: bool) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except OSError:
        if required:
            problems.append(f"There is no {path.name}: what the run was started with is not known.")
    except ValueError:
        problems.append(f"{path.name} is damaged (no valid JSON); it is left out.")
    return None


def _json_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, each with an integer `step`; others are counted."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    found, bad = [], 0
    for line in filter(str.strip, lines):
        try:
            content = json.loads(line) if len(line) <= _LONGEST_LINE else None
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict) and type(content.get("step")) is int:
            found.append(content)
        else:
            bad += 1
    if bad:
        problems.append(f"{path.name}: {bad} damaged line{'s' * (bad > 1)} left out.")
    return found


def _pointer(path: Path) -> str | None:
    try:
        return Path(path.read_text(encoding="utf-8", errors="replace").strip()[:80]).name or None
    except OSError:
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _span(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)}"
    return f"{max(0, int(seconds))} seconds"
