"""DeepSpeed's ZeRO (Rajbhandari et al. 2020): stage 2 divides gradients and optimizer, stage 3 the weights as well."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import DeepSpeedPrecision, MixedPrecision
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_stages.args import FabricArgs, TrainArgs
from rlhf_stages.engines.deepspeed_file import check_batches, check_settings, read_deepspeed_file
from rlhf_stages.engines.plain import Engine, given, not_finite
from rlhf_stages.engines.skeleton import keep_skeleton, with_weights


def make_deepspeed(args: FabricArgs) -> dict[str, Any]:
    """Strategy and precision, for a name such as deepspeed_stage_2_offload or a file of DeepSpeed's settings.

    Raises:
        ValueError: DeepSpeed is not installed, has no such precision, or the file says what flags decide.
    """
    if args.precision == "16-mixed":
        raise ValueError("--precision=16-mixed does not go with DeepSpeed here; take --precision=bf16-mixed")
    named = args.strategy.startswith("deepspeed_")
    config = _config(args.strategy) if named else read_deepspeed_file(args.strategy)
    check_settings(config, args.precision, args.strategy)
    if find_spec("deepspeed") is None:
        raise ValueError(f"--strategy={args.strategy} needs DeepSpeed: pip install 'rlhf_stages[deepspeed]'")
    # weights stay fp32 and autocast computes, as everywhere else: DeepSpeed's own bf16 would round heads and scores
    config |= {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    if args.precision == "bf16-mixed":
        own = {"lower_precision_safe_modules": [], **config.get("torch_autocast", {})}  # gradients are summed in fp32
        config["torch_autocast"] = {**own, "enabled": True, "dtype": "bfloat16"}
    config = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **config}
    precision = DeepSpeedPrecision("32-true") if args.precision == "32-true" else _Autocast("bf16-mixed", "cuda")
    return {"strategy": _Strategy(config), "plugins": [precision]}


class _Strategy(DeepSpeedStrategy):  # type: ignore[misc]
    """`given` are the settings as they were; Fabric and `set_up` add to them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config=dict(config))
        self.given = config


def _config(name: str) -> dict[str, Any]:
    stage = int(name.removesuffix("_offload")[-1])
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    zero["reduce_bucket_size"] = 200_000_000  # numbers
    if name.endswith("_offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {"zero_optimization": zero}


class _Autocast(MixedPrecision):  # type: ignore[misc]
    """Autocast, with DeepSpeed's way of going backward."""

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        model.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        return optimizer.step(**kwargs)


class DeepSpeedEngine(Engine):
    """See `Engine`."""

    divides_optimizer = True

    def divides_weights(self, fabric: Fabric) -> bool:
        """With stage 3."""
        strategy: Any = fabric.strategy
        return bool(strategy.zero_stage_3)

    def set_up(
        self, fabric: Fabric, model: nn.Module, args: TrainArgs, make_optimizer: Callable[[nn.Module], Optimizer]
    ) -> tuple[Any, Any, Optimizer]:
        """DeepSpeed clips by itself, and is told how."""
        strategy: Any = fabric.strategy
        check_batches(strategy.given, args, fabric.world_size)
        strategy.config |= {
            "gradient_clipping": args.gradient_clip_val,
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_accumulation_steps": 1,  # `accumulating` says where a step ends: the last one may be smaller
            "train_batch_size": args.micro_batch_size * fabric.world_size,
        }
        keep_skeleton(model)
        return super().set_up(fabric, model, args, make_optimizer)

    def accumulating(self, fabric: Fabric, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """DeepSpeed divides each micro-batch's gradients at once, and adds them up."""
        _engine(model).set_gradient_accumulation_boundary(last)
        return nullcontext()

    def step(
        self, fabric: Fabric, model: nn.Module, optimizer: Optimizer, loss: Tensor, max_norm: float
    ) -> tuple[Tensor, str | None]:
        """DeepSpeed leaves a step out whose norm is not finite; a loss that is not has it think so."""
        engine = _engine(model)
        zero = engine.optimizer
        if not torch.isfinite(loss):
            infinite = torch.full((), torch.inf, device=fabric.device)
            name = "_get_norm_groups" if _divides_weights(model) else "scaled_global_norm"
            setattr(zero, name, lambda: [infinite] if _divides_weights(model) else infinite)  # in front of the method
            engine.step()
            delattr(zero, name)
        else:
            engine.step()
        norm = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32, device=fabric.device)
        return norm, not_finite(loss, norm)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Stage 3 collects all weights and takes away the hooks that would let go of them; stages 1 and 2 have them."""
        if not _divides_weights(model):
            yield
            return
        import deepspeed

        hooks = _engine(model).optimizer.parameter_offload
        if not hooks.forward_hooks:  # within itself
            yield
            return
        with deepspeed.zero.GatheredParameters(list(given(model).parameters())):
            hooks._remove_module_hooks()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            try:
                yield
            finally:
                hooks.setup_zero_stage3_hooks()

    def whole(self, fabric: Fabric, model: nn.Module, *, everywhere: bool = False) -> Any:
        """One weight after the other, so that no device holds more than one of them whole."""
        root, keep, weights = given(model), everywhere or fabric.is_global_zero, {}
        for name, parameter in root.named_parameters():
            with _whole_parameter(model, parameter):
                if keep:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return with_weights(root, weights) if keep else None

    def restore(self, fabric: Fabric, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Fill a copy, and give it to DeepSpeed, whose optimizer has weights of its own."""
        whole = self.whole(fabric, model, everywhere=True)
        fill(whole)
        weights = dict(whole.named_parameters())
        for name, parameter in given(model).named_parameters():
            with _whole_parameter(model, parameter, modifier_rank=0):
                parameter.detach().copy_(weights[name].detach())
        _engine(model).optimizer.refresh_fp32_params()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State of the optimizer inside of DeepSpeed's: that of this device's part of the weights."""
        with _parts_in_groups(optimizer.optimizer) as inner:
            state: dict[str, Any] = inner.state_dict()
        return state

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Take it over."""
        with _parts_in_groups(optimizer.optimizer) as inner:
            inner.load_state_dict(state)


def _engine(model: nn.Module) -> Any:
    """DeepSpeed's engine inside Fabric's wrapper."""
    return model._forward_module


def _divides_weights(model: nn.Module) -> bool:
    return bool(_engine(model).zero_optimization_stage() == 3)


def _whole_parameter(model: nn.Module, parameter: Any, **given_on: Any) -> AbstractContextManager[Any]:
    if not _divides_weights(model):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], **given_on)
    return context


@contextmanager
def _parts_in_groups(zero: Any) -> Iterator[Optimizer]:
    """The optimizer of PyTorch inside; stage 3 leaves its groups empty between steps."""
    fill = getattr(zero, "_set_fp32_optimizer_param_groups", None)
    if fill is not None:
        fill()
    try:
        yield zero.optimizer
    finally:
        if fill is not None:
            zero._clear_fp32_optimizer_param_groups()
