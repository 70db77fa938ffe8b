"""Models that only read: the reference and reward models."""

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.actor_critic import ActorCritic, policy_of
from rlhf_stages.models.forward import AdaptersOff, unwrap
from rlhf_stages.models.loading import load_causal

Module = TypeVar("Module", bound=nn.Module)


def freeze(model: Module, device: torch.device) -> Module:
    """A model that only reads: evaluation mode, no gradients, on the device."""
    model.eval().requires_grad_(False).to(device)
    return model


def load_reference(
    policy: nn.Module,
    start: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    model_args: ModelArgs,
    device: torch.device,
    own_class: str | None = None,
) -> nn.Module:
    """What the policy started from; with LoRA the policy itself with its adapters off, else a second model.

    Args:
        policy: as `fabric.setup` gave it.
        own_class: the plugin that made something of the policy, whose other parts would not be off.

    Raises:
        ValueError: nothing loads from `start`.
    """
    if model_args.finetune_mode == "lora" and own_class is None:
        return AdaptersOff(policy_of(policy) if isinstance(unwrap(policy), ActorCritic) else policy)
    reference: nn.Module = load_causal(start, tokenizer, model_args)
    return freeze(reference, device)
