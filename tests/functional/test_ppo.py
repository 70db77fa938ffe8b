"""Expected values, and gradients, come from loops over rows without padding; whatever is padding is NaN or infinite."""

import math

import pytest
import torch

from rlhf_stages.functional.ppo import huber_error, kl_loss, log_ratio, policy_loss, value_loss

from ragged import JUNK, LENGTHS, MASK, SIZE, close, doubles, padded, random_rows

ONE = torch.tensor([[True]])


def policy_loop(new, old, advantage, clip):
    ratio = math.exp(new - old)
    return -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)


def policy_slope(new, old, advantage, clip):
    """Derivative by the log-probability: -advantage * ratio where nothing is clipped."""
    ratio = math.exp(new - old)
    clipped = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
    return 0.0 if clipped else -advantage * ratio


@pytest.mark.parametrize("junk", JUNK)
def test_policy_loss_and_gradient_equal_a_loop(junk):
    new, old, advantages = random_rows(3), random_rows(4), random_rows(5)
    leaf = padded(new, junk).requires_grad_()
    loss, count = policy_loss(leaf, padded(old, junk), padded(advantages, junk), MASK, 0.2)
    loss.backward()
    rows = [list(zip(n, o, a, strict=True)) for n, o, a in zip(new, old, advantages, strict=True)]
    assert int(count) == sum(LENGTHS)
    close(loss, sum(policy_loop(*token, 0.2) for row in rows for token in row))
    close(leaf.grad, padded([[policy_slope(*token, 0.2) for token in row] for row in rows], 0.0))


def test_policy_loss_at_ratio_1_is_minus_the_sum_of_the_advantages():
    advantages = random_rows(6)
    logprobs = padded(random_rows(7))
    loss, count = policy_loss(logprobs, logprobs.clone(), padded(advantages), MASK, 0.2)
    close(loss / count, -sum(sum(row) for row in advantages) / sum(LENGTHS))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (2.0, 3.0, -3.6),  # good and already likelier: clipped at 1.2
        (0.5, 3.0, -1.5),  # good and less likely: not clipped
        (2.0, -3.0, 6.0),  # bad and likelier: not clipped
        (0.5, -3.0, 2.4),  # bad and already less likely: clipped at 0.8
    ],
)
def test_policy_loss_clips_on_the_side_that_would_go_too_far(ratio, advantage, expected):
    new = doubles([[math.log(ratio)]]).requires_grad_()
    loss, _ = policy_loss(new, doubles([[0.0]]), doubles([[advantage]]), torch.tensor([[True]]), 0.2)
    loss.backward()
    close(loss, expected)
    clipped = abs(expected) < abs(ratio * advantage) if advantage > 0 else abs(expected) > abs(ratio * advantage)
    close(new.grad, [[0.0 if clipped else -ratio * advantage]])


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_loss_of_an_extreme_ratio_is_finite(gap, advantage):
    new = torch.full((1, 2), gap, requires_grad=True)
    loss, _ = policy_loss(new, torch.zeros(1, 2), torch.full((1, 2), advantage), torch.ones(1, 2).bool(), 0.2)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(new.grad.isfinite().all())


def test_log_ratio_is_clamped_to_20_and_0_off_the_mask():
    mask = torch.tensor([[True, True, True, True, False]])
    new, old = doubles([[1.0, 200.0, -200.0, 19.0, math.nan]]), doubles([[0.25, 0.0, 0.0, 0.0, 1.0]])
    assert log_ratio(new, old, mask).tolist() == [[0.75, 20.0, -20.0, 19.0, 0.0]]


def test_value_loss_by_hand():
    # old 1, clip 0.2. Value 2, return 3: clipped to 1.2, errors 1 and 3.24, the larger counts: 1.62
    # Value 0.9, return 0: within the clip, errors .81 and .81: .405. Together 2.025
    mask = torch.tensor([[True, True, False]])
    values = doubles([[2.0, 0.9, math.nan]])
    loss, count = value_loss(values, doubles([[1.0, 1.0, 0.0]]), doubles([[3.0, 0.0, 0.0]]), mask, 0.2)
    close(loss, 2.025)
    assert int(count) == 2


def value_loop(value, old, target, clip):
    clipped = max(old - clip, min(value, old + clip))
    return max((value - target) ** 2, (clipped - target) ** 2) / 2


def value_slope(value, old, target, clip):
    clipped = max(old - clip, min(value, old + clip))
    return value - target if abs(value - target) >= abs(clipped - target) else 0.0


@pytest.mark.parametrize("junk", JUNK)
def test_value_loss_and_gradient_equal_a_loop(junk):
    values, old, returns = random_rows(8), random_rows(9), random_rows(10)
    leaf = padded(values, junk).requires_grad_()
    loss, count = value_loss(leaf, padded(old, junk), padded(returns, junk), MASK, 0.2)
    loss.backward()
    rows = [list(zip(v, o, r, strict=True)) for v, o, r in zip(values, old, returns, strict=True)]
    assert int(count) == sum(LENGTHS)
    close(loss, sum(value_loop(*token, 0.2) for row in rows for token in row))
    close(leaf.grad, padded([[value_slope(*token, 0.2) for token in row] for row in rows], 0.0))


@pytest.mark.parametrize("loss", [policy_loss, value_loss])
def test_losses_of_nothing_are_0(loss):
    leaf = torch.full((2, 3), math.nan, requires_grad=True)
    nan = torch.full((2, 3), math.nan)
    result, count = loss(leaf, nan, nan, torch.zeros(2, 3, dtype=torch.bool), 0.2)
    result.backward()
    assert (result.item(), count.item(), leaf.grad.abs().sum().item()) == (0.0, 0, 0.0)


