import math
import statistics

import pytest
import torch

from rlhf_stages.functional.masking import moments
from rlhf_stages.functional.metrics import explained_variance, order_accuracy, pair_statistics, policy_statistics

MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def test_pair_statistics_and_a_tie_is_wrong():
    result = pair_statistics(doubles([2.0, 1.0, 0.0, -1.0]), doubles([1.0, 1.0, 3.0, -5.0]))
    # right, tie, wrong, right; margins 1, 0, -3, 4
    assert {name: float(value) for name, value in result.items()} == {
        "acc": 0.5,
        "choosen_reward": 0.5,
        "rejected_reward": 0.0,
        "reward_margin": 0.5,
    }


def test_exact_order_of_ragged_lists():
    scores = [[3.0, 2.0, 1.0], [1.0, 0.0], [3.0, 1.0, 2.0], [2.0, 2.0], [4.0, 3.0, 2.0, 1.0], [1.0, 0.0, 2.0]]
    # in order, in order, last two swapped, a tie, in order, the last above both: 3 of 6 lists
    pairs = [
        (row[i], row[j], number)
        for number, row in enumerate(scores)
        for i in range(len(row))
        for j in range(i + 1, len(row))
    ]
    better, worse, lists = zip(*pairs, strict=True)
    share, count = order_accuracy(doubles(better), doubles(worse), torch.tensor(lists))
    assert (float(share), int(count)) == (0.5, 6)
    # of the 3 + 1 + 3 + 1 + 6 + 3 pairs, 1 + 1 + 2 are wrong
    assert float(pair_statistics(doubles(better), doubles(worse))["acc"]) == pytest.approx(13 / 17)


def test_exact_order_of_pairs_is_their_accuracy_and_lists_without_a_pair_do_not_count():
    better, worse = doubles([2.0, 1.0, 0.0]), doubles([1.0, 5.0, -1.0])
    share, count = order_accuracy(better, worse, torch.tensor([0, 2, 3]))  # list 1 has a single text
    assert (float(share), int(count)) == (pytest.approx(2 / 3), 3)


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e9])
def test_policy_statistics_by_hand(junk):
    # ratios 1.5, 1, 0.5 and 1.1; clipped at 0.2: the first and the third
    old = doubles([[-1.0, -2.0, -1.0, junk], [-0.5, junk, junk, junk]])
    new = doubles([[-1.0 + math.log(1.5), -2.0, -1.0 + math.log(0.5), -junk], [-0.5 + math.log(1.1), junk, 0.0, junk]])
    result = policy_statistics(new, old, MASK, 0.2)
    terms = [r - 1 - math.log(r) for r in (1.5, 1.0, 0.5, 1.1)]
    assert float(result["approx_kl"]) == pytest.approx(statistics.fmean(terms), rel=1e-9)
    assert float(result["clip_fraction"]) == pytest.approx(0.5, rel=1e-6)
    assert float(result["ratio_mean"]) == pytest.approx((1.5 + 1.0 + 0.5 + 1.1) / 4, rel=1e-9)
    # with 0.6 upwards the first is not clipped, with 0.05 also the last
    assert float(policy_statistics(new, old, MASK, 0.2, 0.6)["clip_fraction"]) == pytest.approx(0.25, rel=1e-6)
    assert float(policy_statistics(new, old, MASK, 0.2, 0.05)["clip_fraction"]) == pytest.approx(0.75, rel=1e-6)


def test_policy_statistics_before_any_update_are_exactly_0():
    logprobs = torch.randn(3, 5)
    result = policy_statistics(logprobs, logprobs.clone(), torch.ones(3, 5).bool(), 0.2)
    found = {name: float(value) for name, value in result.items()}
    assert found == {"approx_kl": 0.0, "clip_fraction": 0.0, "ratio_mean": 1.0}


def test_approx_kl_estimates_the_kl_of_the_old_to_the_new_policy():
    # enumerate: E_old[ratio - 1 - log ratio] is KL(old || new) exactly, which is not KL(new || old)
    old, new = doubles([0.7, 0.2, 0.1]), doubles([0.3, 0.3, 0.4])
    terms = [
        float(policy_statistics(n[None, None], o[None, None], torch.ones(1, 1).bool(), 0.2)["approx_kl"])
        for o, n in zip(old.log(), new.log(), strict=True)
    ]
    estimate = sum(p * term for p, term in zip(old.tolist(), terms, strict=True))
    exact = sum(p * math.log(p / q) for p, q in zip(old.tolist(), new.tolist(), strict=True))
    assert estimate == pytest.approx(exact, rel=1e-9)
    assert min(terms) >= 0


def explained(values, returns, mask):
    return explained_variance(moments(returns - values, mask), moments(returns, mask))


def test_explained_variance_equals_a_loop():
    values = doubles([[1.0, 2.0, 4.0, math.nan], [0.0, math.inf, 5.0, 5.0]])
    returns = doubles([[1.5, 2.0, 3.0, math.nan], [-1.0, 2.0, math.inf, 5.0]])
    errors, targets = [0.5, 0.0, -1.0, -1.0], [1.5, 2.0, 3.0, -1.0]
    expected = 1 - statistics.variance(errors) / statistics.variance(targets)
    assert explained(values, returns, MASK) == pytest.approx(expected, rel=1e-9)


def test_explained_variance_is_over_all_devices():
    values, returns = doubles([[1.0, 2.0, 4.0, 0.0], [0.0, 0, 0, 0]]), doubles([[1.5, 2.0, 3.0, 0.0], [-1.0, 0, 0, 0]])
    parts = [(returns[row : row + 1], values[row : row + 1], MASK[row : row + 1]) for row in (0, 1)]
    error = sum(moments(r - v, m) for r, v, m in parts)
    target = sum(moments(r, m) for r, v, m in parts)
    assert explained_variance(error, target) == pytest.approx(explained(values, returns, MASK), rel=1e-9)


def test_explained_variance_at_its_landmarks():
    returns = doubles([[1.0, 2.0, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    assert explained(returns, returns, MASK) == 1.0
    assert explained(torch.full_like(returns, 7.0), returns, MASK) == pytest.approx(0.0, abs=1e-9)
    assert explained(returns, torch.ones_like(returns), MASK) == 0.0  # nothing to explain
    rounded = 3 + 1e-7 * torch.arange(returns.numel()).reshape(returns.shape).double()
    assert explained(returns.double(), rounded, MASK) == 0.0
    assert explained(returns, returns, MASK & (torch.arange(4) == 9)) == 0.0  # no token
