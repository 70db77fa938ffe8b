import re
from types import SimpleNamespace

import pytest
import torch

from rlhf_stages.rollout.collect import Rollout, select_rows
from rlhf_stages.rollout.health import health_metrics
from rlhf_stages.rollout.monitor import HealthMonitor


def make_rollout():
    junk = 99.0
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]]).bool()
    log_ratio = torch.tensor([[1.0, 1, 1], [-1, 0, junk], [0, 0, junk], [0.5, 0, 0]])
    return Rollout(
        prompt_ids=torch.zeros(4, 1),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        # pairs: 78 87, 78, 78, 78 88; the second and third are equal (but for what lies under the padding)
        response_ids=torch.tensor([[7, 8, 7], [7, 8, 5], [7, 8, 6], [7, 8, 8]]),
        response_mask=mask,
        logprobs=log_ratio,
        ref_logprobs=torch.zeros(4, 3),
        entropies=torch.where(mask, torch.tensor([[1.0, 2, 3], [4, 5, 0], [0, 0, 0], [1, 1, 1]]), junk),
        values=torch.zeros(4, 3),
        part_scores=torch.zeros(4, 1),
        token_scores=torch.zeros(4, 3),
        scores=torch.tensor([4.0, 1.0, 3.0, 2.0]),
        ended=torch.ones(4, dtype=torch.bool),
    )


def test_health_metrics_by_hand():
    one_device = SimpleNamespace(all_gather=lambda values: values)
    found = {name: value.item() for name, value in health_metrics(make_rollout(), one_device).items()}
    assert found == pytest.approx(
        {
            "health/entropy": 18 / 10,
            "health/kl_max": 3.0,  # sequences: 3, -1, 0, 0.5
            "health/kl_error": (3**2 + 1**2 + 0.5**2) ** 0.5 / 4,
            "health/length_std": 0.5,  # 3, 2, 2, 3
            "health/duplicate_percentage": 25.0,
            "health/distinct_2": 3 / 6,
            "health/score_p05": 1.15,
            "health/score_p50": 2.5,
            "health/score_p95": 3.85,
        }
    )


def test_two_devices_see_the_extremes_and_deviations_of_both():
    rollout, brought = make_rollout(), []
    halves = [select_rows(rollout, rows) for rows in ([0, 1], [2, 3])]
    for half in halves:
        health_metrics(half, SimpleNamespace(all_gather=lambda values: brought.append(values) or values))
    both = SimpleNamespace(all_gather=lambda values: torch.stack(brought))
    whole = health_metrics(rollout, SimpleNamespace(all_gather=lambda values: values))
    for half in halves:
        found = health_metrics(half, both)
        for name in whole.keys() - {"health/duplicate_percentage", "health/distinct_2"}:
            assert found[name].item() == pytest.approx(whole[name].item()), name
        # 78 87 78, and 78 78 88: in each two of three pairs are new
        assert found["health/distinct_2"].item() == pytest.approx(2 / 3)


WELL = {
    "health/distinct_2": 0.6,
    "health/duplicate_percentage": 2.0,
    "health/kl_error": 0.1,
    "train/empty_percentage": 0.0,
    "train/cut_off_percentage": 3.0,
    "train/response_length": 20.0,
    "train/reward_mean": 1.0,
    "train/kl_sequence": 0.0,
    "info/explained_variance": 0.3,
}


def warnings_of(**changes):
    """What the monitor says when the second step differs from the first by these changes."""
    monitor = HealthMonitor()
    assert monitor.check(WELL, 1) == []
    return monitor.check({**WELL, **{name.replace("__", "/"): value for name, value in changes.items()}}, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"health__distinct_2": 0.25}, r"step 2: the responses collapse \(distinct-2 0.60 -> 0.25, 2 % duplicates\)"),
        ({"health__duplicate_percentage": 60.0}, "60 % duplicates.*raise --init_kl_coeff"),
        ({"train__empty_percentage": 51.0}, "51 % of the responses are empty"),
        ({"train__response_length": 31.0, "train__reward_mean": 2.0}, "from 20 to 31 tokens.*may pay for length"),
        ({"train__response_length": 9.0, "train__reward_mean": 2.0}, "from 20 to 9 tokens"),
        ({"train__cut_off_percentage": 55.0}, "55 % of the responses are cut off.*--missing_eos_penalty"),
        ({"train__kl_sequence": 21.0}, "21 nats per response.*--adaptive_kl_coeff"),
        ({"train__kl_sequence": -0.5}, "negative beyond chance"),
    ],
)
def test_each_illness_is_named(changes, message):
    (warning,) = warnings_of(**changes)
    assert re.search(message, warning)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"health__distinct_2": 0.31},
        {"train__response_length": 31.0, "train__reward_mean": 0.5},  # longer, and not paid for
        {"train__response_length": 29.0, "train__reward_mean": 2.0},
        {"train__kl_sequence": 19.0},
        {"train__kl_sequence": -0.2},  # within three standard errors
        {"info__explained_variance": -1.0},  # once is no illness
    ],
)
def test_the_healthy_are_left_alone(changes):
    assert warnings_of(**changes) == []


def test_a_critic_that_stays_blind():
    monitor = HealthMonitor()
    blind = {**WELL, "info/explained_variance": 0.0}
    assert [monitor.check(blind, step) for step in range(9)] == [[]] * 9
    (warning,) = monitor.check(blind, 9)
    assert "the critic explains nothing" in warning


def test_a_warning_is_repeated_after_a_while_only():
    monitor = HealthMonitor()
    monitor.check(WELL, 1)
    ill = {**WELL, "train/kl_sequence": 30.0}
    assert [step for step in range(2, 50) if monitor.check(ill, step)] == [2, 22, 42]
