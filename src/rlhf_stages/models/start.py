"""Which weights a stage starts from."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import ModelArgs, PPOArgs
from rlhf_stages.experiment import parent_checkpoint
from rlhf_stages.models.actor_critic import policy_of
from rlhf_stages.models.forward import check_context
from rlhf_stages.models.loading import load_causal, load_critic, prepare_training
from rlhf_stages.models.own import own_actor, own_critic
from rlhf_stages.models.scalar import ScalarModel
from rlhf_stages.models.sharing import Backbone


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


def start_actor(
    sft: str | Path, tokenizer: PreTrainedTokenizerBase, args: PPOArgs, model_args: ModelArgs, longest: int
) -> Any:
    """The actor of PPO: the SFT model, ready to train on texts of at most `longest` tokens.

    Raises:
        ValueError: as the functions that it calls.
    """
    actor = own_actor(prepare_training(load_causal(sft, tokenizer, model_args), model_args), args)
    check_context(policy_of(actor), longest)
    return actor


def start_critic(
    sft: Path,
    rm: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOArgs,
    model_args: ModelArgs,
    longest: int,
    backbone: Backbone | None = None,
) -> ScalarModel:
    """The critic of PPO, ready to train on texts of at most `longest` tokens: on a network of its own, or with adapters
    of its own on a backbone.

    Raises:
        ValueError: as the functions that it calls.
    """
    from_rm = args.critic_start == "rm"
    start = rm if from_rm and rm is not None else sft
    if backbone is not None and from_rm:
        return own_critic(backbone.load_adapted(start, tokenizer, model_args, trains=True), args)
    critic = load_critic(start, tokenizer, model_args, trained_head=from_rm)
    check_context(critic, longest)
    if backbone is not None:
        critic = backbone.carry(critic)
    return own_critic(prepare_training(critic, model_args), args)
