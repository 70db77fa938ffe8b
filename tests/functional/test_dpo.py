"""Expected values come from plain Python over one pair at a time, in the form of probabilities and not of logs."""

import math
import random

import pytest
import torch

from rlhf_stages.functional.dpo import dpo_loss, implicit_rewards

PAIRS = 7


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def log_probabilities(seed):
    """Better, worse, and both under the reference: (P,) each, between -3 and 0 nats."""
    draw = random.Random(seed)
    return [doubles([draw.uniform(-3, 0) for _ in range(PAIRS)]).requires_grad_() for _ in range(4)]


def preference_probability(better, worse, ref_better, ref_worse, beta):
    """Bradley-Terry with odds (policy / reference)^beta: no log, no sigmoid."""
    odds = [(math.exp(p) / math.exp(r)) ** beta for p, r in ((better, ref_better), (worse, ref_worse))]
    return odds[0] / (odds[0] + odds[1])


def test_by_hand():
    # margin 0.5 * ((-1 - -2) - (-3 - -2.5)) = 0.5 * (1 + 0.5) = 0.75; log(1 + e^-0.75) = 0.386871
    loss, pairs = dpo_loss(doubles([-1.0]), doubles([-3.0]), doubles([-2.0]), doubles([-2.5]), beta=0.5)
    assert loss.item() == pytest.approx(0.386871, abs=1e-6)
    assert pairs.item() == 1
    # turned round: log(1 + e^0.75) = 1.136871; with e = 0.2: 0.8 * 0.386871 + 0.2 * 1.136871 = 0.536871
    loss, _ = dpo_loss(doubles([-1.0]), doubles([-3.0]), doubles([-2.0]), doubles([-2.5]), 0.5, label_smoothing=0.2)
    assert loss.item() == pytest.approx(0.536871, abs=1e-6)


def test_implicit_rewards_by_hand():
    assert implicit_rewards(doubles([-1.0, -4.0]), doubles([-2.0, -1.0]), beta=0.5).tolist() == [0.5, -1.5]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
def test_loss_and_gradient_equal_a_loop_over_probabilities(beta, smoothing):
    inputs = log_probabilities(seed=1)
    loss, pairs = dpo_loss(*inputs, beta, smoothing)
    loss.backward()
    expected, slopes = 0.0, []
    for pair in zip(*(column.tolist() for column in inputs), strict=True):
        right = preference_probability(*pair, beta)
        expected -= (1 - smoothing) * math.log(right) + smoothing * math.log(1 - right)
        # the cross-entropy of a logistic model falls along its margin by (label - probability)
        slopes.append(beta * ((1 - smoothing) - right))
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert pairs.item() == PAIRS
    better, worse, ref_better, ref_worse = (column.grad for column in inputs)
    torch.testing.assert_close(better, -doubles(slopes), rtol=1e-9, atol=0)
    torch.testing.assert_close(worse, doubles(slopes), rtol=1e-9, atol=0)
    torch.testing.assert_close(ref_better, doubles(slopes), rtol=1e-9, atol=0)
    torch.testing.assert_close(ref_worse, -doubles(slopes), rtol=1e-9, atol=0)


def test_gradient_equals_finite_differences():
    inputs = log_probabilities(seed=2)
    assert torch.autograd.gradcheck(lambda *columns: dpo_loss(*columns, 0.7, 0.1)[0], inputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_policy_that_is_its_reference_has_log_2_and_no_reward(smoothing):
    better, worse = torch.tensor([-310.25, -12.5, -0.1]), torch.tensor([-5.0, -700.3, -0.1])
    loss, pairs = dpo_loss(better, worse, better.clone(), worse.clone(), 0.1, smoothing)
    assert loss.item() / pairs.item() == pytest.approx(math.log(2), rel=1e-6)
    assert implicit_rewards(better, better.clone(), 0.1).tolist() == [0, 0, 0]


def test_what_both_texts_share_cancels():
    """A prompt adds the same to both log-probabilities, and something else to both under the reference."""
    better, worse, ref_better, ref_worse = log_probabilities(seed=3)
    whole, _ = dpo_loss(better - 40, worse - 40, ref_better - 35, ref_worse - 35, 0.5)
    assert whole.item() == pytest.approx(dpo_loss(better, worse, ref_better, ref_worse, 0.5)[0].item(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [100.0, 1000.0])
def test_a_large_gap_is_finite_and_still_pulls(gap, dtype):
    zero = torch.zeros(1, dtype=dtype)
    for smoothing in (0.0, 0.25):
        wrong = torch.full((1,), -gap, dtype=dtype, requires_grad=True)
        loss, _ = dpo_loss(wrong, zero, zero, zero, 1.0, smoothing)
        loss.backward()
        # -log sigmoid(-gap) is gap, and -log sigmoid(gap) nothing
        assert loss.item() == pytest.approx((1 - smoothing) * gap, rel=1e-6)
        assert wrong.grad.item() == pytest.approx(-(1 - smoothing), rel=1e-6)
        right = torch.full((1,), gap, dtype=dtype, requires_grad=True)
        loss, _ = dpo_loss(right, zero, zero, zero, 1.0, smoothing)
        loss.backward()
        assert loss.item() == pytest.approx(smoothing * gap, rel=1e-6, abs=1e-30)
        assert right.grad.item() == pytest.approx(smoothing, rel=1e-6, abs=1e-30)


def test_a_small_change_of_a_long_text_survives_float32():
    """Log-probabilities of -3,000 nats: fp32 holds the quarter between policy and reference, and no seventh digit.

    The difference of such a text to a short one would be rounded to 2^-12, and -7.1 and -6.3 in different directions.
    """
    reference, worse, ref_worse = torch.tensor([-3000.0]), torch.tensor([-7.1]), torch.tensor([-6.3])
    loss, _ = dpo_loss(reference + 0.25, worse, reference, ref_worse, beta=1.0)
    margin = 0.25 - (worse.item() - ref_worse.item())
    assert loss.item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-6)


def test_smoothing_has_its_minimum_where_the_label_is_as_sure_as_it_says():
    """sigmoid(margin) = 1 - e: at e = 0.2 the margin is log 4."""
    margins = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    losses = [dpo_loss(margin[None], doubles([0]), doubles([0]), doubles([0]), 1.0, 0.2)[0] for margin in margins]
    assert margins[torch.stack(losses).argmin()].item() == pytest.approx(math.log(4), abs=1e-3)


def test_no_pairs_are_no_loss():
    none = torch.zeros(0, requires_grad=True)
    loss, pairs = dpo_loss(none, none, none, none, 0.1)
    loss.backward()
    assert (loss.item(), pairs.item()) == (0.0, 0)
