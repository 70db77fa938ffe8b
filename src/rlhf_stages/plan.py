"""The order of the data: which records each step of each device sees, a function of the seed alone."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from rlhf_stages.args import PPOArgs, TrainArgs
from rlhf_stages.data.packing import PackedShard
from rlhf_stages.data.shards import Records, Size
from rlhf_stages.engines import engine_of

Batch = TypeVar("Batch")
Item = TypeVar("Item")
# a prime far above any number of steps, so that the streams of neighbouring seeds and ranks do not meet
SEED_STRIDE = 100_003
_STOP = {signal.SIGTERM}


class Budget(NamedTuple):
    """Micro-batches by size: at most `tokens` places each, padding included; `sizes` are those of the samples."""

    tokens: int
    sizes: Sequence[Size]

    def cut(self, samples: Sequence[int], at_least: int = 1) -> list[list[int]]:
        """Samples, longest first, in as few micro-batches as the budget allows, but `at_least` so many.

        A micro-batch takes (texts of its samples) x (its longest text) places. A sample that is larger than the budget
        stands alone. There must be `at_least` samples.
        """
        parts: list[list[int]] = []
        texts = longest = 0
        for sample in sorted(samples, key=lambda sample: -self.sizes[sample][1]):
            texts += self.sizes[sample][0]
            if not parts or texts * longest > self.tokens:
                parts.append([])
                texts, longest = self.sizes[sample]
            parts[-1].append(sample)
        while len(parts) < at_least:
            most = max(parts, key=len)
            parts.insert(parts.index(most) + 1, most[len(most) // 2 :])
            del most[len(most) // 2 :]
        return parts


def epoch_windows(
    count: int,
    *,
    mini: int,
    micro: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    budget: Budget | None = None,
) -> list[list[list[int]]]:
    """Sample indices of one epoch for one device: a list per optimizer step of its micro-batches.

    The order is a permutation by (seed, epoch) that all devices share; device r takes every world_size-th sample of it,
    so that step k sees the same samples however many devices there are. Nothing is dropped: the last step is smaller.
    Where the count does not divide by the devices, the first samples of the order come once more at its end.

    With a `budget` the micro-batches of a step are cut by size, and not `micro` samples each; the samples of the step
    stay the same.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * SEED_STRIDE + epoch)).tolist()
    order += [order[i % count] for i in range(-count % world_size)]
    steps = pieces(order, mini * world_size)
    if budget is None:
        return [pieces(step[rank::world_size], micro) for step in steps]
    return [cut_alike([(budget, step[r::world_size]) for r in range(world_size)], rank) for step in steps]


