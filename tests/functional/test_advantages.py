"""Expected values come from hand arithmetic or from sums written out over rows without padding."""

import math
import random

import pytest
import torch

from rlhf_stages.functional.advantages import (
    KL_ESTIMATORS,
    gae,
    grpo_advantages,
    kl_estimate,
    response_returns,
    rloo_advantages,
    token_rewards,
)

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


# Estimators of the KL


@pytest.mark.parametrize(
    ("name", "expected"),
    # log-ratios 0.5 and -1: 1/2 r^2, and exp(-r) - 1 + r
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) - 0.5, math.e - 2])],
)
def test_kl_estimators_by_hand(name, expected):
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, math.inf]], dtype=torch.float64)
    found = kl_estimate(logprobs, reference, torch.tensor([[True, True, False]]), name)
    close(found, [[*expected, 0.0]])


def test_k1_and_k3_are_unbiased_and_k2_and_k3_never_negative():
    actor, reference = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip(actor.tolist(), reference.tolist(), strict=True))
    log_ratio = (actor / reference).log()
    means = {name: float((actor * estimate(log_ratio)).sum()) for name, estimate in KL_ESTIMATORS.items()}
    assert means["k1"] == pytest.approx(exact, rel=1e-12)
    assert means["k3"] == pytest.approx(exact, rel=1e-12)
    assert abs(means["k2"] - exact) > 0.005
    assert min(KL_ESTIMATORS[name](log_ratio).min() for name in ("k2", "k3")) >= 0


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    """Policy gradient of -KL, enumerated over three tokens; k3 in the reward has another one."""
    logits = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), logits)
    found = {}
    for name in ("k1", "k3"):
        cost = kl_estimate(logprobs.detach()[None], reference.log()[None], torch.ones(1, 3).bool(), name)[0]
        surrogate = (torch.log_softmax(logits, -1) * logprobs.detach().exp() * cost).sum()  # E[cost grad log pi]
        (found[name],) = torch.autograd.grad(surrogate, logits)
    close(found["k1"], exact.tolist())
    assert (found["k3"] - exact).abs().max() > 0.05


# Several responses per prompt


def test_response_returns_add_score_and_kl_of_the_response():
    kl = torch.tensor([[0.5, -1.0, math.nan], [1.0, 2.0, 3.0]]).double()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = token_rewards(torch.tensor([3.0, 0.0]).double(), torch.where(mask, kl, 0), mask, 0.5)
    close(response_returns(rewards, mask), [3 - 0.5 * -0.5, -0.5 * 6])


GROUPS = torch.tensor([1.0, 2.0, 6.0, -1.0, -1.0, 2.0], dtype=torch.float64)  # three responses to each of two prompts
GROUP_MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True], [True, False], [True, True]])


def test_rloo_leaves_the_response_itself_out_of_its_baseline():
    # first prompt: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; second: -1 - 1/2, -1 - 1/2, 2 - -1
    expected = [-3.0, -1.5, 4.5, -1.5, -1.5, 3.0]
    found = rloo_advantages(GROUPS, GROUP_MASK, 3)
    close(found, [[e, e if kept else 0.0] for e, (_, kept) in zip(expected, GROUP_MASK.tolist(), strict=True)])


def test_grpo_whitens_within_the_group():
    # first prompt: mean 3, deviations -2 -1 3, sample variance (4 + 1 + 9) / 2 = 7; second: mean 0, -1 -1 2, variance 3
    expected = [d / (math.sqrt(7) + 1e-4) for d in (-2, -1, 3)] + [d / (math.sqrt(3) + 1e-4) for d in (-1, -1, 2)]
    found = grpo_advantages(GROUPS, GROUP_MASK, 3)
    close(found, [[e, e if kept else 0.0] for e, (_, kept) in zip(expected, GROUP_MASK.tolist(), strict=True)])


@pytest.mark.parametrize("estimate", [rloo_advantages, grpo_advantages])
def test_equal_responses_have_no_advantage(estimate):
    equal = torch.full((3,), 0.1)  # whose mean is not 0.1 in float32
    assert estimate(equal, torch.ones(3, 2).bool(), 3).abs().max() < 1e-3
