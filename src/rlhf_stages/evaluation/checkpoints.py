"""What is compared: the checkpoints that --experiment_dirs names."""

from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf_stages.experiment import stage_name
from rlhf_stages.files import read_json


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
