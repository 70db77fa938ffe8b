import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_stages.args import FabricArgs, SFTArgs
from rlhf_stages.experiment import Experiment, describe
from rlhf_stages.loggers import SHOWN
from rlhf_stages.loop import start_fabric
from rlhf_stages.terminal import folded_command
from rlhf_stages.tracking import Averages, Tracker, distribution, last_lines

from helpers import read_metrics


@pytest.fixture
def fabric():
    return start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


@pytest.fixture
def experiment(tmp_path):
    return Experiment.create(tmp_path / "run", describe("sft", {}, {}, {}), overwrite=False)


def test_means_are_weighted_and_start_anew(fabric):
    averages = Averages(fabric)
    averages.update({"loss": torch.tensor(1.0), "other": 5.0}, weight=torch.tensor(3))
    averages.update({"loss": 5.0}, weight=1)
    assert averages.compute() == {"loss": 2.0, "other": 5.0}  # (3 * 1 + 1 * 5) / 4
    assert averages.compute() == {}
    averages.update({"loss": 7.0})
    assert averages.compute() == {"loss": 7.0}


def test_a_value_without_weight_counts_nothing(fabric):
    averages = Averages(fabric)
    averages.update({"loss": 100.0}, weight=0)
    averages.update({"loss": 2.0}, weight=5)
    assert averages.compute() == {"loss": 2.0}


def test_nan_is_an_error_with_a_name(fabric):
    with pytest.raises(FloatingPointError, match=r"train/loss is not a number \(NaN\); lower the learning rate"):
        Averages(fabric).update({"train/loss": math.nan})


def test_a_device_that_saw_nothing_takes_part(fabric):
    """The names are those of the first device; the others add nothing where they have nothing."""
    follower = SimpleNamespace(device=fabric.device, broadcast=lambda names: ["val/loss", "val/acc"])
    averages = Averages(follower)
    averages.update({"val/acc": 0.5})
    means = averages.compute()
    assert list(means) == ["val/loss", "val/acc"]
    assert means["val/acc"] == 0.5
    assert averages._metrics == {}  # ready for the next round


def test_distribution_by_hand(fabric):
    numbers = distribution("debug/scores", torch.tensor([1.0, 2.0, 6.0]), fabric)
    assert numbers == pytest.approx(
        {
            "debug/scores_mean": 3.0,
            "debug/scores_std": math.sqrt(14 / 3),  # deviations -2 -1 3
            "debug/scores_min": 1.0,
            "debug/scores_max": 6.0,
        }
    )


def test_standard_deviation_far_from_zero(fabric):
    # in float32 the difference of the squares would be noise
    assert distribution("x", 10_000 + torch.tensor([0.0, 0.2]), fabric)["x_std"] == pytest.approx(0.1, rel=0.01)


def test_metrics_go_to_csv_and_tensorboard(fabric, experiment):
    tracker = Tracker(experiment, fabric, total_steps=4, arguments={"train_args": SFTArgs(seed=7)})
    tracker.log({"val/loss": 3.0}, 0)
    tracker.log({"train/loss": 2.5, "info/lr": 1e-4}, 2)
    tracker.log({"val/loss": 1.5}, 4)
    tracker.close()
    metrics = read_metrics(experiment.dir)
    assert metrics["val/loss"] == {0: 3.0, 4: 1.5}
    assert metrics["train/loss"] == {2: 2.5}
    assert sorted(read_metrics(experiment.dir, "timing.csv")["info/elapsed_seconds"]) == [0, 2, 4]
    assert "info/elapsed_seconds" not in metrics
    board = EventAccumulator(str(experiment.dir / "logs")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("val/loss")] == [(0, 3.0), (4, 1.5)]
    assert sorted(path.name for path in experiment.dir.iterdir()) == [
        "args.json", "checkpoints", "logs", "metrics.csv", "timing.csv",
    ]  # fmt: skip


def test_the_bar_shows_what_matters(fabric, experiment, capsys):
    tracker = Tracker(experiment, fabric, total_steps=2, arguments={})
    tracker.log({"train/loss": 2.5, "train/kl_sequence": 0.25, "info/lr": 1e-4}, 1)
    tracker.advance()
    tracker.log({"val/loss": 1.25}, 2)
    tracker.message("a line")
    tracker.advance()
    tracker.close()
    output, bar = capsys.readouterr()
    assert output == "a line\n"
    assert "loss=2.5 kl=0.25 val_loss=1.25" in bar
    assert "lr=" not in bar


@pytest.mark.parametrize("columns", [None, 60])
def test_the_bar_fits_the_terminal_and_tells_the_time_left(fabric, experiment, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns)) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    tracker = Tracker(experiment, fabric, total_steps=20_000, arguments={})
    tracker.log(dict.fromkeys(SHOWN, -123.4), 1)
    tracker.message("warning: " + "word " * 100)
    for _ in range(3):
        tracker.advance()
    tracker.close()
    output, bar = capsys.readouterr()
    lines = [line for line in bar.replace("\r", "\n").split("\n") if line.strip()]
    assert max(map(len, lines)) == (columns or 100)
    assert re.search(r"\| 3/20000 \[00:0\d<[\d:]+, ", lines[-1])
    assert max(map(len, output.split("\n"))) in range(90, 101)


def test_the_last_lines_say_where_everything_is_and_what_comes_next(experiment):
    for name in ("metrics.csv", "samples.jsonl"):
        (experiment.dir / name).touch()
    for step in (5, 10):
        experiment.checkpoints.path(step).mkdir(parents=True)
    text = last_lines(experiment, {"steps": 10, "val/loss": 0.25, "labels": {"a": 1}}, "python scripts/chat.py e")
    assert text.split("\n") == [
        "steps                    10",
        "val/loss                 0.25",
        f"experiment               {experiment.dir}",
        "                         checkpoints/step-000010",
        "                         metrics.csv",
        "                         samples.jsonl",
        "to look at it:",
        *folded_command(f"python scripts/report.py {experiment.dir}").split("\n"),
        "next:",
        "  python scripts/chat.py e",
    ]


def test_samples(fabric, experiment):
    tracker = Tracker(experiment, fabric, total_steps=1, arguments={})
    tracker.log_sample("example_sample", 3, "the <prompt>", " the reply", score=0.5)
    tracker.close()
    assert json.loads((experiment.dir / "samples.jsonl").read_text()) == {
        "step": 3, "name": "example_sample", "prompt": "the <prompt>", "response": " the reply", "score": 0.5,
    }  # fmt: skip
    board = EventAccumulator(str(experiment.dir / "logs")).Reload()
    assert "info/example_sample/text_summary" in board.Tags()["tensors"]


def test_other_processes_write_nothing(fabric, experiment, capsys):
    follower = SimpleNamespace(is_global_zero=False, device=fabric.device)
    tracker = Tracker(experiment, follower, total_steps=1, arguments={"train_args": SFTArgs()})
    tracker.log({"train/loss": 1.0}, 1)
    tracker.log_sample("example_sample", 1, "a", "b")
    tracker.message("a line")
    tracker.advance()
    tracker.close()
    assert sorted(path.name for path in experiment.dir.iterdir()) == ["args.json", "checkpoints"]
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_called_so(fabric, experiment, monkeypatch):
    tracker = Tracker(experiment, fabric, total_steps=1, arguments={})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker._loggers[1]._board.experiment, "add_scalar", full)
    with pytest.raises(OSError, match="No space left on device"):
        tracker.log({"train/loss": 1.0}, 1)
    tracker.close()
