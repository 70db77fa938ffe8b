"""Which weights a stage starts from."""

from pathlib import Path
from typing import Any

from rlhf_stages.experiment import parent_checkpoint


def starting_point(model_name: str | None, *, sft: str | None) -> tuple[str | Path, dict[str, Path]]:
    """The model to load: the SFT experiment's checkpoint if one is given, else the named model.

    Returns:
        What to load, and the parents to note in `args.json`.

    Raises:
        ValueError: neither is given, or the experiment was made from another model than `model_name`.
    """
    if sft is None:
        if model_name is None:
            raise ValueError("give --sft_experiment_dir (an SFT experiment) or --model_name (hub id or folder)")
        return model_name, {}
    checkpoint, sft_args = parent_checkpoint(sft, stage="sft", flag="--sft_experiment_dir")
    check_model_name(model_name, sft_args, "--sft_experiment_dir")
    return checkpoint, {"sft": checkpoint}


def check_model_name(model_name: str | None, parent_args: dict[str, Any], flag: str) -> None:
    """Refuse a `--model_name` that contradicts the experiment whose weights are used.

    Raises:
        ValueError: the two differ.
    """
    model_args = parent_args.get("model_args")
    parent = model_args.get("model_name") if isinstance(model_args, dict) else None
    if None not in (model_name, parent) and model_name != parent:
        raise ValueError(
            f"--model_name={model_name} contradicts {flag}, which was made from {parent}; its weights come from there,"
            " so leave --model_name out"
        )
