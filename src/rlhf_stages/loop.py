"""What the training scripts share besides their story: devices, order of the data, accumulation, cadence."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import FabricArgs, PPOArgs, TrainArgs
from rlhf_stages.data.info import DataInfo
from rlhf_stages.data.shards import Record, Shard, open_shard
from rlhf_stages.experiment import Experiment
from rlhf_stages.models.forward import unwrap
from rlhf_stages.models.loading import save_model

Batch = TypeVar("Batch")
Module = TypeVar("Module", bound=nn.Module)
# a prime far above any number of steps, so that the streams of neighbouring seeds and ranks do not meet
SEED_STRIDE = 100_003


def start_fabric(args: FabricArgs, seed: int) -> Fabric:
    """Launch the processes and seed each with `seed + 100003 * rank`.

    Raises:
        ValueError: Fabric refuses the combination of flags.
    """
    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    try:
        fabric = Fabric(
            accelerator=args.accelerator,
            devices=args.devices,
            num_nodes=args.num_nodes,
            strategy=_strategy(args),
            precision=args.precision,
        )
    except Exception as error:  # Fabric raises its own types, e.g. for a device that is not there
        raise ValueError(f"--accelerator={args.accelerator} --devices={args.devices}: {error}") from None
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    fabric.launch()
    seed_everything(seed + SEED_STRIDE * fabric.global_rank, verbose=False)
    return fabric


def _strategy(args: FabricArgs) -> Any:
    if args.devices.isdigit():
        devices = int(args.devices)
    elif args.devices == "auto":
        devices = 1 if args.accelerator == "cpu" else torch.cuda.device_count()
    else:
        devices = len(args.devices.split(","))
    if args.strategy == "ddp" or (args.strategy == "auto" and args.num_nodes * devices > 1):
        # every rank computes the same buffers; broadcasting them would make each validation forward a collective call
        return DDPStrategy(broadcast_buffers=False)
    return args.strategy


def epoch_windows(
    count: int, *, mini: int, micro: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> list[list[list[int]]]:
    """Sample indices of one epoch for one device: a list per optimizer step of its micro-batches.

    The order is a permutation by (seed, epoch) that all devices share; device r takes every world_size-th sample of it,
    so that step k sees the same samples however many devices there are. Nothing is dropped: the last step is smaller.
    Where the count does not divide by the devices, the first samples of the order come once more at its end.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * SEED_STRIDE + epoch)).tolist()
    order += [order[i % count] for i in range(-count % world_size)]
    mine = order[rank::world_size]
    return [
        [mine[i : min(i + micro, start + mini)] for i in range(start, min(start + mini, len(mine)), micro)]
        for start in range(0, len(mine), mini)
    ]


def update_windows(count: int, args: PPOArgs, step: int) -> list[list[list[int]]]:
    """Rows of a rollout of `count` responses for each update of a PPO step, over all its epochs."""
    return [
        window
        for epoch in range(args.ppo_epochs)
        for window in epoch_windows(
            count,
            mini=args.mini_batch_size,
            micro=args.micro_batch_size,
            seed=args.seed,
            epoch=step * args.ppo_epochs + epoch,
        )
    ]


class Plan:
    """Which samples each optimizer step sees, over all epochs up to `max_steps`."""

    def __init__(self, fabric: Fabric, args: TrainArgs, count: int, *, mini: int, micro: int) -> None:
        self._fabric = fabric
        self._args = args
        self._windows = partial(
            epoch_windows,
            count,
            mini=mini,
            micro=micro,
            seed=args.seed,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )
        every = args.epochs * len(self._windows(epoch=0))
        self.total_steps = every if args.max_steps is None else min(every, args.max_steps)

    def steps(self, shard: Shard, collate: Callable[[list[Record]], Batch]) -> Iterator[list[Batch]]:
        """The micro-batches of each step, on the device."""
        remaining = self.total_steps
        for epoch in range(self._args.epochs):
            windows = self._windows(epoch=epoch)[:remaining]
            remaining -= len(windows)
            loader = DataLoader(
                shard,
                batch_sampler=[micro for window in windows for micro in window],
                collate_fn=collate,
                num_workers=self._args.num_workers,
                pin_memory=self._fabric.device.type == "cuda",
            )
            batches = iter(loader)
            for window in windows:
                yield [to_device(next(batches), self._fabric.device) for _ in window]


def validation_batches(
    shard: Shard | None, size: int, collate: Callable[[list[Record]], Batch], fabric: Fabric, limit: int | None
) -> Iterator[Batch]:
    """Each record once over all devices, in order, `size` at a time; at most `limit` batches over all devices."""
    if shard is None:
        return
    stop = len(shard) if limit is None else min(len(shard), limit * size)
    mine = range(fabric.global_rank, stop, fabric.world_size)
    for start in range(0, len(mine), size):
        yield to_device(collate([shard[i] for i in mine[start : start + size]]), fabric.device)


