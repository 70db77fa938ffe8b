"""What the training scripts share besides their story: devices, accumulation, optimizer steps, cadence."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_stages.args import FabricArgs, FrozenArgs, TrainArgs
from rlhf_stages.cli import Finished
from rlhf_stages.data.collate import Width
from rlhf_stages.data.info import DataInfo
from rlhf_stages.data.labelled import LabelledData
from rlhf_stages.data.shards import Records, Shard, open_shard
from rlhf_stages.engines import engine_of, make_fabric
from rlhf_stages.experiment import Experiment, describe
from rlhf_stages.files import write_json
from rlhf_stages.graphs import CudaRecorder, Graphs, Outcome
from rlhf_stages.interruption import end_with_parent
from rlhf_stages.loggers import check_loggers
from rlhf_stages.models import frozen
from rlhf_stages.plan import SEED_STRIDE

Batch = TypeVar("Batch")
Module = TypeVar("Module", bound=nn.Module)


def start_fabric(args: FabricArgs, seed: int) -> Fabric:
    """Launch the processes and seed each with `seed + 100003 * rank`.

    Raises:
        ValueError: Fabric refuses the combination of flags.
    """
    torch.set_float32_matmul_precision("high")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    fabric = make_fabric(args)
    if args.precision == "16-mixed" and fabric.device.type == "cpu":
        raise ValueError("--precision=16-mixed needs a GPU; on a CPU there is --precision=bf16-mixed")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # the loss scale of 16-mixed leaves the first step out if it is too large; the schedule counts it all the same
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    fabric.launch()
    if fabric.local_rank != 0 or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    seed_everything(seed + SEED_STRIDE * fabric.global_rank, verbose=False)
    return fabric


def accumulate(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_sum: Callable[[Batch], Tensor | Outcome],
    count: Callable[[Batch], Tensor],
    weight: float = 1.0,
    graphs: Graphs | None = None,
) -> tuple[Tensor, Tensor, list[Outcome]]:
    """Backward of one optimizer step, the same however the samples are cut into micro-batches and devices.

    The gradient is that of weight * (sum of all losses) / (all that counts) over every micro-batch and device.

    Args:
        loss_sum: the sum over a micro-batch, alone or with other tensors by name.
        graphs: replay what they have recorded, instead of calling `loss_sum` each time.

    Returns:
        The loss (without `weight`), and the count, both over all devices; and of each micro-batch what `loss_sum` gave.
    """
    total = global_sum(fabric, sum_tensors(count(batch) for batch in micro_batches)).clamp(min=1)
    loss = torch.zeros((), device=fabric.device)
    engine, outcomes = engine_of(fabric), []

    def work(batch: Batch, total: Tensor) -> Outcome:
        said = loss_sum(batch)
        part, outputs = said if isinstance(said, tuple) else (said, {})
        # devices' gradients are averaged, while the sum over devices is wanted
        fabric.backward(part / total * (weight * fabric.world_size), model=model)
        return part.detach(), {name: value.detach() for name, value in outputs.items()}

    if graphs is not None:
        graphs.clear_gradients(model)
    for i, batch in enumerate(micro_batches):
        with engine.accumulating(fabric, model, last=i == len(micro_batches) - 1):
            outcome = work(batch, total) if graphs is None else graphs(loss_sum, work, batch, total)
        loss += outcome[0] / total
        outcomes.append(outcome)
    return global_sum(fabric, loss), total, outcomes


@dataclass(frozen=True)
class Update:
    """What an optimizer step did: the loss, the count that it is the mean over, and the gradient norm before clipping.

    `fault` says what was not finite, if anything: then the weights are as they were. `suspects` are the micro-batches
    of this device whose loss was not finite, or all of them if only the gradient was. `outputs` are what
    `loss_sum` gave beside the loss of each micro-batch.
    """

    loss: Tensor
    count: Tensor
    norm: Tensor
    fault: str | None = None
    suspects: tuple[int, ...] = ()
    outputs: tuple[Mapping[str, Tensor], ...] = ()


def update(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    loss_sum: Callable[[Batch], Tensor | Outcome],
    count: Callable[[Batch], Tensor],
    clip: float,
    weight: float = 1.0,
    graphs: Graphs | None = None,
) -> Update:
    """One optimizer step: accumulate (see there), clip the gradient norm, step, clear.

    A loss or gradient that is not finite changes no weight, on no device. With 16-mixed a gradient that overflows is
    how the loss scale finds its size: such a step is left out too, but is no fault as long as the scale can fall.
    """
    loss, total, outcomes = accumulate(fabric, model, micro_batches, loss_sum, count, weight, graphs)
    norm, fault = engine_of(fabric).step(fabric, model, optimizer, loss, clip)
    suspects = [i for i, (part, _) in enumerate(outcomes) if fault and not torch.isfinite(part)]
    suspects = suspects or list(range(len(outcomes) if fault else 0))
    return Update(loss, total, norm, fault, tuple(suspects), tuple(outputs for _, outputs in outcomes))


def make_graphs(fabric: Fabric, args: TrainArgs) -> Graphs | None:
    """Graphs of the backward passes, if `--cuda_graphs` asks for them.

    Raises:
        ValueError: they need one GPU.
    """
    if not args.cuda_graphs:
        return None
    if fabric.device.type != "cuda" or fabric.world_size > 1:
        raise ValueError("--cuda_graphs needs a run on one GPU")
    return Graphs(CudaRecorder(), fabric.print)


def few_widths(args: TrainArgs, records: Records[Any]) -> Width | None:
    """How wide batches are made: with `--cuda_graphs` each width is recorded."""
    return Width(max(longest for _, longest in records.sizes)) if args.cuda_graphs else None


def global_sum(fabric: Fabric, value: Tensor) -> Tensor:
    """Sum of a tensor over all devices."""
    total: Any = fabric.all_reduce(value, reduce_op="sum")
    return torch.as_tensor(total)


def anywhere(fabric: Fabric, here: bool) -> bool:
    """Whether something is so on any device."""
    return bool(global_sum(fabric, torch.tensor(float(here), device=fabric.device)) > 0)


def sum_tensors(values: Iterable[Tensor]) -> Tensor:
    """Sum of scalar tensors, at least one."""
    return torch.stack(list(values)).sum()


def padding(batches: Sequence[Any]) -> Tensor:
    """Percentage of the places in these batches that hold padding."""
    real = sum_tensors(batch.attention_mask.sum() for batch in batches)
    share: Tensor = real / sum(batch.attention_mask.numel() for batch in batches)
    return 100 * (1 - share)


def open_prompts(data_dir: Path, vocab_size: int) -> tuple[Shard, Shard | None]:
    """The shards of prompts to train and to validate on."""
    shard = open_shard(data_dir / prompt_shard_name(data_dir, "train"), vocab_size=vocab_size)
    name = prompt_shard_name(data_dir, "validation")
    return shard, open_validation(data_dir, name, responses=0, vocab_size=vocab_size)


def prompt_shard_name(data_dir: Path, split: str) -> str:
    """Shard of the prompts for PPO: `prompt_<split>.pt` where the data have one, else those of fine-tuning."""
    name = f"prompt_{split}.pt"
    return name if (data_dir / "prompt_train.pt").is_file() else f"finetune_{split}.pt"


def longest_prompt(*shards: Shard | None) -> int:
    """Tokens of the longest prompt of some shards, one of them at least."""
    return max(shard.longest_prompt for shard in shards if shard is not None)


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
    info: DataInfo | LabelledData,
    stage: str,
    groups: Mapping[str, Any],
    shards: Sequence[Records[Any] | None],
    parents: Mapping[str, Path] | None = None,
) -> Experiment:
    """Create the folder of this run on the first process, or with `--resume` open it; an error there ends all of them.

    Args:
        shards: what the run reads.

    Raises:
        ValueError: the folder exists, or the run in it cannot be continued. Finished: it has come to its end.
    """
    directory = Path(args.log_dir) / info.dataset / args.run_name / stage
    problem, start_step, finished = None, 0, False
    if fabric.is_global_zero:
        fingerprints = {shard.path.name: shard.fingerprint for shard in shards if shard is not None}
        content = describe(stage, {**groups, "data_args": info.raw}, fingerprints, parents or {})
        try:
            check_loggers(args)
            start_step, finished = _open_folder(directory, args, content)
        except (OSError, ValueError) as error:
            problem = str(error)
    problem, start_step, finished = fabric.broadcast((problem, start_step, finished))
    if problem:
        raise ValueError(problem)
    if finished:
        raise Finished(f"{directory} is finished; --overwrite runs it again")
    return Experiment(directory, start_step)


def _open_folder(directory: Path, args: TrainArgs, content: dict[str, Any]) -> tuple[int, bool]:
    """The step that the run in a folder goes on from, 0 for a new one; and whether there is nothing left to do."""
    if args.resume is None or not (directory / "args.json").is_file():
        Experiment.create(directory, content, overwrite=args.overwrite)
        return 0, False
    experiment = Experiment(directory)
    try:
        if not args.resume_override:
            experiment.check_same_run(content)
    except ValueError:
        if not args.overwrite:
            raise
        Experiment.create(directory, content, overwrite=True)
        return 0, False
    again = args.resume_override or args.resume_step is not None
    if experiment.finished and not again:
        if args.overwrite:
            Experiment.create(directory, content, overwrite=True)
        else:
            experiment.tidy()
        return 0, not args.overwrite
    step, problems = experiment.checkpoint_to_resume(args.resume_step)
    for problem in problems:
        warnings.warn(f"passed over: {problem}", stacklevel=2)
    if step == 0:
        warnings.warn(f"--resume: {directory} has no whole checkpoint, so the run starts anew", stacklevel=2)
        Experiment.create(directory, content, overwrite=True)
        return 0, False
    experiment.cut_back(step)
    if args.resume_override:
        write_json(directory / "args.json", content)
    return step, False


def freeze(fabric: Fabric, model: Module, args: FrozenArgs | None = None) -> Module:
    """A model that only reads: evaluation mode, no gradients, on the device or where the flags about it say; with FSDP
    in pieces.
    """
    engine = engine_of(fabric)
    if not engine.divides_frozen:
        return frozen.freeze(model, fabric.device, args)
    return engine.divide(fabric, frozen.freeze(model, torch.device("cpu")), args)


@contextmanager
def gathered(fabric: Fabric, model: nn.Module) -> Iterator[None]:
    """While it lasts every device has all weights of a model in training, so that it can sample; all devices enter it
    and leave it together. Where the weights are not in pieces it does nothing.
    """
    with engine_of(fabric).gathered(model):
        yield
