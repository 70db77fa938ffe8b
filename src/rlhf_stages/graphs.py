"""CUDA graphs of training: forward and backward of micro-batches of one shape, recorded once and replayed since.

The kernels of a small model end before the host has asked for the next ones, so that the device waits most of the time.
A graph asks for all of them at once. What it reads lies in tensors of its own, and what a number of Python was while it
was recorded it stays: all that changes from one micro-batch to the next has to be a tensor of the batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf_stages.terminal import first_line

Batch = TypeVar("Batch")
Result = TypeVar("Result")
# a loss (0-dim.), and other tensors by name
Outcome = tuple[Tensor, Mapping[str, Tensor]]
WARM_UP = 2  # libraries load and kernels are chosen or compiled in the first passes, which cannot be recorded


class Recorder(Protocol):
    """Makes work repeatable: what it returned, in tensors that each repetition writes anew, and what repeats it."""

    def __call__(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        """May call the work, and more than once."""


class _Recorded(NamedTuple):
    inputs: list[Tensor]
    outcome: Outcome
    replay: Callable[[], None]


class Graphs:
    """The backward passes of a stage, a graph for each model and shape of micro-batch.

    Args:
        record: on the GPU a `CudaRecorder`.
        tell: takes a line for people, where something could not be recorded; it is run as it is then.
    """

    def __init__(self, record: Recorder, tell: Callable[[str], None]) -> None:
        self._record = record
        self._tell = tell
        self._recorded: dict[Hashable, _Recorded | None] = {}
        self._gradients: dict[Hashable, Tensor] = {}

    def clear_gradients(self, model: nn.Module) -> None:
        """Gradients of 0 that keep their place in memory, since a graph adds to those that it was recorded with.

        Models take turns from here to their optimizer's step, so parameters of one shape in two of them share a place.
        """
        uses: Counter[Hashable] = Counter()
        cleared = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                kind = (parameter.shape, parameter.dtype)
                uses[kind] += 1
                place = (kind, uses[kind])
                if place not in self._gradients:
                    self._gradients[place] = torch.zeros_like(parameter)
                parameter.grad = self._gradients[place]
                cleared.append(parameter.grad)
        torch._foreach_zero_(cleared)

    def __call__(self, name: Hashable, work: Callable[[Any, Tensor], Outcome], batch: Any, total: Tensor) -> Outcome:
        """What `work(batch, total)` returns: forward and backward, which adds the gradient of the loss over `total`.

        Args:
            name: of the work; with the shapes of the batch it says which graph it is.
            batch: a dataclass of tensors, and of dataclasses of tensors.
        """
        inputs = [*_tensors(batch), total.float()]
        key = (name, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self._recorded:
            self._recorded[key] = self._try(work, batch, inputs)
        recorded = self._recorded[key]
        if recorded is None:
            return work(batch, total)
        torch._foreach_copy_(recorded.inputs, inputs)
        recorded.replay()
        loss, outputs = recorded.outcome
        return loss.clone(), {name: value.clone() for name, value in outputs.items()}

    def _try(self, work: Callable[[Any, Tensor], Outcome], batch: Any, inputs: list[Tensor]) -> _Recorded | None:
        own = [tensor.clone() for tensor in inputs]
        *tensors, total = own
        batch = _with_tensors(batch, tensors)
        total.fill_(torch.inf)  # so that what runs before the first replay adds zeros to the gradients
        try:
            outcome, replay = self._record(lambda: work(batch, total))
        except RuntimeError as error:
            self._tell(f"--cuda_graphs: not recorded, {first_line(error)}")
            return None
        return _Recorded(own, outcome, replay)


def capture(work: Callable[[], Result], pool: Any = None) -> tuple[Any, Result]:
    """A CUDA graph of some work, and what the work returned, in tensors that each replay writes anew.

    Args:
        pool: memory that graphs share which never run at the same time.

    Raises:
        RuntimeError: the work asks for what cannot be recorded, such as a look at a value.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        # other threads, such as those that load data, go on meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    except RuntimeError:
        # PyTorch leaves the generator as if it were still recorded, so that the next random number would be an error
        fresh = torch.Generator(generator.device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise
    return graph, result


class CudaRecorder:
    """Recorder of CUDA graphs that share their memory: one runs at a time, and nothing in it outlasts the replay but
    the gradients, which lie outside, and the outcome."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        """Warm up, and record."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(stream)

        def recorded() -> Outcome:
            loss, outputs = work()
            return loss.clone(), {name: value.clone() for name, value in outputs.items()}

        graph, outcome = capture(recorded, self._pool)
        return outcome, graph.replay


def _tensors(batch: Any) -> list[Tensor]:
    """Tensors of a dataclass and of the dataclasses in it, cached properties included, in their order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, take)
    return found


def _with_tensors(batch: Batch, tensors: list[Tensor]) -> Batch:
    """The same dataclass with other tensors, in the order of `_tensors`."""
    rest = iter(tensors)
    copy: Batch = map_tensors(batch, lambda _: next(rest))
    return copy


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass of tensors with other tensors in their place, and so on in the dataclasses that it holds."""
    if isinstance(value, Tensor):
        return function(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    copy = object.__new__(type(value))
    vars(copy).update({name: map_tensors(held, function) for name, held in vars(value).items()})
    return copy
