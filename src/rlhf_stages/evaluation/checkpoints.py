"""What is compared: the checkpoints that --experiment_dirs names."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from rlhf_stages.experiment import dataset_of, resolve_checkpoint, stage_name
from rlhf_stages.files import read_json


def checkpoints_of(paths: Iterable[str]) -> tuple[list[Path], list[str]]:
    """The checkpoints that paths mean, and a sentence for each path that has none, or a damaged one.

    Raises:
        FileNotFoundError, ValueError: no path has any.
    """
    found, problems = list[Path](), list[FileNotFoundError | ValueError]()
    for path in paths:
        try:
            found.append(resolve_checkpoint(path))
        except (FileNotFoundError, ValueError) as problem:
            problems.append(problem)
    if problems and not found:
        raise type(problems[0])("; ".join(map(str, problems)))
    return found, [f"left out: {problem}" for problem in problems]


def of_other_data(checkpoints: Mapping[str, Path], dataset: str) -> list[str]:
    """A sentence, if checkpoints, by name, come from runs on other data than they are compared on."""
    origins = {name: dataset_of(checkpoint) for name, checkpoint in checkpoints.items()}
    others = [f"{name} comes from {origin}" for name, origin in origins.items() if origin not in (None, dataset)]
    if not others:
        return []
    return [
        f"{', '.join(others)}; compared on {dataset}: a difference may come from the data as much as from the training"
    ]


def is_reward_model(checkpoint: Path) -> bool:
    """Whether a model folder holds a model that scores texts, by the architecture that its config.json names."""
    names = read_json(checkpoint / "config.json").get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def named(checkpoints: Iterable[Path], taken: Collection[str]) -> dict[str, Path]:
    """The checkpoints, each once, by names that differ from each other and from those that are taken."""
    found: dict[str, Path] = {}
    for checkpoint in checkpoints:
        if checkpoint not in found.values():
            found[stage_name(checkpoint, taken={*found, *taken})] = checkpoint
    return found
