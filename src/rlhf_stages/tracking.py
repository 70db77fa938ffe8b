"""Numbers and texts of a run: TensorBoard, metrics.csv, samples.jsonl, progress bar."""

import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, MinMetric
from tqdm import tqdm

from rlhf_stages.experiment import Experiment
from rlhf_stages.functional.masking import mean_std, moments
from rlhf_stages.terminal import without_links

# what the progress bar shows, and under which name
_SHOWN = {
    "train/loss": "loss",
    "train/acc": "acc",
    "train/reward_mean": "reward",
    "train/kl_sequence": "kl",
    "train/response_length": "length",
    "val/loss": "val_loss",
    "val/acc": "val_acc",
    "val/reward_mean": "val_reward",
}


class Averages:
    """Weighted means by name, over every device, since the last `compute`."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._metrics: dict[str, MeanMetric] = {}

    def update(self, values: Mapping[str, Tensor | float], weight: Tensor | float = 1.0) -> None:
        """Add values; the first device must see every name.

        Raises:
            FloatingPointError: a value is not a number.
        """
        for name, value in values.items():
            if name not in self._metrics:
                self._metrics[name] = MeanMetric(nan_strategy="error").to(self._fabric.device)
            try:
                self._metrics[name].update(value, weight)
            except RuntimeError:
                raise FloatingPointError(
                    f"{name} is not a number (NaN); lower the learning rate, or check the data and the starting weights"
                ) from None

    def so_far(self, name: str) -> float:
        """The mean of one name over every device, 0 if there is none; nothing starts anew."""
        return float(self._metrics[name].compute()) if name in self._metrics else 0.0

    def compute(self) -> dict[str, float]:
        """The means; starts anew. A device that has seen nothing takes part with weight 0, or the others would wait."""
        means = {}
        for name in self._fabric.broadcast([name for name, metric in self._metrics.items() if metric.update_called]):
            if name not in self._metrics or not self._metrics[name].update_called:
                self.update({name: 0.0}, weight=0.0)
            means[name] = float(self._metrics[name].compute())
            self._metrics[name].reset()
        return means


def distribution(name: str, values: Tensor, fabric: Fabric) -> dict[str, float]:
    """Mean, standard deviation, smallest and largest of values, over every device."""
    total: Any = fabric.all_reduce(moments(values, torch.ones_like(values, dtype=torch.bool)), reduce_op="sum")
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
    """Writes on the first process only; the others may call it and nothing happens."""

    def __init__(self, experiment: Experiment, fabric: Fabric, total_steps: int, arguments: Mapping[str, Any]) -> None:
        self._experiment = experiment
        self._active = fabric.is_global_zero
        self._start = time.perf_counter()
        self._shown: dict[str, float] = {}
        if self._active:
            warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # args.json is in it
            self._csv = CSVLogger(experiment.dir, name="", version="", flush_logs_every_n_steps=1)
            self._board = TensorBoardLogger(experiment.dir / "logs", name="", version="")
            self._board.log_hyperparams(
                {f"{g}.{k}": str(v) for g, a in arguments.items() for k, v in asdict(a).items()}
            )
        self._bar = tqdm(
            total=total_steps,
            unit="step",
            ncols=100 if sys.stderr.isatty() else None,
            # a log file wants a line now and then, not one per step
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
            disable=not self._active,
        )

    def advance(self) -> None:
        """One step is done."""
        self._bar.update()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step; the important ones stand in the progress bar."""
        if not self._active:
            return
        metrics = {**metrics, "info/elapsed_seconds": time.perf_counter() - self._start}
        self._csv.log_metrics(dict(metrics), step)
        self._board.log_metrics(dict(metrics), step)
        self._shown |= {_SHOWN[name]: value for name, value in metrics.items() if name in _SHOWN}
        self._bar.set_postfix_str(" ".join(f"{n}={v:.3g}" for n, v in self._shown.items()), refresh=False)

    def log_sample(self, name: str, step: int, prompt: str, response: str, **numbers: float) -> None:
        """Write a text to samples.jsonl and TensorBoard."""
        if not self._active:
            return
        self._experiment.append_sample({"step": step, "name": name, "prompt": prompt, "response": response, **numbers})
        shown = f"{prompt}**{response}**" + "".join(f"\n\n{key}: {value:.4g}" for key, value in numbers.items())
        self._board.experiment.add_text(f"info/{name}", without_links(shown), step)

    def message(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        if self._active:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Flush everything."""
        self._bar.close()
        if self._active:
            self._csv.finalize("success")
            self._board.finalize("success")
