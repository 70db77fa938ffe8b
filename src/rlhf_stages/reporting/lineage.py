"""Which stage was made from which: the parents in args.json, followed from folder to folder."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_stages.experiment import experiment_of
from rlhf_stages.reporting.folder import Run, read_checkpoints, read_run

_SAME = "the same weights still"


@dataclass(frozen=True)
class Parent:
    """A checkpoint that a run started from.

    recorded: the digest of its weights when the run started. found: where it lies now. state: what has become of it.
    """

    role: str
    path: str
    recorded: str
    found: Path | None
    state: str

    @property
    def experiment(self) -> Path | None:
        """The experiment folder that it lies in."""
        folder = self.found.parent.parent if self.found else None
        return folder if folder and (folder / "args.json").is_file() else None


def parents_of(run: Run) -> list[Parent]:
    """The parents of a run, each looked for where it was and beside the run (folders may have been moved).

    Where both places hold one, it is the one with the weights that were recorded.
    """
    return [_parent(run, role, entry) for role, entry in run.group("parents").items() if isinstance(entry, Mapping)]


def _parent(run: Run, role: str, entry: Mapping[str, object]) -> Parent:
    path, recorded = str(entry.get("path", "")), str(entry.get("sha256", ""))
    places, above = [Path(path)], run.dir.resolve().parents
    if len(above) > 2:
        places.append(above[2].joinpath(*places[0].parts[-5:]))  # <dataset>/<name>/<stage>/checkpoints/<checkpoint>
    states = {place: state for place in places if (state := _state(place, recorded)) is not None}
    found = [Parent(role, path, recorded, place, state) for place, state in states.items()]
    if found:
        return next((parent for parent in found if parent.state == _SAME), found[0])
    if Path(path).is_dir():
        return Parent(role, path, recorded, Path(path), "a model folder from elsewhere")
    return Parent(role, path, recorded, None, "not there any more")


def _state(checkpoint: Path, recorded: str) -> str | None:
    """What has become of a checkpoint; None if it lies in no experiment."""
    experiment = experiment_of(checkpoint)
    if experiment is None:
        return None
    saved = {s.name: s for s in read_checkpoints(experiment)}.get(checkpoint.name)
    if saved is None:
        return "the checkpoint was removed since"
    if saved.sha256 is None:
        return saved.problem or "without a digest to compare"
    return _SAME if saved.sha256 == recorded else "other weights now: it was trained again after this run started"


def with_ancestors(directories: Iterable[Path]) -> list[Run]:
    """Read the experiments and all that they were made from, parents before children, each once."""
    runs: dict[Path, Run] = {}
    open_ones: set[Path] = set()

    def visit(directory: Path) -> None:
        key = directory.resolve()
        if key in runs or key in open_ones:  # the second: args.json of a damaged folder may name itself
            return
        open_ones.add(key)
        run = read_run(directory)
        for parent in parents_of(run):
            if parent.experiment is not None:
                visit(parent.experiment)
        runs[key] = run

    for directory in directories:
        visit(directory)
    return list(runs.values())


def base_models(checkpoints: Iterable[Path]) -> list[str]:
    """Hub ids or folders of the models that the SFT behind each checkpoint began with: each once, and none that is one
    of the checkpoints. A checkpoint that lies in no experiment began with nothing that is known.

    Raises:
        ValueError: an experiment that another was made from is not there any more, or the first does not say.
    """
    checkpoints = list(checkpoints)
    own = {checkpoint.resolve() for checkpoint in checkpoints}
    found = dict.fromkeys(_base_model(folder) for c in checkpoints if (folder := experiment_of(c)) is not None)
    return [base for base in found if Path(base).resolve() not in own]


def _base_model(experiment: Path) -> str:
    run, met = read_run(experiment), set[Path]()
    while parent := next((p for p in parents_of(run) if p.role == "sft"), None):
        met.add(run.dir.resolve())
        if parent.experiment is None or parent.experiment.resolve() in met:
            raise ValueError(f"{run.dir} was made from {parent.path}: {parent.state}; what that began with is unknown")
        run = read_run(parent.experiment)
    name = run.group("model_args").get("model_name")
    if not isinstance(name, str):
        raise ValueError(f"{run.dir / 'args.json'} does not say which model it began with (model_name: {name!r})")
    return name


def titles(runs: Iterable[Run]) -> dict[Path, str]:
    """A short title for each run: its stage, with as much before it as tells it from the others; else a number."""
    runs = list(runs)
    several_names = len({(run.dataset, run.name) for run in runs}) > 1
    several_datasets = len({run.dataset for run in runs}) > 1
    found, given = {}, Counter[str]()
    for run in runs:
        parts = [run.dataset] * several_datasets + [run.name] * several_names + [run.stage]
        title = "/".join(parts)
        given[title] += 1
        found[run.dir] = title if given[title] == 1 else f"{title} ({given[title]})"
    return found