def pieces(samples: list[int], size: int) -> list[list[int]]:
    """So many samples at a time, in their order; the last piece may be smaller."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def cut_alike(devices: Sequence[tuple[Budget, list[int]]], rank: int) -> list[list[int]]:
    """Micro-batches of one device, as many as on each of the others: sharded models wait for each other in each."""
    at_least = max(len(budget.cut(samples)) for budget, samples in devices)
    budget, samples = devices[rank]
    return budget.cut(samples, at_least)


def update_windows(fabric: Fabric, lengths: Sequence[int], args: PPOArgs, step: int) -> list[list[list[int]]]:
    """Rows of a rollout for each update of a PPO step, over all its epochs.

    With `--cuda_graphs` the rows of an update are cut in the order of their lengths: few micro-batches are wide then.

    Args:
        lengths: B numbers, the tokens of each prompt with its response.
    """
    windows = [
        window
        for epoch in range(args.ppo_epochs)
        for window in epoch_windows(
            len(lengths),
            mini=args.mini_batch_size,
            micro=args.micro_batch_size,
            seed=args.seed,
            epoch=step * args.ppo_epochs + epoch,
        )
    ]
    if args.micro_batch_tokens is None and not args.cuda_graphs:
        return windows
    steps = [list(chain.from_iterable(window)) for window in windows]
    if args.micro_batch_tokens is None:
        longest_first = [sorted(step, key=lambda row: -lengths[row]) for step in steps]
        return [pieces(step, args.micro_batch_size) for step in longest_first]
    everywhere: Any = fabric.all_gather(torch.tensor(lengths, device=fabric.device))
    rows = everywhere.reshape(fabric.world_size, -1).tolist()
    budgets = [Budget(args.micro_batch_tokens, [(1, length) for length in of_device]) for of_device in rows]
    return [cut_alike([(budget, step) for budget in budgets], fabric.global_rank) for step in steps]


class Step(NamedTuple, Generic[Batch]):
    """One step of one device: its number from 1, its micro-batches, and the numbers of the records in each of them."""

    number: int
    batches: list[Batch]
    records: list[list[int]]


class Plan:
    """Which samples each optimizer step sees, over all epochs up to `max_steps`."""

    def __init__(
        self, fabric: Fabric, args: TrainArgs, count: int, *, mini: int, micro: int, sizes: Sequence[Size] | None = None
    ) -> None:
        """`sizes` are those of the samples, where `--micro_batch_tokens` is to cut them."""
        self._fabric = fabric
        self._args = args
        tokens = args.micro_batch_tokens
        self._windows = partial(
            epoch_windows,
            count,
            mini=mini,
            micro=micro,
            seed=args.seed,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
            budget=None if tokens is None or sizes is None else Budget(tokens, sizes),
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
            some: Any = shard
            packed = some.at(epoch) if isinstance(some, PackedShard) else None
            loader: DataLoader[Any] = DataLoader(
                cast(Any, packed or shard),  # to PyTorch it need only have numbers
                batch_sampler=[micro for window in left for micro in window],
                collate_fn=collate,
                num_workers=self._args.num_workers,
                pin_memory=self._fabric.device.type == "cuda",
                worker_init_fn=_leave_group,
                generator=torch.Generator(),  # else each start of a loader takes a number from the run's own
            )
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)  # its workers begin so, see `_leave_group`
            batches = iter(loader)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
            for number, window in zip(numbers, left, strict=True):
                records = [_of_rows(packed, micro) for micro in window] if packed else window
                yield Step(number, [to_device(next(batches), self._fabric.device) for _ in window], records)


def _leave_group(worker: int) -> None:
    """A signal to the group of processes, as `timeout` sends it, is for the run, which ends its workers itself."""
    os.setpgrp()
    while signal.sigtimedwait(_STOP, 0):  # what came to the group before
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)


def _of_rows(packed: PackedShard, rows: Sequence[int]) -> list[int]:
    return [record for row in rows for record in packed.rows[row]]


def check_validation(shard: Records[Any] | None, size: int, fabric: Fabric, limit: int | None) -> None:
    """Whether there will be something to validate on for each device that has to take part: asked before a run starts,
    since the devices would wait for each other.

    Raises:
        ValueError: there are fewer records than devices, and the model is in pieces.
    """
    if shard is None or not engine_of(fabric).divides_weights(fabric):
        return
    stop = _records_validated(shard, size, limit)
    if stop < fabric.world_size:
        raise ValueError(
            f"there are {stop} records to validate on, and the weights are divided over {fabric.world_size} devices, of"
            " which each must have one; raise --eval_iters, or prepare more"
        )


def _records_validated(shard: Records[Any], size: int, limit: int | None) -> int:
    return len(shard) if limit is None else min(len(shard), limit * size)


def validation_batches(
    shard: Records[Item] | None,
    size: int,
    collate: Callable[[list[Item]], Batch],
    fabric: Fabric,
    limit: int | None,
    tokens: int | None = None,
) -> Iterator[Batch]:
    """Each record once over all devices, in order, `size` at a time; at most `limit` batches over all devices.

    With `tokens` each batch is cut into such of that many places at most (see `Budget`), as far as there can be as many
    on each device: a model in pieces reads with all of them or not at all. For that the last batch of a device may hold
    one record more, and only where there are fewer records than devices some get none; see `check_validation`.
    """
    check_validation(shard, size, fabric, limit)
    if shard is None:
        return
    stop, world = _records_validated(shard, size, limit), range(fabric.world_size)
    count = max(-(-(stop // len(world)) // size), 1)
    for i in range(count):
        place = slice(i * size, (i + 1) * size if i + 1 < count else None)
        rows = [list(range(rank, stop, fabric.world_size)[place]) for rank in world]
        mine = rows[fabric.global_rank]
        parts = [mine] if tokens is None else _cut_nearly_alike(Budget(tokens, shard.sizes), rows, fabric.global_rank)
        for part in filter(None, parts):
            yield to_device(collate([shard[row] for row in part]), fabric.device)


def _cut_nearly_alike(budget: Budget, devices: Sequence[list[int]], rank: int) -> list[list[int]]:
    """`cut_alike` where some devices have a sample less, so that one micro-batch may have to be over the budget."""
    fewest = min(map(len, devices))
    at_least = min(max(len(budget.cut(samples)) for samples in devices), fewest)
    parts = budget.cut(devices[rank], at_least)
    while len(parts) > fewest > 0:
        parts[-2:] = [parts[-2] + parts[-1]]
    return parts


def to_device(batch: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on the device; whatever else it has stays as it is."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {n: value.to(device, non_blocking=True) for n, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)
