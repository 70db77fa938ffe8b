"""Confidence intervals of measures."""

import math

import pytest
import torch

from rlhf_stages.evaluation import bootstrap
from rlhf_stages.evaluation.bootstrap import Measure, interval, mean_of, ratio_of, resample, with_intervals


def test_every_resample_draws_as_many_prompts_as_there_are_and_the_seed_decides():
    weights = resample(7, 50, seed=3)
    assert weights.shape == (50, 7)
    assert weights.sum(1).tolist() == [7.0] * 50
    assert weights.unique().numel() > 2
    assert torch.equal(weights, resample(7, 50, seed=3))
    assert not torch.equal(weights, resample(7, 50, seed=4))


def test_the_interval_of_a_mean_is_that_of_the_central_limit():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    found = with_intervals({"a": {"mean": mean_of(values.tolist())}}, 2000, seed=0)["a"]["mean"]
    half = 1.96 * values.std().item() / 4000**0.5
    assert found["value"] == pytest.approx(values.mean().item())
    assert found["low"] == pytest.approx(values.mean().item() - half, abs=0.1 * half)
    assert found["high"] == pytest.approx(values.mean().item() + half, abs=0.1 * half)


def test_measures_by_hand(monkeypatch):
    # prompts 0, 1, 2; the first resample is the set itself, the second three times prompt 2
    weights = torch.tensor([[1.0, 1, 1], [0, 0, 3]], dtype=torch.float64)
    monkeypatch.setattr(bootstrap, "resample", lambda prompts, samples, seed: weights)
    one = {
        "mean": mean_of([True, False, True], scale=100),
        "ppl": ratio_of([1.0, 2.0, 6.0], [1, 2, 3], of=math.exp),
        "own": Measure(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), lambda sums: float(sums[0]) ** 2),
    }
    other = {"mean": mean_of([0.0, 0.0, 0.5], scale=100)}
    table = with_intervals({"one": one, "other": other}, 2, seed=0)
    assert {name: entry["value"] for name, entry in table["one"].items()} == pytest.approx(
        {"mean": 200 / 3, "ppl": math.exp(9 / 6), "own": 36.0}
    )
    # draws: 66.7 and 100; e^1.5 and e^2; 36 and 81. The quantiles of two values lie 2.5 % from them
    assert table["one"]["own"]["low"] == pytest.approx(36 + 0.025 * 45)
    assert table["one"]["ppl"]["high"] == pytest.approx(math.exp(2) - 0.025 * (math.exp(2) - math.exp(1.5)))
    # differences on the same resamples: 16.7 - 66.7 and 50 - 100
    assert table["other"]["mean"]["change"] == pytest.approx(-50)
    assert (table["other"]["mean"]["change_low"], table["other"]["mean"]["change_high"]) == pytest.approx((-50, -50))
    assert "change" not in table["one"]["mean"]


def test_one_prompt_has_values_and_no_intervals():
    columns = {"a": {"m": mean_of([2.0])}, "b": {"m": mean_of([5.0])}}
    assert with_intervals(columns, 10, seed=0) == {
        "a": {"m": {"value": 2.0}},
        "b": {"m": {"value": 5.0, "change": 3.0}},
    }


def test_an_interval_holds_the_middle_95_percent():
    assert interval(torch.arange(1001, dtype=torch.float64)) == pytest.approx((25.0, 975.0))


def test_several_values_of_a_prompt_are_drawn_together():
    measure = mean_of([1.0, 3.0, 5.0, 7.0], each=2)
    assert measure.counts.tolist() == [[4.0, 2.0], [12.0, 2.0]]
    assert measure.value(measure.counts.sum(0)) == 4.0


def test_columns_without_measures_have_no_numbers():
    assert with_intervals({"a": {}, "b": {}}, 10, seed=0) == {"a": {}, "b": {}}
