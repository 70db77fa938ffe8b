"""Numbers and texts of a run: their means over devices, the loggers, samples.jsonl, the progress bar."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MinMetric
from tqdm import tqdm

from rlhf_stages.args import TrainArgs
from rlhf_stages.cli import before_error
from rlhf_stages.experiment import Experiment
from rlhf_stages.functional.masking import mean_std, moments
from rlhf_stages.loggers import SHOWN, Logger, make_loggers
from rlhf_stages.terminal import COLUMNS, folded, folded_command


class Stopwatch:
    """Seconds by name; on a GPU it waits for the device at both ends, so that each phase has its own time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of a block to a name."""
        started = self._now()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def lap(self) -> dict[str, float]:
        """`info/<name>_time` since the last lap."""
        seconds, self._seconds = self._seconds, {}
        return {f"info/{name}_time": value for name, value in seconds.items()}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def peak_memory(device: torch.device) -> dict[str, float]:
    """`info/peak_memory_gib`: what tensors took at most on the GPU since the start; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {"info/peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}


class _Mean(Metric):  # type: ignore[misc]
    """MeanMetric without its look for NaN, at each of which the host waits for the device."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add a value."""
        self.total += value * weight
        self.count += weight

    def compute(self) -> Tensor:
        """The weighted mean."""
        return self.total / self.count


class Averages:
    """Weighted means by name, over every device, since the last `compute`.

    Args:
        lenient: leave out values that are not finite; for steps that are skipped then, and noted elsewhere.
    """

    def __init__(self, fabric: Fabric, lenient: bool = False) -> None:
        self._fabric = fabric
        self._lenient = lenient
        self._metrics: dict[str, _Mean] = {}

    def update(self, values: Mapping[str, Tensor | float], weight: Tensor | float = 1.0) -> None:
        """Add values; the first device must see every name.

        Raises:
            FloatingPointError: a value is not a number.
        """
        for name, value in values.items():
            if name not in self._metrics:
                self._metrics[name] = self._new_metric()
            value = torch.as_tensor(value, dtype=torch.float32, device=self._fabric.device)
            if self._lenient:
                finite = torch.isfinite(value)
                self._metrics[name].update(torch.where(finite, value, 0), finite * weight)
                continue
            if value.isnan().any():
                raise FloatingPointError(
                    f"{name} is not a number (NaN); lower the learning rate, or check the data and the starting weights"
                )
            self._metrics[name].update(value, weight)

    def compute(self) -> dict[str, float]:
        """The means; starts anew. A device that has seen nothing takes part with weight 0, or the others would wait."""
        means = {}
        for name in self._fabric.broadcast(list(self._metrics)):
            if name not in self._metrics:
                self.update({name: 0.0}, weight=0.0)
            means[name] = float(self._metrics[name].compute())
        self._metrics = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """What this device has seen since the last `compute`."""
        return {name: metric.state_dict() for name, metric in self._metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._metrics = {name: self._new_metric() for name in state}
        for name, metric in self._metrics.items():
            metric.update(0.0, 0.0)  # or it would warn that it was never updated
            metric.load_state_dict({key: value.to(self._fabric.device) for key, value in state[name].items()})

    def _new_metric(self) -> "_Mean":
        metric: _Mean = _Mean().to(self._fabric.device)
        metric.persistent(mode=True)
        return metric


def distribution(name: str, values: Tensor, fabric: Fabric) -> dict[str, float]:
    """Mean, standard deviation, smallest and largest of values, over every device."""
    total: Any = fabric.all_reduce(moments(values), reduce_op="sum")
    mean, std = mean_std(total)
    smallest, largest = MinMetric().to(fabric.device), MaxMetric().to(fabric.device)
    smallest.update(values)
    largest.update(values)
    return {
        f"{name}_mean": float(mean),
        f"{name}_std": float(std),
        f"{name}_min": float(smallest.compute()),
        f"{name}_max": float(largest.compute()),
    }


class Tracker:
    """Writes on the first process only; the others may call it and nothing happens.

    Args:
        arguments: argument groups by name; `train_args` names the loggers.
    """

    def __init__(self, experiment: Experiment, fabric: Fabric, total_steps: int, arguments: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._active, done = fabric.is_global_zero, experiment.start_step
        self._start = time.perf_counter()
        self._shown: dict[str, float] = {}
        self._loggers: list[Logger] = []
        args: TrainArgs = arguments.get("train_args", TrainArgs())
        if self._active:
            self._loggers = make_loggers(args, experiment.dir, done, total_steps)
            params = {f"{group}.{name}": value for group, a in arguments.items() for name, value in asdict(a).items()}
            for logger in self._loggers:
                logger.log_params(params)
        self._bar = tqdm(
            total=total_steps,
            initial=done,
            unit="step",
            ncols=min(COLUMNS, shutil.get_terminal_size((COLUMNS, 0)).columns),
            # a log file wants a line now and then, not one per step
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
            disable=not self._active or "console" in args.loggers,
        )
        before_error.append(self._bar.close)

    def advance(self) -> None:
        """One step is done."""
        self._bar.update()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step; the important ones stand in the progress bar."""
        if not self._active:
            return
        metrics = {**metrics, "info/elapsed_seconds": time.perf_counter() - self._start}
        for logger in self._loggers:
            logger.log_metrics(metrics, step)
        self._shown |= {SHOWN[name]: value for name, value in metrics.items() if name in SHOWN}
        self._bar.set_postfix_str(" ".join(f"{n}={v:.3g}" for n, v in self._shown.items()), refresh=False)

    def log_sample(self, name: str, step: int, prompt: str, response: str, **numbers: float) -> None:
        """Write a text to samples.jsonl and the loggers."""
        if not self._active:
            return
        self._experiment.append(
            "samples.jsonl", {"step": step, "name": name, "prompt": prompt, "response": response, **numbers}
        )
        shown = f"{prompt}**{response}**" + "".join(f"\n\n{key}: {value:.4g}" for key, value in numbers.items())
        for logger in self._loggers:
            logger.log_text(f"info/{name}", shown, step)

    def message(self, text: str) -> None:
        """Print lines of at most 100 columns without breaking the progress bar."""
        if self._active:
            self._bar.write(folded(text), file=sys.stdout)

    def flush(self) -> None:
        """Wait until all that was logged is on the disk; a checkpoint of this step may follow."""
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        """Flush everything; a second time does nothing."""
        self._bar.close()
        if self._active:
            self._active = False
            self.flush()
            for logger in self._loggers:
                logger.close()


# what people look for in an experiment folder, where the run has it
_LISTED = ("metrics.csv", "timing.csv", "samples.jsonl", "skipped.jsonl", "logs", "wandb")


def last_lines(experiment: Experiment, summary: Mapping[str, Any], next_command: str) -> str:
    """What a finished run prints: the numbers of its summary, where everything is, and what to run next."""
    numbers = {name: value for name, value in summary.items() if isinstance(value, (int, float))}
    checkpoints = [experiment.checkpoints.path(step) for step in experiment.checkpoints.steps()[-1:]]
    listed = [*checkpoints, *(path for name in _LISTED if (path := experiment.dir / name).exists())]
    return "\n".join(
        [
            *(f"{name:24} {value:.4g}" for name, value in numbers.items()),
            f"experiment               {experiment.dir}",
            *(f"                         {path.relative_to(experiment.dir)}" for path in listed),
            f"to look at it:\n{folded_command(f'python scripts/report.py {experiment.dir}')}",
            f"next:\n{folded_command(next_command)}",
        ]
    )
