"""Expected values, and gradients, come from loops over rows without padding; whatever is padding is NaN or infinite."""

import math

import pytest
import torch

from rlhf_stages.functional.losses import (
    REWARD_LOSSES,
    average_reward_loss,
    balanced_weights,
    centering_loss,
    classification_loss,
    last_token_reward_loss,
    per_sample_reward_loss,
    score_at,
)

from ragged import JUNK, close, doubles, padded, random_rows

# --- reward losses ---


def log_sigmoid(margin):
    return -torch.log1p(torch.exp(-margin)) if margin > -30 else margin


def per_sample_loop(better, worse, start, margin):
    """A text that has ended keeps its last score while the longer one goes on."""
    places = range(start, max(len(better), len(worse)))
    losses = [-log_sigmoid(better[min(t, len(better) - 1)] - worse[min(t, len(worse) - 1)] - margin) for t in places]
    return sum(losses) / len(losses) if losses else 0 * better[0]


def last_token_loop(better, worse, start, margin):
    return -log_sigmoid(better[-1] - worse[-1] - margin)


def average_loop(better, worse, start, margin):
    means = [sum(own) / len(own) for own in (better[start:] or better[-1:], worse[start:] or worse[-1:])]
    return -log_sigmoid(means[0] - means[1] - margin)


LOOPS = {"per_sample": per_sample_loop, "last_token": last_token_loop, "average": average_loop}
# (length of better, of worse, start): ragged both ways, differing from the first token on or at the last,
# better a prefix of worse, worse a prefix of better, equal texts
PAIRS = [(4, 6, 1), (5, 3, 2), (3, 3, 0), (6, 6, 5), (2, 5, 2), (5, 2, 2), (4, 4, 4), (1, 1, 0)]
MARGINS = [0.5, 0.0, 1.0, 0.25, 0.0, 2.0, 3.0, 1.5]


def pair_inputs(junk, dtype=torch.float64):
    better = random_rows(1, -2, 2, [b for b, _, _ in PAIRS])
    worse = random_rows(2, -2, 2, [w for _, w, _ in PAIRS])
    scores = [padded(rows, junk, 7).to(dtype).requires_grad_() for rows in (better, worse)]
    better_lengths, worse_lengths, starts = (torch.tensor(column) for column in zip(*PAIRS, strict=True))
    return *scores, starts, better_lengths, worse_lengths, torch.tensor(MARGINS)


def test_every_reward_loss_has_a_loop_to_be_compared_with():
    functions = (per_sample_reward_loss, last_token_reward_loss, average_reward_loss)
    assert dict(zip(LOOPS, functions, strict=True)) == REWARD_LOSSES


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", LOOPS)
def test_reward_loss_and_gradient_equal_a_loop(name, junk):
    better, worse, starts, better_lengths, worse_lengths, margins = pair_inputs(junk)
    loss, pairs = REWARD_LOSSES[name](better, worse, starts, better_lengths, worse_lengths, margins)
    loss.backward()
    rows = [
        [[score.detach().requires_grad_() for score in scores[i, :length]] for i, length in enumerate(lengths.tolist())]
        for scores, lengths in ((better, better_lengths), (worse, worse_lengths))
    ]
    columns = zip(*rows, PAIRS, MARGINS, strict=True)
    expected = sum(LOOPS[name](b, w, start, margin) for b, w, (_, _, start), margin in columns)
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
    three, none = torch.tensor([3]), torch.zeros(1)
    # -log sigmoid(-100) = 100 with slope -1; at +100 both are e^-100
    for gap, expected, slope in ((-100.0, 100.0, -1.0), (100.0, math.exp(-100), -math.exp(-100))):
        better = torch.full((1, 3), gap, dtype=torch.float64, requires_grad=True)
        loss, _ = REWARD_LOSSES[name](better, torch.zeros_like(better), torch.tensor([1]), three, three, none)
        loss.backward()
        close(loss, expected)
        close(better.grad.sum(), slope)
        assert 0 < float(better.grad.abs().sum()) < math.inf
    better = torch.full((1, 3), -100.0, requires_grad=True)  # float32, where log(1 + exp(100)) overflows
    loss, _ = REWARD_LOSSES[name](better, torch.zeros_like(better), torch.tensor([1]), three, three, none)
    loss.backward()
    assert (float(loss.detach()), float(better.grad.sum())) == (100.0, -1.0)


