"""Keeping a run: its checkpoints, going on from one of them, and stopping early.

A checkpoint holds all that the next step depends on, so that a run that was killed and resumed ends with the bits of
one that was not: weights, optimizers, schedules, controllers, running statistics, the random numbers of each device,
and the number of the step (which samples come next follows from that and the seed).
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import TrainArgs
from rlhf_stages.checkpoint import check_whole
from rlhf_stages.cli import Interrupted
from rlhf_stages.engines import engine_of
from rlhf_stages.experiment import Experiment
from rlhf_stages.interruption import Interruption
from rlhf_stages.loop import Update, anywhere, is_due
from rlhf_stages.models.loading import quiet, restore_model, save_model
from rlhf_stages.state import Stateful, move_states, on_host, random_state, read_state, set_random_state, write_state
from rlhf_stages.tracking import Averages, Tracker, last_lines

# bytes per second that a disk takes, to guess how long the first save will be
_DISK_SPEED = 2e8


@dataclass
class Progress:
    """How far a run is.

    step: steps done. first, metrics: validation before the first step, and the last one. best: largest quality of a
    checkpoint, and its step. skipped: steps left out for a NaN or an infinity, the last of them, and how many in a row.
    """

    step: int = 0
    first: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best: float = float("-inf")
    best_step: int = 0
    skipped: int = 0
    last_skipped: int = 0
    skipped_in_a_row: int = 0


class Keeper:
    """Saves a run, resumes it, notes its skipped steps and stops it.

    Args:
        models: what trains, by the folder within a checkpoint that it is saved in; "" is the checkpoint itself.
        parts: optimizers, schedules, controllers, statistics: the same on every device. What is None is left out.
        averages: the training metrics, which differ from device to device.
    """

    def __init__(
        self,
        fabric: Fabric,
        args: TrainArgs,
        experiment: Experiment,
        tracker: Tracker,
        tokenizer: PreTrainedTokenizerBase,
        total_steps: int,
        models: Mapping[str, nn.Module | None],
        parts: Mapping[str, Stateful | None],
        averages: Averages,
    ) -> None:
        self._fabric, self._args, self._experiment, self._tracker = fabric, args, experiment, tracker
        self._tokenizer, self._total_steps, self._averages = tokenizer, total_steps, averages
        self._models = {name: model for name, model in models.items() if model is not None}
        given = {**parts, "precision": fabric.strategy.precision}
        self._parts: dict[str, Stateful] = {name: part for name, part in given.items() if part is not None}
        self._engine = engine_of(fabric)
        # optimizers of which each device saves a part of its own
        optimizers = {name for name, part in self._parts.items() if hasattr(part, "param_groups")}
        self._divided = optimizers if self._engine.divides_optimizer else set()
        self._writer: threading.Thread | None = None
        self._problem: BaseException | None = None
        self.progress = Progress()
        if experiment.start_step:
            self._resume(experiment.checkpoints.path(experiment.start_step))
        # weights and two moments in fp32
        size = 12 * sum(p.numel() for model in self._models.values() for p in model.parameters())
        self._interruption = Interruption(args.max_seconds, save_seconds=size / _DISK_SPEED)

    # Steps

    def evaluates(self, step: int) -> bool:
        """Whether the run is validated after this step."""
        return any(is_due(step, i, self._total_steps) for i in (self._args.save_interval, self._args.eval_interval))

    def note(self, step: int, update: Update, records: Sequence[Sequence[int]]) -> None:
        """Count an update that changed nothing because something was not finite, and write down what it was made of.

        Args:
            records: numbers of the records, in the training shard, of each micro-batch.
        """
        if update.fault:
            self.skip(step, update.fault, [record for i in update.suspects for record in records[i]])

    def end_step(self, step: int, quality: float = math.nan) -> None:
        """A step is over: save if it is time, and stop if somebody asked for it.

        Args:
            quality: what the last validation found, the higher the better; NaN if it found nothing.

        Raises:
            Interrupted: by a signal or the time limit; all is saved.
            OSError: the checkpoint before this one could not be written.
        """
        self.progress.step = step
        reason = self._interruption.reason(self._fabric)
        saving = is_due(step, self._args.save_interval, self._total_steps)
        if saving and not quality < self.progress.best:
            self.progress.best = self.progress.best if math.isnan(quality) else quality
            self.progress.best_step = step
        if saving or reason:
            self._save()
        if reason and step < self._total_steps:
            self._close()
            raise Interrupted(f"{reason}: stopped after step {step} of {self._total_steps}, all saved", self._is_first)

    def skip(self, step: int, reason: str | None, samples: Sequence[int]) -> None:
        """Note a step (or a part of one) that was left out on every device; each calls this with what it found.

        Args:
            samples: numbers of the records, in the training shard, that this device found at fault.

        Raises:
            FloatingPointError: too many in a row.
        """
        found = [self._fabric.broadcast((reason, list(samples)), src=rank) for rank in range(self._fabric.world_size)]
        reason = next((text for text, _ in found if text), "a value is not finite")
        p = self.progress
        if p.last_skipped != step:
            p.skipped += 1
            p.skipped_in_a_row = p.skipped_in_a_row + 1 if p.last_skipped == step - 1 else 1
            p.last_skipped = step
        if self._is_first:
            ids = sorted({sample for _, part in found for sample in part})
            self._experiment.append("skipped.jsonl", {"step": step, "reason": reason, "samples": ids})
            self._tracker.message(f"warning: step {step} skipped: {reason} (samples {ids[:8]}, see skipped.jsonl)")
        if p.skipped_in_a_row >= self._args.max_skipped_steps:
            self._close()
            steps = self._experiment.checkpoints.steps()
            good = self._experiment.checkpoints.path(steps[-1]) if steps else "not there yet"
            raise FloatingPointError(
                f"{p.skipped_in_a_row} steps in a row were skipped, the last because {reason}; lower the learning rate,"
                f" or look at the samples in {self._experiment.dir}/skipped.jsonl; the last good checkpoint is {good}"
            )

    def finish(self, summary: Mapping[str, Any], next_command: str) -> Path:
        """Write summary.json and say where everything is and what to run next; numbers of the summary are printed."""
        self._close()
        if self.progress.skipped:
            summary = {**summary, "skipped_steps": self.progress.skipped}
        # without validation there is no loss, and JSON has no word for what is not finite
        summary = {k: v for k, v in summary.items() if not isinstance(v, float) or math.isfinite(v)}
        if self._is_first:
            self._experiment.finish(summary)
            print(last_lines(self._experiment, summary, next_command))
        self._fabric.barrier()
        return self._experiment.dir

    def _close(self) -> None:
        self.wait()
        self._interruption.close()
        self._tracker.close()
        self._fabric.barrier()

    @property
    def _is_first(self) -> bool:
        return bool(self._fabric.is_global_zero)

    # Saving

    def _save(self) -> None:
        """Copy everything to host memory, and let a thread write it while the training goes on."""
        local = {"random": random_state(), "averages": on_host(self._averages.state_dict())}
        devices = [self._fabric.broadcast(local, src=rank) for rank in range(self._fabric.world_size)]
        self.wait()
        models = {name: self._engine.whole(self._fabric, model) for name, model in self._models.items()}
        pieces = self._write_pieces() if self._divided else None
        if not self._is_first:
            return
        self._tracker.flush()
        parts = {name: on_host(part.state_dict()) for name, part in self._parts.items() if name not in self._divided}
        # as text, so that equal states are equal bytes: pickle writes which strings are one object, too
        state = {"progress": json.dumps(asdict(self.progress)), "devices": devices}
        # one file each: an optimizer is twice the size of its model, and they are written side by side
        writers = [partial(write_state, content, name) for name, content in {**parts, "state": state}.items()]
        writers += [partial(_write_model, model, self._tokenizer, name) for name, model in models.items()]
        if pieces is not None:
            writers.append(partial(move_states, pieces))
        step, best_step = self.progress.step, self.progress.best_step
        self._writer = threading.Thread(target=self._write, args=(step, best_step, writers), name="checkpoint")
        self._writer.start()

    def _write_pieces(self) -> Path:
        """Let each device write its part of the optimizers beside the checkpoint, into which they will be moved."""
        checkpoint, problem = self._experiment.checkpoints.path(self.progress.step), None
        folder = checkpoint.with_name(f".{checkpoint.name}.pieces")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in self._divided:
                write_state(on_host(self._engine.optimizer_state(self._parts[name])), self._piece(name), folder)
        except Exception as error:  # a full disk is an error of torch's own
            problem = error
        if anywhere(self._fabric, problem is not None):  # which also waits for all of them
            raise OSError(f"a checkpoint could not be written ({problem or 'by another process'}): {folder}")
        return folder

    def _piece(self, name: str) -> str:
        return f"{name}-{self._fabric.global_rank}-of-{self._fabric.world_size}"

    def _write(self, step: int, best_step: int, writers: Sequence[Any]) -> None:
        started = time.monotonic()
        try:
            with quiet():
                self._experiment.checkpoints.publish(step, writers)
            self._settle(step, best_step)
        except BaseException as error:  # raised again by whoever waits
            self._problem = error
        self._interruption.save_seconds = time.monotonic() - started

    def _settle(self, step: int, best_step: int) -> None:
        """Name the latest and the best checkpoint, and remove old ones once the newest is known to be readable.

        A resumed run does it again: the kill may have come right after the checkpoint got its name.
        """
        experiment, keep = self._experiment, self._args.keep_last
        experiment.point_to("latest", step)
        steps = experiment.checkpoints.steps()
        old = [s for s in steps[:-keep] if s != best_step or not self._args.keep_best] if keep else []
        if old:
            check_whole(experiment.checkpoints.path(step), resumable=True)
        if best_step in steps and best_step not in old:
            experiment.point_to("best", best_step)
        else:
            (experiment.dir / "best").unlink(missing_ok=True)
        for step in old:
            experiment.checkpoints.remove(step)

    def wait(self) -> None:
        """Until the last save is on the disk."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            steps = self._experiment.checkpoints.steps()
            kept = f"the checkpoint of step {steps[-1]} is whole" if steps else "there is none yet"
            free = (
                shutil.disk_usage(self._experiment.dir).free / 1e6
            )  # some libraries' errors do not say that it is full
            raise OSError(
                f"a checkpoint could not be written ({problem}); {free:,.1f} MB of the disk are free, and {kept}:"
                " make room, and go on with --resume"
            )

    # Resuming

    def _resume(self, folder: Path) -> None:
        """Take over everything from a checkpoint."""
        try:
            state = read_state(folder, "state")
            self.progress = Progress(**json.loads(state["progress"]))
            for name, model in self._models.items():
                self._engine.restore(self._fabric, model, partial(restore_model, directory=folder / name))
            for name, part in self._parts.items():
                if name in self._divided:
                    self._engine.load_optimizer_state(part, read_state(folder, self._piece(name)))
                else:
                    part.load_state_dict(read_state(folder, name))
            if len(state["devices"]) == self._fabric.world_size:  # else --resume_override: other devices, other samples
                local = state["devices"][self._fabric.global_rank]
                self._averages.load_state_dict(local["averages"])
                set_random_state(local["random"])
        except Exception as error:  # each part refuses what is not its own in its own way
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"--resume: {folder} does not fit this run ({reason})") from None
        if self._is_first:
            self._settle(self.progress.step, self.progress.best_step)
        self._tracker.message(f"resumed after step {self.progress.step} of {self._total_steps}")


def _write_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str, folder: Path) -> None:
    save_model(model, tokenizer, folder / name)
