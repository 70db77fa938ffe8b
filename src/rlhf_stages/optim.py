"""Optimizers and learning-rate schedules."""

import math
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlhf_stages.args import TrainArgs
from rlhf_stages.engines import engine_of

MINIMUM_LEARNING_RATE = 1e-6


def make_optimizer(model: nn.Module, args: TrainArgs, learning_rate: float, fused: bool = False) -> Optimizer:
    """Adam or AdamW over what trains; only tensors of two or more dimensions decay.

    Args:
        fused: one kernel for all of a step of Adam and AdamW, see `can_fuse`.

    Raises:
        ValueError: nothing trains, or a package is missing.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model trains; look at --finetune_mode and --lora_targets")
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    cls: Any = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "AdamW8bit": _adamw8bit}[args.optimizer]
    optimizer: Optimizer = cls(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(args.optimizer_beta1, args.optimizer_beta2),
        eps=args.optimizer_eps,
        **({"fused": True} if fused and args.optimizer != "AdamW8bit" else {}),
    )
    return optimizer


def can_fuse(fabric: Fabric) -> bool:
    """Whether a fused optimizer fits: on a GPU, but not beside the loss scale of 16-mixed.

    A fused step would divide by that scale itself, which is too late to clip the gradient: Fabric refuses it.
    """
    return fabric.device.type == "cuda" and getattr(fabric.strategy.precision, "scaler", None) is None


def _adamw8bit(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """AdamW whose two moments are kept in 8 bit, in blocks of 256 (Dettmers et al. 2022); small tensors keep fp32."""
    if find_spec("bitsandbytes") is None:
        raise ValueError("--optimizer=AdamW8bit needs bitsandbytes: pip install 'rlhf_stages[memory]'")
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(groups, **settings)
    return optimizer


def make_schedule(optimizer: Optimizer, rate: tuple[float, str, int], total_steps: int) -> LambdaLR:
    """Linear warm-up to the peak, then constant, or along a line or a cosine down to the floor at the last step.

    The floor is 1e-6, or a tenth of the peak where that is less, so that the rate never rises again. A warm-up that is
    not over after half the run is cut to a tenth of it, with a warning.

    Args:
        rate: peak learning rate, `constant`, `linear` or `cosine`, and steps of warm-up; counted as the caller steps.
    """
    peak, kind, warmup_steps = rate
    if warmup_steps > total_steps // 2:
        shortened = total_steps // 10
        warnings.warn(
            f"a warm-up of {warmup_steps} steps is more than half of the {total_steps} steps; {shortened} are used",
            stacklevel=2,
        )
        warmup_steps = shortened
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, peak, warmup_steps, total_steps, kind))


def set_up(
    fabric: Fabric, model: nn.Module, args: TrainArgs, rate: tuple[float, str, int], total_steps: int
) -> tuple[Any, Any, LambdaLR]:
    """Give Fabric a model and its optimizer, and make its schedule (see `make_schedule`).

    Raises:
        ValueError: as `make_optimizer`, or an optimizer or other flags do not go with the strategy.
    """
    engine = engine_of(fabric)
    if args.optimizer == "AdamW8bit" and engine.divides_optimizer:
        raise ValueError("--optimizer=AdamW8bit does not go with FSDP or DeepSpeed, which split each weight")
    fused = can_fuse(fabric)
    model, prepared, optimizer = engine.set_up(
        fabric, model, args, lambda module: make_optimizer(module, args, rate[0], fused)
    )
    return model, prepared, make_schedule(optimizer, rate, total_steps)


def learning_rate_factor(step: int, peak: float, warmup_steps: int, total_steps: int, kind: str = "cosine") -> float:
    """Share of the peak learning rate that step number `step` (from 0) uses."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    floor = min(MINIMUM_LEARNING_RATE / peak, 0.1) if peak > 0 else 0.0
    progress = min((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[kind]
    return floor + (1 - floor) * left