def test_the_score_before_the_first_difference_does_not_matter_where_it_should_not():
    for name in ("per_sample", "average"):
        better, worse, starts, *lengths = pair_inputs(math.nan)
        moved = better.detach().clone()
        moved[0, 0] += 5.0  # pair 0 starts at 1
        arguments = (worse, starts, *lengths)
        close(REWARD_LOSSES[name](moved, *arguments)[0], REWARD_LOSSES[name](better, *arguments)[0])


@pytest.mark.parametrize("name", LOOPS)
def test_a_margin_by_hand(name):
    # scores 2 and 0.5 at every token, margin 1: -log sigmoid(0.5) = log(1 + e^-0.5) = 0.474077
    scores = [torch.full((1, 2), value, dtype=torch.float64) for value in (2.0, 0.5)]
    loss, _ = REWARD_LOSSES[name](*scores, torch.tensor([0]), *[torch.tensor([2])] * 2, torch.tensor([1.0]))
    assert float(loss) == pytest.approx(0.474077, abs=1e-6)


@pytest.mark.parametrize("name", LOOPS)
def test_ranked_lists_weigh_as_their_pairs(name):
    """Two lists, of 3 and 2 texts of one token: the mean over their 3 + 1 pairs, not over lists of their means."""
    scores = doubles([[2.0], [1.0], [-1.0], [0.0], [3.0]])
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    better, worse = torch.tensor(pairs).unbind(1)
    ones = torch.ones(4, dtype=torch.int64)
    loss, count = REWARD_LOSSES[name](scores[better], scores[worse], 0 * ones, ones, ones, torch.zeros(4))
    # leads 1, 3, 2 and -3
    expected = sum(math.log(1 + math.exp(-lead)) for lead in (1, 3, 2, -3)) / 4
    assert float(loss / count) == pytest.approx(expected, rel=1e-9)


def test_centering_by_hand():
    better, worse = doubles([2.0, -1.0]).requires_grad_(), doubles([1.0, -0.5])
    loss, pairs = centering_loss(better, worse)
    loss.backward()
    # (2 + 1)^2 + (-1 - 0.5)^2 = 9 + 2.25; the slope is twice the sum
    assert (float(loss.detach()), int(pairs)) == (11.25, 2)
    assert better.grad.tolist() == [6.0, -3.0]


def test_score_at_the_last_token():
    scores = doubles([[1.0, 2.0, math.nan], [3.0, math.inf, 9.0], [4.0, 5.0, 6.0]])
    assert score_at(scores, torch.tensor([2, 1, 3])).tolist() == [2.0, 3.0, 6.0]


# --- classification ---


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 4.0, 2.5)])
def test_classification_loss_and_gradient_by_hand(weights):
    """-log softmax of the right label times its weight; its derivative is weight * (probabilities - one-hot)."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 3
    labels, weight = [2, 0, 1, 1], torch.tensor(weights)
    logits.requires_grad_()
    loss, count = classification_loss(logits, torch.tensor(labels), weight)
    loss.backward()
    expected, gradient = 0.0, []
    for row, label in zip(logits.detach().double().tolist(), labels, strict=True):
        normalizer = math.log(sum(math.exp(x) for x in row))
        expected += weights[label] * (normalizer - row[label])
        gradient.append([weights[label] * (math.exp(x - normalizer) - (i == label)) for i, x in enumerate(row)])
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert count.item() == pytest.approx(sum(weights[label] for label in labels))
    torch.testing.assert_close(logits.grad, torch.tensor(gradient), rtol=1e-5, atol=1e-6)


def test_classification_loss_is_computed_in_fp32():
    """In bf16 log(2) would be 0.6914."""
    loss, _ = classification_loss(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([0]), torch.ones(2))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)


def test_balanced_weights_make_up_for_rare_labels():
    """6 : 3 : 1 texts; a label without a text weighs as much as one with a single text."""
    weights = balanced_weights(torch.tensor([6, 3, 1, 0]))
    assert weights.tolist() == [1.0, 2.0, 6.0, 6.0]
    assert weights.dtype == torch.float32
