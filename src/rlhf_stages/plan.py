"""The order of the data: which records each step of each device sees, a function of the seed alone."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_stages.args import PPOArgs, TrainArgs
from rlhf_stages.data.shards import Records
from rlhf_stages.engines import engine_of

Batch = TypeVar("Batch")
Item = TypeVar("Item")
# a prime far above any number of steps, so that the streams of neighbouring seeds and ranks do not meet
SEED_STRIDE = 100_003


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


class Step(NamedTuple, Generic[Batch]):
    """One step of one device: its number from 1, its micro-batches, and the numbers of the records in each of them."""

    number: int
    batches: list[Batch]
    records: list[list[int]]


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

    def steps(
        self, shard: Records[Item], collate: Callable[[list[Item]], Batch], done: int = 0
    ) -> Iterator[Step[Batch]]:
        """The steps after the first `done`, with their micro-batches on the device."""
        for epoch in range(self._args.epochs):
            windows = self._windows(epoch=epoch)
            first = epoch * len(windows) + 1
            numbers = range(max(first, done + 1), min(first + len(windows), self.total_steps + 1))
            left = [windows[number - first] for number in numbers]
            loader: DataLoader[Any] = DataLoader(
                cast(Any, shard),  # to PyTorch it need only have numbers
                batch_sampler=[micro for window in left for micro in window],
                collate_fn=collate,
                num_workers=self._args.num_workers,
                pin_memory=self._fabric.device.type == "cuda",
                generator=torch.Generator(),  # else each start of a loader takes a number from the run's own
            )
            batches = iter(loader)
            for number, window in zip(numbers, left, strict=True):
                yield Step(number, [to_device(next(batches), self._fabric.device) for _ in window], window)


def validation_batches(
    shard: Records[Item] | None, size: int, collate: Callable[[list[Item]], Batch], fabric: Fabric, limit: int | None
) -> Iterator[Batch]:
    """Each record once over all devices, in order, `size` at a time; at most `limit` batches over all devices.

    Each device gets as many batches as the others, for a model in pieces reads with all of them or not at all; the last
    one may hold a record more. Only fewer records than devices leave some without.

    Raises:
        ValueError: so few, and the model is in pieces.
    """
    if shard is None:
        return
    stop = len(shard) if limit is None else min(len(shard), limit * size)
    least, mine = stop // fabric.world_size, range(fabric.global_rank, stop, fabric.world_size)
    if least == 0 and engine_of(fabric).divides_weights(fabric):
        raise ValueError(
            f"there are {stop} records to validate on, and the weights are divided over {fabric.world_size} devices, of"
            " which each must have one; raise --eval_iters, or prepare more"
        )
    count = max(-(-least // size), 1)
    for i in range(count):
        rows = mine[i * size : (i + 1) * size if i + 1 < count else None]
        if rows:
            yield to_device(collate([shard[row] for row in rows]), fabric.device)


def to_device(batch: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on the device; whatever else it has stays as it is."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {n: value.to(device, non_blocking=True) for n, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)
