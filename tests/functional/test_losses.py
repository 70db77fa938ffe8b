"""Expected values, and gradients, come from loops over rows without padding; whatever is padding is NaN or infinite."""

import math
import random

import pytest
import torch

from rlhf_stages.functional.losses import (
    REWARD_LOSSES,
    average_reward_loss,
    entropy,
    gather_logprobs,
    last_token_reward_loss,
    log_ratio,
    per_sample_reward_loss,
    policy_loss,
    score_at,
    sft_loss,
    value_loss,
)

LENGTHS = [4, 1, 0, 3, 5]
SIZE = 6
MASK = torch.tensor([[t < length for t in range(SIZE)] for length in LENGTHS])
JUNK = [math.nan, math.inf, -math.inf]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def padded(rows, junk=math.nan, size=SIZE):
    return doubles([row + [junk] * (size - len(row)) for row in rows])


def random_rows(seed, low=-1.0, high=1.0, lengths=LENGTHS):
    draw = random.Random(seed)
    return [[draw.uniform(low, high) for _ in range(length)] for length in lengths]


def close(actual, expected, rtol=1e-9):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=1e-12)


# --- supervised fine-tuning ---


def sft_rows(dtype=torch.float32):
    """Logits (3, 5, 7) that are NaN where they predict nothing that counts, and targets (-1 is ignored)."""
    targets = torch.tensor([[3, 0, 6, 2, 1], [5, -1, -1, 4, -1], [-1, -1, -1, -1, -1]])
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    logits[1, [0, 1, 3, 4]] = math.nan  # only the logits at 2 predict a target of row 1: the one at 3
    logits[0, 4], logits[2] = math.nan, math.nan
    return logits, targets


COUNTED = [(0, 0, 0), (0, 1, 6), (0, 2, 2), (0, 3, 1), (1, 2, 4)]  # Row, place of the logits, id they predict


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_sft_loss_is_the_cross_entropy_of_the_next_token(smoothing):
    logits, targets = sft_rows()
    loss, count = sft_loss(logits, targets, -1, smoothing)
    expected = 0.0
    for row, place, token in COUNTED:
        scores = logits[row, place].double().tolist()
        normalizer = math.log(sum(math.exp(score) for score in scores))
        logprobs = [score - normalizer for score in scores]
        expected -= (1 - smoothing) * logprobs[token] + smoothing * sum(logprobs) / len(logprobs)
    assert int(count) == 5
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_sft_loss_of_equal_logits_is_the_log_of_the_vocabulary():
    loss, count = sft_loss(torch.zeros(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64), -100)
    assert int(count) == 6  # the first token of each row is never predicted
    assert float(loss) == pytest.approx(6 * math.log(8), rel=1e-6)


def test_sft_loss_reads_any_ignore_index_and_id_0_counts():
    logits, targets = sft_rows()
    expected = sft_loss(logits, targets, -1)
    for actual, wanted in zip(sft_loss(logits, targets.where(targets != -1, -100), -100), expected, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft_gradient_equals_autograd_per_token_and_is_0_elsewhere(smoothing):
    logits, targets = sft_rows()
    logits.requires_grad_()
    sft_loss(logits, targets, -1, smoothing)[0].backward()
    expected = torch.zeros_like(logits)
    for row, place, token in COUNTED:
        # derivative of the cross-entropy: probabilities minus target distribution
        expected[row, place] = torch.softmax(logits[row, place].detach(), -1) - smoothing / 7
        expected[row, place, token] -= 1 - smoothing
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)


def test_sft_loss_of_a_batch_without_a_target_is_0_with_a_gradient_of_0():
    logits = torch.full((2, 3, 4), math.nan, requires_grad=True)
    loss, count = sft_loss(logits, torch.full((2, 3), -1), -1)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert float(logits.grad.abs().sum()) == 0.0


def test_sft_loss_of_half_precision_logits_is_taken_in_float32():
    logits, targets = sft_rows()
    loss, _ = sft_loss(logits.bfloat16(), targets, -1)
    assert loss.dtype == torch.float32
    close(loss, sft_loss(logits.bfloat16().float(), targets, -1)[0])


# --- reward losses ---


def log_sigmoid(margin):
    return -torch.log1p(torch.exp(-margin)) if margin > -30 else margin


def per_sample_loop(better, worse, start):
    """A text that has ended keeps its last score while the longer one goes on."""
    places = range(start, max(len(better), len(worse)))
    losses = [-log_sigmoid(better[min(t, len(better) - 1)] - worse[min(t, len(worse) - 1)]) for t in places]
    return sum(losses) / len(losses) if losses else 0 * better[0]


def last_token_loop(better, worse, start):
    return -log_sigmoid(better[-1] - worse[-1])


def average_loop(better, worse, start):
    means = [sum(own) / len(own) for own in (better[start:] or better[-1:], worse[start:] or worse[-1:])]
    return -log_sigmoid(means[0] - means[1])


LOOPS = {"per_sample": per_sample_loop, "last_token": last_token_loop, "average": average_loop}
# (length of better, of worse, start): ragged both ways, differing from the first token on or at the last,
# better a prefix of worse, worse a prefix of better, equal texts
PAIRS = [(4, 6, 1), (5, 3, 2), (3, 3, 0), (6, 6, 5), (2, 5, 2), (5, 2, 2), (4, 4, 4), (1, 1, 0)]


