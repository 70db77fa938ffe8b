"""Expected values come from hand arithmetic or from sums written out over rows without padding."""

import math
import random

import pytest
import torch

from rlhf_stages.functional.advantages import gae, kl_estimate, token_rewards

LENGTHS = [4, 1, 0, 3, 5]
SIZE = 6
MASK = torch.tensor([[t < length for t in range(SIZE)] for length in LENGTHS])


def junk_padded(rows, junk=math.nan):
    return torch.tensor([row + [junk] * (SIZE - len(row)) for row in rows], dtype=torch.float64)


def random_rows(seed):
    draw = random.Random(seed)
    return [[draw.uniform(-2, 2) for _ in range(length)] for length in LENGTHS]


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def textbook_advantages(rewards, values, gamma, lambd):
    """Sum over l of (gamma lambda)^l delta_{t+l}, the value after the last token being 0."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def test_kl_is_positive_where_the_actor_is_more_likely_and_costs_reward_there():
    logprobs = torch.tensor([[-1.0, -2.0, -0.5, math.nan]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, -0.5, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    kl = kl_estimate(logprobs, reference, mask)
    close(kl, [[0.5, -1.0, 0.0, 0.0]])
    # -0.2 * kl, and the score 3 on the last token
    close(token_rewards(torch.tensor([3.0]).double(), kl, mask, 0.2), [[-0.1, 0.2, 3.0, 0.0]])


def test_kl_ignores_what_is_under_the_padding():
    for poison in (math.nan, math.inf, -math.inf):
        rows = random_rows(0)
        kl = kl_estimate(junk_padded(rows, poison), junk_padded(random_rows(1), poison), MASK)
        for row, logprobs, reference in zip(kl, rows, random_rows(1), strict=True):
            close(row, [p - r for p, r in zip(logprobs, reference, strict=True)] + [0.0] * (SIZE - len(logprobs)))


def test_mean_kl_of_samples_is_the_kl_of_the_distributions():
    actor, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    exact = sum(p * math.log(p / q) for p, q in zip(actor.tolist(), reference.tolist(), strict=True))
    ids = torch.multinomial(actor, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    kl = kl_estimate(actor.log()[ids][:, None], reference.log()[ids][:, None], torch.ones(20_000, 1).bool())
    three_sigma = 3 * float(kl.std()) / math.sqrt(20_000)
    assert float(kl.mean()) == pytest.approx(exact, abs=three_sigma)


def test_score_goes_to_the_last_token_of_each_response():
    # zero KL: only the scores are left; row 2 has no token, row 4 leaves one place, and a score of 0 is a score
    scores = torch.tensor([1.0, -2.0, 9.0, 0.0, 5.0], dtype=torch.float64)
    rewards = token_rewards(scores, junk_padded([[0.0] * length for length in LENGTHS]), MASK, 0.3)
    expected = torch.zeros(5, SIZE, dtype=torch.float64)
    expected[0, 3], expected[1, 0], expected[4, 4] = 1.0, -2.0, 5.0
    close(rewards, expected)


def test_score_of_a_response_that_fills_every_place():
    rewards = token_rewards(torch.tensor([2.0]), torch.ones(1, 3), torch.ones(1, 3).bool(), 0.5)
    assert rewards.tolist() == [[-0.5, -0.5, 1.5]]


def test_token_rewards_equal_a_loop():
    kl, scores = random_rows(2), [1.3, -0.7, 9.0, 0.0, 2.9]
    rewards = token_rewards(torch.tensor(scores, dtype=torch.float64), junk_padded(kl), MASK, 0.7)
    for row, one, score in zip(rewards, kl, scores, strict=True):
        expected = [-0.7 * k for k in one]
        if expected:
            expected[-1] += score
        close(row, expected + [0.0] * (SIZE - len(one)))


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.9, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e6])
def test_gae_equals_the_textbook_sum(gamma, lambd, junk):
    rewards, values = random_rows(4), random_rows(5)
    advantages, returns = gae(junk_padded(rewards, junk), junk_padded(values, junk), MASK, gamma, lambd)
    for a, g, r, v in zip(advantages, returns, rewards, values, strict=True):
        expected, rest = textbook_advantages(r, v, gamma, lambd), [0.0] * (SIZE - len(r))
        close(a, expected + rest)
        close(g, [x + y for x, y in zip(expected, v, strict=True)] + rest)


def test_gae_by_hand():
    # gamma .5, lambda .5; delta_1 = 4 - 2 = 2, delta_0 = 1 + .5 * 2 - 3 = -1; A_1 = 2, A_0 = -1 + .25 * 2 = -.5
    rewards, values = torch.tensor([[1.0, 4.0, 7.0]]).double(), torch.tensor([[3.0, 2.0, 8.0]]).double()
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, False]]), 0.5, 0.5)
    close(advantages, [[-0.5, 2.0, 0.0]])
    close(returns, [[2.5, 4.0, 0.0]])


def test_gae_permutes_with_its_rows():
    rewards, values = junk_padded(random_rows(6)), junk_padded(random_rows(7))
    order = torch.tensor([3, 0, 4, 2, 1])
    straight, permuted = (gae(rewards[rows], values[rows], MASK[rows], 0.9, 0.8) for rows in (torch.arange(5), order))
    for before, after in zip(straight, permuted, strict=True):
        close(after, before[order])


def test_without_discount_and_kl_every_live_token_returns_the_score():
    scores = torch.tensor([1.5, -2.0, 9.0, 0.25, 4.0], dtype=torch.float64)
    values = junk_padded(random_rows(8))
    rewards = token_rewards(scores, torch.zeros(5, SIZE).double(), MASK, 0.1)
    advantages, returns = gae(rewards, values, MASK, 1.0, 1.0)
    close(returns, torch.where(MASK, scores[:, None], 0.0))
    close(torch.where(MASK, advantages + values, 0.0), torch.where(MASK, scores[:, None], 0.0))


def test_gae_leaves_its_inputs_alone():
    rewards, values = junk_padded(random_rows(9), 7.0), junk_padded(random_rows(10), 7.0)
    copies = rewards.clone(), values.clone()
    gae(rewards, values, MASK, 0.9, 0.9)
    close(rewards, copies[0])
    close(values, copies[1])
