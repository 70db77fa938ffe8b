"""Models that only read: the reference and reward models."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import FrozenArgs, ModelArgs, PPOArgs
from rlhf_stages.models.actor_critic import ActorCritic, policy_of
from rlhf_stages.models.forward import AdaptersOff, unwrap, without_adapters
from rlhf_stages.models.loading import load_causal
from rlhf_stages.models.scalar import ScalarModel

Module = TypeVar("Module", bound=nn.Module)


def freeze(model: Module, device: torch.device, args: FrozenArgs | None = None) -> Module:
    """A model that only reads: evaluation mode, no gradients, on the device, or there only while it reads.

    Args:
        args: what becomes of its weights; without, they stay as they are.

    Raises:
        ValueError: flags ask for something that quantized weights do not offer.
    """
    hf = model.hf if isinstance(model, ScalarModel) else model
    if args is not None and _asked(args) and getattr(hf, "is_quantized", False):
        raise ValueError(f"{_asked(args)} does not go with --load_in_8bit or --load_in_4bit")
    model.eval().requires_grad_(False)
    if args is not None and args.frozen_dtype == "bf16":
        _halve(model)
    if args is not None and args.offload_frozen:
        Offload(model, device)
    else:
        model.to(device)
    return model


class Offload:
    """Keeps the weights of a frozen model in host memory, and on the device from the start to the end of each call.

    Nothing is copied back, as nothing has changed. Buffers, which are small, stay on the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._weights = list(model.parameters())
        # page-locked memory is what a GPU reads at full speed, without the CPU waiting for it
        pinned = device.type == "cuda"
        self._host = [weight.data.cpu().pin_memory() if pinned else weight.data.cpu() for weight in self._weights]
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self.move_out()
        model.register_forward_pre_hook(lambda *_: self.move_in())
        model.register_forward_hook(lambda *_: self.move_out(), always_call=True)  # also after an error

    def move_in(self) -> None:
        """To the device."""
        for weight, host in zip(self._weights, self._host, strict=True):
            weight.data = to_device(host, self._device)

    def move_out(self) -> None:
        """Off the device: the copies there are dropped."""
        for weight, host in zip(self._weights, self._host, strict=True):
            weight.data = host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of host memory on the device; what is computed there next waits for it."""
    return host.to(device, non_blocking=True)


def load_reference(
    policy: nn.Module,
    start: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    args: FrozenArgs,
    model_args: ModelArgs,
    freeze: Callable[[nn.Module], nn.Module],
) -> nn.Module:
    """What the policy started from; with LoRA the policy itself with its adapters off, else a second model.

    A policy that a plugin made something of has a reference of its own, too: other parts of it would not be off.

    Args:
        policy: as `fabric.setup` gave it.
        freeze: brings a second model to the device, for reading.

    Raises:
        ValueError: nothing loads from `start`; flags ask for something of frozen weights, and there are none.
    """
    own_class, others = None, False
    if isinstance(args, PPOArgs):
        own_class = args.actor_class
        others = args.share_backbone != "all" and bool(args.rm_experiment_dir or args.reward_config or args.reward)
    if model_args.finetune_mode == "lora" and own_class is None:
        if _asked(args) and not others:
            raise ValueError(
                f"{_asked(args)}: with LoRA the reference is the policy itself, and nothing else is frozen"
            )
        return AdaptersOff(policy_of(policy) if isinstance(unwrap(policy), ActorCritic) else policy)
    reference: nn.Module = load_causal(start, tokenizer, model_args)
    return freeze(reference)


def _asked(args: FrozenArgs) -> str:
    """The flags about frozen weights that were given."""
    given = {"--offload_frozen": args.offload_frozen, "--frozen_dtype": args.frozen_dtype != "fp32"}
    return " ".join(name for name, is_given in given.items() if is_given)


def _halve(model: nn.Module) -> None:
    """Weights to bf16, but for the head of a scalar model; buffers, such as the frequencies of rotations, stay."""
    head: list[nn.Parameter] = []
    if isinstance(model, ScalarModel):
        head += getattr(without_adapters(model.hf), model.head_name).parameters()
    kept = {id(parameter) for parameter in head}
    for parameter in model.parameters():
        if id(parameter) not in kept and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()
