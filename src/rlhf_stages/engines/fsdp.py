"""FSDP2: each device holds a slice of every weight, gradient and optimizer moment (Zhao et al. 2023, fully_shard)."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from rlhf_stages.args import FabricArgs, FrozenArgs, TrainArgs
from rlhf_stages.engines.plain import Engine, given
from rlhf_stages.engines.skeleton import keep_skeleton, with_weights

Module = TypeVar("Module", bound=nn.Module)


def make_fsdp(args: FabricArgs, devices: int) -> ModelParallelStrategy:
    """The strategy for `--strategy=fsdp`: weights are divided over all devices.

    Raises:
        ValueError: the precision is not one of FSDP2's.
    """
    if args.precision == "16-mixed":
        raise ValueError("--precision=16-mixed has no loss scale under --strategy=fsdp; take --precision=bf16-mixed")
    # scores are a view of the head's output; nothing writes into them
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return _Strategy(args.precision, devices)


class _Strategy(ModelParallelStrategy):  # type: ignore[misc]
    """Decoder layers are gathered in the compute precision, the rest (embeddings, heads) in fp32."""

    def __init__(self, precision: str, devices: int) -> None:
        super().__init__(self._shard, data_parallel_size=devices, tensor_parallel_size=1)
        self._dtype = {"bf16-mixed": torch.bfloat16}.get(precision)

    def _shard(self, model: Module, mesh: DeviceMesh) -> Module:
        # autocast does the rest: the residual stream stays fp32 as in a run on one device
        layer_policy = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=layer_policy)
        # with True for the root as well its weights are in pieces whenever none of its layers is at work
        fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=True)
        return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself would not split; none for a model that names none."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


class FsdpEngine(Engine):
    """See `Engine`."""

    divides_optimizer = True
    divides_frozen = True

    def __init__(self) -> None:
        self._gathered: WeakSet[nn.Module] = WeakSet()

    def divides_weights(self, fabric: Fabric) -> bool:
        """Always."""
        return True

    def set_up(
        self, fabric: Fabric, model: nn.Module, args: TrainArgs, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[Any, Any, Optimizer]:
        """First the model, then an optimizer of its pieces; no device ever holds more than a layer of it whole."""
        for parameter in model.parameters():  # new heads and adapters are random: those of the first, as DDP has it
            first = parameter.detach().to(fabric.device)
            torch.distributed.broadcast(first, src=0)
            parameter.detach().copy_(first)
        keep_skeleton(model)
        module = fabric.setup_module(model, move_to_device=False)
        given(module).to(fabric.device)  # buffers
        optimizer = make_optimizer(model)
        return module, fabric.setup_optimizers(optimizer), optimizer

    def divide(self, fabric: Fabric, model: Module, args: FrozenArgs | None) -> Module:
        """Like a model in training, with what is not a layer in fp32."""
        if args is not None and (args.offload_frozen or args.frozen_dtype != "fp32"):
            raise ValueError(
                "--offload_frozen and --frozen_dtype do not go with --strategy=fsdp, which divides frozen weights"
                " over the devices instead"
            )
        strategy = cast(_Strategy, fabric.strategy)
        return strategy._shard(model, strategy.device_mesh).to(fabric.device)

    def accumulating(self, fabric: Fabric, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Every micro-batch exchanges its gradients: kept for later they would be whole on each device."""
        return nullcontext()

    def _clip(self, fabric: Fabric, model: Any, optimizer: Optimizer, max_norm: float) -> Tensor:
        return _full(super()._clip(fabric, model, optimizer, max_norm))

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Whole in the compute precision; within itself this does nothing more."""
        root = given(model)
        if root in self._gathered:
            yield
            return
        parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        root._get_fsdp_state()._lazy_init()  # else the first inner module to be called would be taken for the root
        self._gathered.add(root)
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            self._gathered.remove(root)
            for part in parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def whole(self, fabric: Fabric, model: nn.Module, *, everywhere: bool = False) -> Any:
        """One weight after the other, so that no device holds more than one of them whole."""
        root, keep = given(model), everywhere or fabric.is_global_zero
        weights = {}
        for name, parameter in root.named_parameters():
            full = _full(parameter.detach())
            if keep:
                weights[name] = full.to("cpu", copy=True)
        return with_weights(root, weights) if keep else None

    def restore(self, fabric: Fabric, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Fill a copy, of which each device cuts out its own slices."""
        whole = self.whole(fabric, model, everywhere=True)
        fill(whole)
        weights = dict(whole.named_parameters())
        for name, parameter in given(model).named_parameters():
            parameter.detach().copy_(_cut(weights[name].detach(), parameter))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The slices of this device as plain tensors."""
        state: dict[str, Any] = optimizer.optimizer.state_dict()
        moments = {i: {name: _local(value) for name, value in of.items()} for i, of in state["state"].items()}
        return {**state, "state": moments}

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """The slices of this device, made parts of whole moments again."""
        parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        moments = {
            i: {name: _like(value, parameters[i]) for name, value in of.items()} for i, of in state["state"].items()
        }
        optimizer.optimizer.load_state_dict({**state, "state": moments})


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _cut(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every device has, as slices like those of another."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _like(value: Any, parameter: Tensor) -> Any:
    """A slice, as the part of a whole that the same slice of a parameter is of its own."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