def accumulate(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_sum: Callable[[Batch], Tensor],
    count: Callable[[Batch], Tensor],
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Backward of one optimizer step, the same however the samples are cut into micro-batches and devices.

    The gradient is that of weight * (sum of all losses) / (all that counts) over every micro-batch and device.

    Returns:
        The loss (without `weight`), and the count, both over all devices.
    """
    total = global_sum(fabric, sum_tensors(count(batch) for batch in micro_batches)).clamp(min=1)
    loss = torch.zeros((), device=fabric.device)
    for i, batch in enumerate(micro_batches):
        with fabric.no_backward_sync(model, enabled=i < len(micro_batches) - 1):
            part = loss_sum(batch) / total
            # devices' gradients are averaged, while the sum over devices is wanted
            fabric.backward(part * (weight * fabric.world_size))
        loss += part.detach()
    return global_sum(fabric, loss), total


def optimizer_step(fabric: Fabric, model: nn.Module, optimizer: Optimizer, clip: float, what: str = "") -> Tensor:
    """Clip the gradient norm, step, clear.

    Returns:
        The norm before clipping.

    Raises:
        FloatingPointError: the norm is not finite; the weights are as they were.
    """
    norm: Any = fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
    if not torch.isfinite(norm) and getattr(fabric._precision, "scaler", None) is None:
        raise FloatingPointError(
            f"the {what} gradient norm is {norm.item()}; lower the learning rate or check the data"
        )
    optimizer.step()
    optimizer.zero_grad()
    return torch.as_tensor(norm)


def global_sum(fabric: Fabric, value: Tensor) -> Tensor:
    """Sum of a tensor over all devices."""
    total: Any = fabric.all_reduce(value, reduce_op="sum")
    return torch.as_tensor(total)


def sum_tensors(values: Iterable[Tensor]) -> Tensor:
    """Sum of scalar tensors, at least one."""
    return torch.stack(list(values)).sum()


def to_device(batch: Any, device: torch.device) -> Any:
    """A dataclass of tensors on the device."""
    return dataclasses.replace(
        batch, **{f.name: getattr(batch, f.name).to(device, non_blocking=True) for f in dataclasses.fields(batch)}
    )


def padding(batches: Sequence[Any]) -> Tensor:
    """Percentage of the places in these batches that hold padding."""
    real = sum_tensors(batch.attention_mask.sum() for batch in batches)
    share: Tensor = real / sum(batch.attention_mask.numel() for batch in batches)
    return 100 * (1 - share)


def prompt_shard_name(data_dir: Path, split: str) -> str:
    """Shard of the prompts for PPO: `prompt_<split>.pt` where the data have one, else those of fine-tuning."""
    name = f"prompt_{split}.pt"
    return name if (data_dir / "prompt_train.pt").is_file() else f"finetune_{split}.pt"


def open_validation(data_dir: Path, name: str, *, responses: int, vocab_size: int, rated: bool = False) -> Shard | None:
    """The validation shard, or None with a warning where the data were prepared without one."""
    path = data_dir / name
    if path.is_file():
        return open_shard(path, responses=responses, vocab_size=vocab_size, rated=rated)
    warnings.warn(f"no {path}: nothing is validated, and `best` is the last checkpoint", stacklevel=2)
    return None


def is_due(step: int, interval: int, total_steps: int) -> bool:
    """Whether something done every `interval` steps, and at the end, is done after this step (counted from 1)."""
    return step % interval == 0 or step == total_steps


def open_experiment(
    fabric: Fabric,
    args: TrainArgs,
    info: DataInfo,
    stage: str,
    groups: Mapping[str, Any],
    parents: Mapping[str, Path] | None = None,
) -> Experiment:
    """Create the folder of this run on the first process; an error there ends all of them.

    Raises:
        ValueError: the folder exists (see `Experiment.create`).
    """
    directory = Path(args.log_dir) / info.dataset / args.run_name / stage
    problem = None
    if fabric.is_global_zero:
        try:
            Experiment.create(
                directory,
                stage=stage,
                overwrite=args.overwrite,
                arguments={**groups, "data_args": info.raw},
                parents=parents or {},
            )
        except OSError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem:
        raise ValueError(problem)
    return Experiment(directory)


def freeze(fabric: Fabric, model: Module) -> Module:
    """A model that only reads: evaluation mode, no gradients, on the device."""
    model.eval().requires_grad_(False).to(fabric.device)
    return model


def save_checkpoint(
    fabric: Fabric, experiment: Experiment, step: int, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the checkpoint of a step on the first process; the others wait."""
    if fabric.is_global_zero:
        experiment.save_checkpoint(step, lambda folder: save_model(unwrap(model), tokenizer, folder))
    fabric.barrier()


def finish(fabric: Fabric, experiment: Experiment, summary: Mapping[str, Any], next_command: str) -> Path:
    """Write summary.json and say where everything is and what to run next."""
    if fabric.is_global_zero:
        experiment.finish(summary)
        print("\n".join(f"{name:24} {value:.4g}" for name, value in summary.items()))
        print(f"experiment               {experiment.dir}\nnext                     {next_command}")
    fabric.barrier()
    return experiment.dir
