from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_stages.args import SFTArgs
from rlhf_stages.cli import Interrupted
from rlhf_stages.experiment import Experiment, describe
from rlhf_stages.keeper import Keeper
from rlhf_stages.kl_control import make_kl_control
from rlhf_stages.rollout.monitor import HealthMonitor
from rlhf_stages.tracking import Averages
from rlhf_stages.value_norm import ValueNorm

from helpers import make_tokenizer

SILENT = SimpleNamespace(message=lambda text: None, flush=lambda: None, close=lambda: None)


def fabric_of(is_first=True):
    """As much of a Fabric as a keeper needs."""
    return SimpleNamespace(
        is_global_zero=is_first, global_rank=0, world_size=1, device=torch.device("cpu"), barrier=lambda: None,
        broadcast=lambda value, src=0: value, strategy=SimpleNamespace(precision=None),
    )  # fmt: skip


@pytest.fixture
def keepers(tmp_path):
    """Makes keepers of a layer that is saved as its numbers, and gives their signals back."""
    made = []

    def make(is_first=True, experiment=None, total_steps=9, **args):
        fabric, layer = fabric_of(is_first), nn.Linear(1, 1)
        experiment = experiment or Experiment.create(tmp_path / "run", describe("sft", {}, {}, {}), overwrite=True)
        parts = {"optimizer": torch.optim.Adam(layer.parameters())}
        keeper = Keeper(
            fabric, SFTArgs(**args), experiment, SILENT, make_tokenizer(), total_steps, {}, parts, Averages(fabric)
        )
        made.append(keeper)
        return keeper

    yield make
    for keeper in reversed(made):
        keeper.wait()
        keeper._interruption.close()


def test_only_the_first_process_writes(keepers, tmp_path):
    keeper = keepers(is_first=False, experiment=Experiment(tmp_path / "nowhere"), save_interval=1, total_steps=2)
    keeper.end_step(1)
    keeper.skip(2, "the loss is nan", [4])
    keeper.end_step(2)
    assert keeper.finish({"steps": 2}, "") == tmp_path / "nowhere"
    assert not (tmp_path / "nowhere").exists()


def test_what_is_due(keepers):
    keeper = keepers(save_interval=4, eval_interval=3)
    assert [step for step in range(1, 10) if keeper.evaluates(step)] == [3, 4, 6, 8, 9]


@pytest.mark.parametrize(
    ("qualities", "best"),
    [
        ({2: 1.0, 4: 2.0, 6: 3.0}, 6),
        ({2: 3.0, 4: 2.0, 6: 3.0}, 6),  # the later of two that are as good
        ({2: 3.0, 4: 2.0, 6: 1.0}, 2),
        ({2: float("nan"), 4: float("nan"), 6: float("nan")}, 6),  # nothing is known: the last
        ({2: -1.0, 4: float("nan"), 6: -2.0}, 4),
    ],
)
def test_the_best_checkpoint(keepers, tmp_path, qualities, best):
    keeper = keepers(save_interval=2)
    for step in range(1, 7):
        keeper.end_step(step, quality=qualities.get(step, 99.0))  # what is found between saves does not count
    keeper.wait()
    assert (tmp_path / "run" / "best").read_text() == f"step-{best:06d}\n"
    assert (tmp_path / "run" / "latest").read_text() == "step-000006\n"


def test_training_goes_on_while_a_checkpoint_is_written(keepers, tmp_path, monkeypatch):
    import threading

    keeper, gate = keepers(save_interval=1), threading.Event()
    point_to = Experiment.point_to

    def waiting(self, name, step):
        assert gate.wait(20)
        point_to(self, name, step)

    monkeypatch.setattr(Experiment, "point_to", waiting)
    keeper.end_step(1)  # returns
    assert not (tmp_path / "run" / "latest").exists()
    gate.set()
    keeper.wait()
    assert (tmp_path / "run" / "latest").read_text() == "step-000001\n"


def test_skipped_steps_are_in_a_row_only_without_a_good_one_between(keepers):
    keeper = keepers(max_skipped_steps=3)
    for step in (1, 2, 4, 5):
        keeper.skip(step, "the loss is nan", [])
    keeper.skip(5, "the loss is nan", [])  # twice in one step
    assert (keeper.progress.skipped, keeper.progress.skipped_in_a_row) == (4, 2)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row .*the last good checkpoint is not there yet"):
        keeper.skip(6, "the loss is nan", [])


def test_at_the_last_step_a_signal_changes_nothing(keepers, monkeypatch):
    keeper = keepers(total_steps=2)
    monkeypatch.setattr(keeper._interruption, "reason", lambda fabric: "SIGTERM")
    keeper.end_step(2)
    with pytest.raises(Interrupted):
        keeper.end_step(1)


def test_the_parts_of_a_run_give_their_state_and_take_it():
    control = make_kl_control("horizon", 0.2, 0.1, 10)
    control.update(1.0, 10)  # + 20 %
    other = make_kl_control("horizon", 0.5, 0.1, 10)
    other.load_state_dict(control.state_dict())
    assert other.coeff == control.coeff == pytest.approx(0.24)
    norm, fresh = ValueNorm(), ValueNorm()
    norm.update(torch.tensor([2.0, 6.0, 20.0], dtype=torch.float64))  # count, sum, sum of squares: mean 3, variance 1
    fresh.load_state_dict(norm.state_dict())
    assert fresh.denormalize(torch.tensor(1.0)).item() == pytest.approx(4.0)
    metrics = {"health/distinct_2": 0.9, "health/duplicate_percentage": 0.0, "train/response_length": 10.0,
               "train/reward_mean": 0.0, "train/cut_off_percentage": 0.0, "train/empty_percentage": 0.0,
               "train/kl_sequence": 0.1, "health/kl_error": 0.1}  # fmt: skip
    monitor, resumed = HealthMonitor(), HealthMonitor()
    assert monitor.check(metrics, 1) == []
    resumed.load_state_dict(monitor.state_dict())
    (warning,) = resumed.check(metrics | {"health/distinct_2": 0.1}, 2)
    assert "distinct-2 0.90 -> 0.10" in warning  # the first step's, which it has not seen itself
