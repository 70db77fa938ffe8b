"""One device, or DDP: every device has all weights and all of the optimizer. What other engines do differently, they
override."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_stages.args import FrozenArgs, TrainArgs
from rlhf_stages.state import on_host

Module = TypeVar("Module", bound=nn.Module)


class Engine:
    """What depends on how weights, gradients and optimizers are spread over devices.

    `divides_optimizer` says that each device holds a part of the optimizer's state, which it must save itself;
    `divides_frozen` that it holds a part of models that only read.
    """

    divides_optimizer = False
    divides_frozen = False

    def divides_weights(self, fabric: Fabric) -> bool:
        """Whether a forward needs all devices: each then has to make as many of them as the others."""
        return False

    def set_up(
        self, fabric: Fabric, model: nn.Module, args: TrainArgs, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[Any, Any, Optimizer]:
        """Give Fabric a model and its optimizer.

        Returns:
            Both as Fabric wraps them, and the optimizer of PyTorch, whose learning rate a schedule sets.

        Raises:
            ValueError: the settings of the engine contradict the flags.
        """
        optimizer = make_optimizer(model)
        prepared: Any = fabric.setup(model, optimizer)
        return *prepared, optimizer

    def divide(self, fabric: Fabric, model: Module, args: FrozenArgs | None) -> Module:
        """A frozen model in pieces, where `divides_frozen`; else the model as it is.

        Raises:
            ValueError: a flag about frozen weights does not go with that.
        """
        return model

    def accumulating(self, fabric: Fabric, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are exchanged after the last one of a step."""
        context: AbstractContextManager[Any] = fabric.no_backward_sync(model, enabled=not last)
        return context

    def step(
        self, fabric: Fabric, model: nn.Module, optimizer: Optimizer, loss: Tensor, max_norm: float
    ) -> tuple[Tensor, str | None]:
        """Clip the gradients, step, clear. If loss or gradients are not finite no weight changes.

        Args:
            loss: over all devices.

        Returns:
            The gradient norm over all devices before clipping, and what was not finite, if anything.
        """
        norm = self._clip(fabric, model, optimizer, max_norm)
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        fault = not_finite(loss, norm if scaler is None or scaler.get_scale() <= 1 else None)
        if fault:
            optimizer.zero_grad()  # a step without gradients changes nothing, and a loss scale has to see every step
        optimizer.step()
        optimizer.zero_grad()
        return norm, fault

    def _clip(self, fabric: Fabric, model: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
        return torch.as_tensor(fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False))

    def gathered(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it lasts every device has all weights of a model that `set_up` gave back, as its inner modules need
        them to be called by themselves and by one device alone, as `generate` does. All devices enter and leave it.
        """
        return nullcontext()

    def whole(self, fabric: Fabric, model: nn.Module, *, everywhere: bool = False) -> Any:
        """A copy of a model with all its weights in host memory, on the first device or everywhere, elsewhere None.

        All devices call this. The copy is of the class that was given to `set_up`.
        """
        return on_host(given(model)) if everywhere or fabric.is_global_zero else None

    def restore(self, fabric: Fabric, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Let `fill` put weights into the model as it was given to `set_up`; all devices call this."""
        fill(given(model))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of an optimizer that `set_up` gave back: this device's part of it where they are divided."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Take it over; after the weights."""
        optimizer.load_state_dict(state)


def given(model: nn.Module) -> Any:
    """The module that was given to `fabric.setup`."""
    return model.module if is_wrapped(model) else model


def not_finite(loss: Tensor, norm: Tensor | None) -> str | None:
    """What of the two is a NaN or infinite, in words."""
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    if norm is not None and not torch.isfinite(norm):
        return f"the gradient norm is {norm.item()}"
    return None
