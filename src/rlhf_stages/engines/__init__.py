"""How a run is spread over devices: DDP, FSDP2 or DeepSpeed, behind one interface (`plain.Engine`)."""

import os
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

from rlhf_stages.args import FabricArgs
from rlhf_stages.engines.deepspeed import DeepSpeedEngine, make_deepspeed
from rlhf_stages.engines.fsdp import FsdpEngine, make_fsdp
from rlhf_stages.engines.plain import Engine

_PLAIN, _FSDP, _DEEPSPEED = Engine(), FsdpEngine(), DeepSpeedEngine()


def engine_of(fabric: Fabric) -> Engine:
    """What the strategy of a run needs done in its own way."""
    strategy = getattr(fabric, "strategy", None)
    if isinstance(strategy, ModelParallelStrategy):
        return _FSDP
    return _DEEPSPEED if isinstance(strategy, DeepSpeedStrategy) else _PLAIN


def make_fabric(args: FabricArgs) -> Fabric:
    """A Fabric, not launched.

    Raises:
        ValueError: the flags do not go together, or a package is missing.
    """
    args = _launched(args)
    given: dict[str, Any] = {"precision": args.precision, "strategy": args.strategy}
    devices = count_devices(args)
    if args.strategy == "ddp" or (args.strategy == "auto" and devices > 1):
        # every rank computes the same buffers; broadcasting them would make each validation forward a collective call.
        # Gradients lie in the buckets they are exchanged in, else there would be two of each
        given["strategy"] = DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    elif args.strategy == "fsdp":
        given["strategy"] = make_fsdp(args, devices)
    elif args.strategy != "auto":
        given = make_deepspeed(args)
    try:
        return Fabric(accelerator=args.accelerator, devices=args.devices, num_nodes=args.num_nodes, **given)
    except Exception as error:  # Fabric raises its own types, e.g. for a device that is not there
        raise ValueError(f"--accelerator={args.accelerator} --devices={args.devices}: {error}") from None


def count_devices(args: FabricArgs) -> int:
    """Devices of a run over all machines, one process each."""
    if args.devices.isdigit():
        devices = int(args.devices)
    elif args.devices == "auto":
        devices = 1 if args.accelerator == "cpu" else torch.cuda.device_count()
    else:
        devices = len(args.devices.split(","))
    return args.num_nodes * devices


def _launched(args: FabricArgs) -> FabricArgs:
    """The flags, where `torchrun` has started the processes and they are left open: as many as it started."""
    local, every = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or args.devices != "auto" or local is None or every is None:
        return args
    return replace(args, devices=local, num_nodes=int(every) // int(local))