def pair_inputs(junk, dtype=torch.float64):
    better = random_rows(1, -2, 2, [b for b, _, _ in PAIRS])
    worse = random_rows(2, -2, 2, [w for _, w, _ in PAIRS])
    scores = [padded(rows, junk, 7).to(dtype).requires_grad_() for rows in (better, worse)]
    better_lengths, worse_lengths, starts = (torch.tensor(column) for column in zip(*PAIRS, strict=True))
    return *scores, starts, better_lengths, worse_lengths


def test_every_reward_loss_has_a_loop_to_be_compared_with():
    functions = (per_sample_reward_loss, last_token_reward_loss, average_reward_loss)
    assert dict(zip(LOOPS, functions, strict=True)) == REWARD_LOSSES


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", LOOPS)
def test_reward_loss_and_gradient_equal_a_loop(name, junk):
    better, worse, starts, better_lengths, worse_lengths = pair_inputs(junk)
    loss, pairs = REWARD_LOSSES[name](better, worse, starts, better_lengths, worse_lengths)
    loss.backward()
    rows = [
        [[score.detach().requires_grad_() for score in scores[i, :length]] for i, length in enumerate(lengths.tolist())]
        for scores, lengths in ((better, better_lengths), (worse, worse_lengths))
    ]
    expected = sum(LOOPS[name](b, w, start) for b, w, (_, _, start) in zip(*rows, PAIRS, strict=True))
    expected.backward()
    assert int(pairs) == len(PAIRS)
    close(loss, expected)
    for scores, leaves in zip((better, worse), rows, strict=True):
        grads = [[0.0 if s.grad is None else float(s.grad) for s in row] for row in leaves]
        close(scores.grad, padded(grads, 0.0, 7))


@pytest.mark.parametrize("name", LOOPS)
def test_reward_loss_falls_as_the_better_text_gains(name):
    better, worse, *rest = pair_inputs(0.0)
    loss, _ = REWARD_LOSSES[name](better, worse, *rest)
    assert REWARD_LOSSES[name](better + 1, worse, *rest)[0] < loss
    assert REWARD_LOSSES[name](better, worse + 1, *rest)[0] > loss


@pytest.mark.parametrize("name", LOOPS)
def test_reward_loss_of_a_large_gap_is_finite_and_still_pulls(name):
    three = torch.tensor([3])
    # -log sigmoid(-100) = 100 with slope -1; at +100 both are e^-100
    for gap, expected, slope in ((-100.0, 100.0, -1.0), (100.0, math.exp(-100), -math.exp(-100))):
        better = torch.full((1, 3), gap, dtype=torch.float64, requires_grad=True)
        loss, _ = REWARD_LOSSES[name](better, torch.zeros_like(better), torch.tensor([1]), three, three)
        loss.backward()
        close(loss, expected)
        close(better.grad.sum(), slope)
        assert 0 < float(better.grad.abs().sum()) < math.inf
    better = torch.full((1, 3), -100.0, requires_grad=True)  # float32, where log(1 + exp(100)) overflows
    loss, _ = REWARD_LOSSES[name](better, torch.zeros_like(better), torch.tensor([1]), three, three)
    loss.backward()
    assert (float(loss.detach()), float(better.grad.sum())) == (100.0, -1.0)


def test_the_score_before_the_first_difference_does_not_matter_where_it_should_not():
    for name in ("per_sample", "average"):
        better, worse, starts, *lengths = pair_inputs(math.nan)
        moved = better.detach().clone()
        moved[0, 0] += 5.0  # pair 0 starts at 1
        arguments = (worse, starts, *lengths)
        close(REWARD_LOSSES[name](moved, *arguments)[0], REWARD_LOSSES[name](better, *arguments)[0])


def test_score_at_the_last_token():
    scores = doubles([[1.0, 2.0, math.nan], [3.0, math.inf, 9.0], [4.0, 5.0, 6.0]])
    assert score_at(scores, torch.tensor([2, 1, 3])).tolist() == [2.0, 3.0, 6.0]


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logprobs_and_entropy_equal_a_loop(temperature):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * 4
    ids = torch.tensor([[4, 0, 2], [1, 1, 3]])
    logprobs, entropies = gather_logprobs(logits, ids, temperature), entropy(logits, temperature)
    for b in range(2):
        for t in range(3):
            weights = [math.exp(score / temperature) for score in logits[b, t].tolist()]
            shares = [weight / sum(weights) for weight in weights]
            # float32: a log-probability is a difference of numbers of about 10
            assert float(logprobs[b, t]) == pytest.approx(math.log(shares[ids[b, t]]), rel=1e-6, abs=1e-6)
            assert float(entropies[b, t]) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-6, abs=1e-6)


def test_entropy_at_its_landmarks():
    assert float(entropy(torch.zeros(1, 1, 8))) == pytest.approx(math.log(8), rel=1e-6)
    assert float(entropy(torch.tensor([[[50.0, 0.0, 0.0]]]))) == pytest.approx(0.0, abs=1e-6)


def test_logprobs_of_half_precision_logits_are_float32():
    logits = torch.tensor([[[10.0, 9.96, 0.0]]]).bfloat16()
    logprobs = gather_logprobs(logits, torch.tensor([[1]]))
    assert logprobs.dtype == entropy(logits).dtype == torch.float32
    close(logprobs, gather_logprobs(logits.float(), torch.tensor([[1]])))


def test_gradient_of_the_logprob_is_one_hot_minus_probabilities():
    logits = torch.tensor([[[1.0, -2.0, 0.5]]], requires_grad=True)
    gather_logprobs(logits, torch.tensor([[2]]), temperature=2.0).sum().backward()
    expected = (torch.tensor([0.0, 0.0, 1.0]) - torch.softmax(logits.detach() / 2, -1)) / 2
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)


# --- PPO ---


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
