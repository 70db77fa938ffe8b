"""Optimizers and learning-rate schedules."""

import math
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rlhf_stages.args import TrainArgs

MINIMUM_LEARNING_RATE = 1e-6


def make_optimizer(model: nn.Module, args: TrainArgs, learning_rate: float) -> Optimizer:
    """Adam or AdamW over what trains; only tensors of two or more dimensions decay.

    Raises:
        ValueError: nothing trains.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter of the model trains; look at --finetune_mode and --lora_targets")
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    cls = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[args.optimizer]
    optimizer: Optimizer = cls(
        [group for group in groups if group["params"]],
        lr=learning_rate,
        betas=(args.optimizer_beta1, args.optimizer_beta2),
        eps=args.optimizer_eps,
    )
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
    """Give Fabric a model and its optimizer, and make its schedule (see `make_schedule`)."""
    optimizer = make_optimizer(model, args, rate[0])
    schedule = make_schedule(optimizer, rate, total_steps)
    prepared: Any = fabric.setup(model, optimizer)
    return *prepared, schedule


def learning_rate_factor(step: int, peak: float, warmup_steps: int, total_steps: int, kind: str = "cosine") -> float:
    """Share of the peak learning rate that step number `step` (from 0) uses."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    floor = min(MINIMUM_LEARNING_RATE / peak, 0.1) if peak > 0 else 0.0
    progress = min((step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[kind]
    return floor + (1 - floor) * left