@pytest.mark.parametrize("loss", [policy_loss, value_loss])
def test_losses_do_not_see_padding_columns_and_add_up_over_parts(loss):
    rows = [random_rows(seed) for seed in (11, 12, 13)]
    whole, count = loss(*(padded(row, 0.0) for row in rows), MASK, 0.2)
    wide = torch.cat([MASK, torch.zeros(5, 3, dtype=torch.bool)], dim=1)
    close(loss(*(padded(row, math.nan, SIZE + 3) for row in rows), wide, 0.2)[0], whole)
    parts = [loss(*(padded(row, 0.0)[part] for row in rows), MASK[part], 0.2) for part in ([0, 3], [1, 2, 4])]
    close(sum(part for part, _ in parts), whole)
    assert int(sum(number for _, number in parts)) == int(count)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.28, 2.0, -2.56),  # below 1 + 0.3: not clipped
        (1.5, 2.0, -2.6),  # clipped at 1.3
        (0.7, -2.0, 1.8),  # clipped at 0.9
        (0.95, -2.0, 1.9),  # above 1 - 0.1: not clipped
    ],
)
def test_policy_loss_with_a_wider_range_upwards(ratio, advantage, expected):
    loss, _ = policy_loss(doubles([[math.log(ratio)]]), doubles([[0.0]]), doubles([[advantage]]), ONE, 0.1, 0.3)
    close(loss, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (5.0, -2.0, 6.0, 0.0),  # bad and much likelier: the loss 10 is bounded by 3 * 2, and no longer pulls
        (2.0, -2.0, 4.0, 4.0),  # below the bound: as without
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8: as without
        (5.0, 2.0, -2.4, 0.0),  # good: as without
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, expected, slope):
    new = doubles([[math.log(ratio)]]).requires_grad_()
    loss, _ = policy_loss(new, doubles([[0.0]]), doubles([[advantage]]), ONE, 0.2, dual_clip=3.0)
    loss.backward()
    close(loss, expected)
    close(new.grad, [[slope]])


@pytest.mark.parametrize(("difference", "expected"), [(0.5, 0.125), (-2.0, 2.0), (5.0, 8.0), (-5.0, 8.0)])
def test_huber_error_by_hand(difference, expected):
    # delta 2: half the square up to 2, then 2 * (|d| - 1)
    close(huber_error(doubles(difference), 2.0), expected)
    library = torch.nn.functional.huber_loss(doubles(difference), doubles(0.0), delta=2.0)
    close(huber_error(doubles(difference), 2.0), library)


def test_value_loss_with_huber_error_by_hand():
    # old 0, clip 0.2, return 5. Value 1 is clipped to 0.2: errors 4 and 4.8, huber at delta 2: 6 and 7.6
    loss, _ = value_loss(doubles([[1.0]]), doubles([[0.0]]), doubles([[5.0]]), ONE, 0.2, 2.0)
    close(loss, 7.6)


# KL as a loss

ACTOR, REFERENCE, OLD = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.5, 0.25, 0.25]


def exact_kl_gradient(logits):
    """Gradient of KL(policy || reference) by the logits, summed over the vocabulary."""
    logprobs = torch.log_softmax(logits, -1)
    kl = (logprobs.exp() * (logprobs - doubles(REFERENCE).log())).sum()
    return torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("behaviour", [ACTOR, OLD])
def test_kl_loss_has_the_gradient_of_the_kl_on_and_off_policy(behaviour):
    logits = doubles(ACTOR).log().requires_grad_()
    expected = exact_kl_gradient(logits)
    total = torch.zeros(3, dtype=torch.float64)
    for token, probability in enumerate(behaviour):  # the expectation over samples of the behaviour, enumerated
        logprobs = torch.log_softmax(logits, -1)[token][None, None]
        old, ref = doubles([[math.log(behaviour[token])]]), doubles([[math.log(REFERENCE[token])]])
        loss, count = kl_loss(logprobs, old, ref, ONE)
        assert int(count) == 1
        total += probability * torch.autograd.grad(loss, logits)[0]
    close(total, expected)
    assert expected.abs().max() > 0.05


def test_kl_loss_is_the_kl_in_value():
    exact = sum(p * math.log(p / q) for p, q in zip(ACTOR, REFERENCE, strict=True))
    value = 0.0
    for p, q, b in zip(ACTOR, REFERENCE, OLD, strict=True):
        loss, _ = kl_loss(doubles([[math.log(p)]]), doubles([[math.log(b)]]), doubles([[math.log(q)]]), ONE)
        assert loss >= 0
        value += b * float(loss)
    assert value == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("junk", JUNK)
def test_kl_loss_does_not_see_padding(junk):
    new, old, ref = (random_rows(seed) for seed in (20, 21, 22))
    leaf = padded(new, junk).requires_grad_()
    loss, count = kl_loss(leaf, padded(old, junk), padded(ref, junk), MASK)
    loss.backward()
    rows = [list(zip(n, o, r, strict=True)) for n, o, r in zip(new, old, ref, strict=True)]
    tokens = [token for row in rows for token in row]
    close(loss, sum(math.exp(n - o) * (math.exp(r - n) - 1 + n - r) for n, o, r in tokens))
    assert int(count) == sum(LENGTHS)
    assert bool(leaf.grad.isfinite().all())
    assert not leaf.grad[~MASK].any()
