"""Where the numbers of a run go: CSV files, TensorBoard, Weights & Biases, the console.

Each is a `Logger`; `rlhf_stages.tracking` feeds all that `--loggers` names, and the CSV files always: resuming and
reports read them.
"""

import csv
import html
import io
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import TensorBoardLogger

from rlhf_stages.args import TrainArgs
from rlhf_stages.files import flush, write_text
from rlhf_stages.terminal import COLUMNS, without_links

# what the progress bar and the console show, and under which name
SHOWN = {
    "train/loss": "loss",
    "train/acc": "acc",
    "train/reward_mean": "reward",
    "train/kl_sequence": "kl",
    "train/response_length": "length",
    "val/loss": "val_loss",
    "val/acc": "val_acc",
    "val/reward_mean": "val_reward",
}
# what the clock says: the only numbers that two runs of the same seed do not share
_CLOCK = {
    *("info/elapsed_seconds", "info/time", "info/tokens_per_seconds", "info/peak_memory_gib"),
    *("info/rollout_time", "info/generation_time", "info/ppo_time"),
}
# seconds for a server of Weights & Biases to answer before training, and to take what is left after it
_WANDB_START, _WANDB_END = 30, 300


class Logger:
    """What a logger may do; as it stands it does nothing.

    A logger of a run that is resumed takes away, or never accepts again, what came after the step resumed from.
    """

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Note the arguments of the run, by `group.name`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text of a step; parts of it come from models and data."""

    def flush(self) -> None:
        """Wait until all of it is on the disk."""

    def close(self) -> None:
        """The run has come to its end, or stops with all saved."""


def make_loggers(args: TrainArgs, directory: Path, done: int, total_steps: int) -> list[Logger]:
    """The loggers of a run in an experiment folder, whose first `done` steps are there already."""
    makers: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CsvFiles(directory, done),
        "tensorboard": lambda: TensorBoard(directory, done),
        "wandb": lambda: WeightsAndBiases(args, directory),
        "console": lambda: Console(directory.name, done, total_steps),
    }
    return [makers[name]() for name in dict.fromkeys(["csv", *args.loggers])]


def check_loggers(args: TrainArgs) -> None:
    """Find out, before there is an experiment folder, whether the loggers can do their work.

    Raises:
        ValueError: Weights & Biases is not installed, has no key, or does not answer in time.
    """
    if "wandb" not in args.loggers:
        return
    wandb = _import_wandb()
    if args.wandb_mode != "online":
        return
    instead = "or pass --wandb_mode=offline and send the run later with `wandb sync`"
    try:
        found = wandb.login(prompt=False, verify=True)
    except wandb.errors.Error as error:
        raise ValueError(f"--loggers wandb: {_one_line(error)}; check key and network, {instead}") from None
    if not found:
        raise ValueError(f"--loggers wandb: no API key; set WANDB_API_KEY or call `wandb login`, {instead}")


class CsvFiles(Logger):
    """metrics.csv, the numbers that the same seed gives again, and timing.csv, those of the clock."""

    def __init__(self, directory: Path, done: int) -> None:
        self._metrics, self._timing = (_Table(directory / name, done) for name in ("metrics.csv", "timing.csv"))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """A row in each."""
        self._metrics.add({name: value for name, value in metrics.items() if name not in _CLOCK}, step)
        self._timing.add({name: value for name, value in metrics.items() if name in _CLOCK}, step)

    def flush(self) -> None:
        """Both."""
        self._metrics.flush()
        self._timing.flush()


class TensorBoard(Logger):
    """Events in logs/."""

    def __init__(self, directory: Path, done: int) -> None:
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # args.json is in it
        purge = done + 1 if done else None
        self._board = TensorBoardLogger(directory / "logs", name="", version="", purge_step=purge)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """As hyper-parameters."""
        self._board.log_hyperparams({name: str(value) for name, value in params.items()})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """As scalars."""
        try:
            self._board.log_metrics(dict(metrics), step)
        except ValueError as error:  # lightning's name for all that can happen, a full disk too
            raise error.__cause__ or error from None

    def log_text(self, name: str, text: str, step: int) -> None:
        """As Markdown without links."""
        self._board.experiment.add_text(name, without_links(text), step)

    def close(self) -> None:
        """Flush the events."""
        self._board.finalize("success")


class WeightsAndBiases(Logger):
    """A run of Weights & Biases, kept in wandb/; its id in wandb/run_id, by which a resumed run goes on.

    What a resumed run logs again it logs with the same numbers, and Weights & Biases drops steps that it has.
    """

    def __init__(self, args: TrainArgs, directory: Path) -> None:
        self._wandb = _import_wandb()
        kept = directory / "wandb" / "run_id"
        if not kept.is_file():
            kept.parent.mkdir(exist_ok=True)
            write_text(kept, [f"{secrets.token_hex(4)}\n"])
        settings = {"console": "off", "silent": True, "init_timeout": _WANDB_START, "finish_timeout": _WANDB_END}
        try:
            self._run = self._wandb.init(
                project=args.wandb_project,
                entity=args.wandb_entity,
                mode=args.wandb_mode,
                id=kept.read_text(encoding="utf-8").strip(),
                resume="allow",
                name="/".join(directory.parts[-3:]),
                group="/".join(directory.parts[-3:-1]),
                job_type=directory.name,
                dir=directory,
                settings=self._wandb.Settings(**settings),
            )
        except self._wandb.errors.Error as error:
            raise ValueError(f"--loggers wandb: {_one_line(error)}") from None

    def log_params(self, params: Mapping[str, Any]) -> None:
        """As the run's config."""
        self._run.config.update(dict(params), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """As history."""
        self._log(dict(metrics), step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """As a page that holds nothing but text."""
        self._log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step)

    def _log(self, content: dict[str, Any], step: int) -> None:
        try:
            self._run.log(content, step=step)
        except self._wandb.errors.Error as error:
            raise OSError(f"Weights & Biases takes nothing more: {_one_line(error)}") from None

    def close(self) -> None:
        """Send what is left; what a server does not take in time stays in wandb/ for `wandb sync`."""
        self._run.finish()


class Console(Logger):
    """A line of at most 100 columns each time that something is logged, for terminals and log files."""

    def __init__(self, stage: str, done: int, total_steps: int) -> None:
        self._stage, self._done, self._total, self._start = stage, done, total_steps, time.perf_counter()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Stage, step, the numbers that matter most, and the time left."""
        numbers = [f"{SHOWN[name]}={value:.4g}" for name, value in metrics.items() if name in SHOWN]
        line = f"{self._stage} {step}/{self._total}"
        left = f" left={self._left(step)}"
        for number in numbers:
            if len(line) + 1 + len(number) + len(left) <= COLUMNS:
                line += f" {number}"
        print(line + left, flush=True)

    def _left(self, step: int) -> str:
        """Hours, minutes and seconds, if the steps to come take as long as those of this process."""
        if step <= self._done:
            return "?"
        seconds = (time.perf_counter() - self._start) / (step - self._done) * (self._total - step)
        return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02}:{int(seconds % 60):02}"


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("--loggers wandb needs the package wandb: pip install 'rlhf_stages[wandb]'") from None
    return wandb


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


class _Table:
    """A CSV file with a row per call, whose columns may grow.

    Args:
        done: rows of later steps, and a row that a kill cut off, are taken away first.
    """

    def __init__(self, path: Path, done: int) -> None:
        self._path = path
        self._columns = ["step"]
        if path.is_file():
            header, *rows = _whole_rows(path.read_text(encoding="utf-8", errors="replace"))
            self._columns = header
            self._write(rows[i] for i in range(len(rows)) if int(rows[i][header.index("step")]) <= done)

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Add a row; it is with the operating system when this returns."""
        if not numbers:
            return
        new = sorted(numbers.keys() - set(self._columns))
        if new:
            rows = _whole_rows(self._path.read_text(encoding="utf-8")) if self._path.is_file() else [self._columns]
            self._columns = [*self._columns, *new]
            self._write([*row, *("" for _ in new)] for row in rows[1:])
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_line([{"step": step, **numbers}.get(column, "") for column in self._columns]))

    def flush(self) -> None:
        """Wait until all of it is on the disk."""
        if self._path.is_file():
            flush(self._path)

    def _write(self, rows: Iterable[Sequence[Any]]) -> None:
        write_text(self._path, map(_csv_line, [self._columns, *rows]))


def _csv_line(row: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(row)
    return line.getvalue()


def _whole_rows(text: str) -> list[list[str]]:
    """The header and the rows that end in a line break."""
    return list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [["step"]]
