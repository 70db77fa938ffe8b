import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from rlhf_stages.args import PPOArgs
from rlhf_stages.data.collate import Width
from rlhf_stages.functional.masking import moments
from rlhf_stages.functional.ppo import kl_loss, policy_loss, value_loss
from rlhf_stages.functional.tokens import entropy, gather_logprobs
from rlhf_stages.rollout.collect import Fit, Rollout
from rlhf_stages.rollout.experience import Experience, make_experience, policy_objective, value_objective
from rlhf_stages.value_norm import ValueNorm


def ppo(**changes):
    plain = {"normalize_rewards": False, "normalize_advantages": False, "clip_rewards": False}
    return PPOArgs(sft_experiment_dir="", rm_experiment_dir="", **{**plain, **changes})


def rollout_of(scores, lengths, ended=None, values=None, log_ratio=None, size=None):
    """A rollout with the given scores; log-probabilities equal the reference's unless a log-ratio is given."""
    size = size or max(lengths)
    mask = torch.arange(size) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(len(scores), size)
    return Rollout(
        prompt_ids=torch.ones(len(scores), 1, dtype=torch.long),
        prompt_mask=torch.ones(len(scores), 1, dtype=torch.bool),
        response_ids=torch.ones(len(scores), size, dtype=torch.long),
        response_mask=mask,
        logprobs=zeros if log_ratio is None else log_ratio,
        ref_logprobs=zeros,
        entropies=zeros,
        values=zeros if values is None else values,
        scores=torch.tensor(scores),
        part_scores=torch.tensor(scores)[:, None],
        token_scores=zeros,
        ended=torch.tensor(ended or [True] * len(scores)),
    )


def final_scores(rollout, args):
    """What the last token of each response is given, without KL."""
    rewards = make_experience(rollout, args, kl_coeff=0.0).rewards
    last = rollout.response_mask.sum(1) - 1
    assert (rewards != 0).sum() <= len(last)
    return rewards[torch.arange(len(last)), last].tolist()


def test_missing_eos_penalty_is_subtracted_where_a_response_was_cut_off():
    rollout = rollout_of([1.0, 1.0, -1.0], [3, 3, 3], ended=[True, False, False])
    assert final_scores(rollout, ppo(missing_eos_penalty=0.75)) == [1.0, 0.25, -1.75]


def test_scores_are_clipped_after_the_penalty():
    rollout = rollout_of([9.0, -9.0, 2.0, 0.0], [2, 1, 2, 2], ended=[True, True, False, True])
    args = ppo(clip_rewards=True, reward_clip_value=5.0, missing_eos_penalty=8.0)
    assert final_scores(rollout, args) == [5.0, -5.0, -5.0, 0.0]


def test_scores_are_standardized_before_the_penalty_and_the_clip():
    rollout = rollout_of([9.0, 1.0, 5.0, -3.0], [2, 1, 2, 2], ended=[True, True, False, True])
    args = ppo(clip_rewards=True, reward_clip_value=1.5, missing_eos_penalty=0.5)
    rewards = make_experience(rollout, args, 0.0, reward_scale=(3.0, 4.0)).rewards
    # (score - 3) / 4: 1.5, -0.5, 0.5 and -1.5; the third was cut off, and no score is beyond 1.5 any more
    assert rewards[torch.arange(4), rollout.response_mask.sum(1) - 1].tolist() == [1.5, -0.5, 0.0, -1.5]
    assert rollout.scores.tolist() == [9.0, 1.0, 5.0, -3.0]  # logged as the model gave them


def test_scores_are_scaled_and_keep_their_mean():
    rollout = rollout_of([1.0, 2.0, 3.0, 6.0], [1, 2, 3, 3])
    # mean 3, deviations -2 -1 0 3, variance (4 + 1 + 9) / 4 = 3.5
    scale = math.sqrt(3.5)
    expected = [3 - 2 / scale, 3 - 1 / scale, 3.0, 3 + 3 / scale]
    assert final_scores(rollout, ppo(normalize_rewards=True)) == pytest.approx(expected, rel=1e-6)


def test_equal_scores_stay_as_they_are():
    assert final_scores(rollout_of([0.5, 0.5], [1, 2]), ppo(normalize_rewards=True)) == [0.5, 0.5]


def test_rewards_advantages_and_returns_by_hand():
    log_ratio = torch.tensor([[0.5, -1.0, 2.0, 77.0]])  # the last is under the padding
    values = torch.tensor([[1.0, 2.0, 3.0, 55.0]])
    rollout = rollout_of([10.0], [3], values=values, log_ratio=log_ratio, size=4)
    experience = make_experience(rollout, ppo(gae_gamma=1.0, gae_lambd=0.5), kl_coeff=0.1)
    torch.testing.assert_close(experience.rewards, torch.tensor([[-0.05, 0.1, 9.8, 0.0]]))
    # delta: -0.05 + 2 - 1 = 0.95; 0.1 + 3 - 2 = 1.1; 9.8 - 3 = 6.8
    # advantage: 6.8; 1.1 + 0.5 * 6.8 = 4.5; 0.95 + 0.5 * 4.5 = 3.2
    torch.testing.assert_close(experience.advantages, torch.tensor([[3.2, 4.5, 6.8, 0.0]]))
    torch.testing.assert_close(experience.returns, torch.tensor([[4.2, 6.5, 9.8, 0.0]]))


def test_whitened_advantages_keep_good_and_bad_responses_apart():
    experience = make_experience(
        rollout_of([1.0, -1.0], [2, 4]), ppo(gae_lambd=1.0, normalize_advantages=True), kl_coeff=0.0
    )
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    inside = experience.advantages[mask]
    # advantages 1 1 -1 -1 -1 -1: mean -1/3, variance (2 * 16/9 + 4 * 4/9) / 6 = 8/9
    expected = torch.tensor([4 / 3] * 2 + [-2 / 3] * 4) / math.sqrt(8 / 9)
    torch.testing.assert_close(inside, expected)
    assert not experience.advantages[~mask].any()
    # returns are what the critic learns: not whitened
    assert experience.returns[mask].tolist() == [1.0, 1.0, -1.0, -1.0, -1.0, -1.0]


def test_scores_of_tokens_are_paid_where_they_belong_and_junk_under_the_padding_is_not():
    rollout = rollout_of([1.0, 2.0], [3, 1], log_ratio=torch.full((2, 3), 0.5))
    token_scores = torch.tensor([[0.1, 0.2, 0.3], [0.4, torch.nan, 9.0]])
    rewards = make_experience(dataclasses.replace(rollout, token_scores=token_scores), ppo(), kl_coeff=0.2).rewards
    # -0.2 * 0.5 for the KL, the token's own, and the score at the end
    expected = torch.tensor([[0.0, 0.1, 1.2], [2.3, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_padding_columns_and_junk_beneath_change_nothing():
    args = ppo(normalize_rewards=True, normalize_advantages=True, clip_rewards=True)
    torch.manual_seed(0)
    values, log_ratio = torch.randn(3, 4), torch.randn(3, 4)
    narrow = rollout_of([1.0, -2.0, 0.5], [4, 1, 2], values=values, log_ratio=log_ratio)
    wide_values, wide_ratio = (torch.cat([inside, torch.full((3, 3), math.nan)], 1) for inside in (values, log_ratio))
    wide = rollout_of([1.0, -2.0, 0.5], [4, 1, 2], values=wide_values, log_ratio=wide_ratio, size=7)
    one, other = make_experience(narrow, args, 0.2), make_experience(wide, args, 0.2)
    for name in ("rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name)[:, :4])
        assert not getattr(other, name)[:, 4:].any()


def test_two_devices_with_summed_moments_agree_with_one():
    args = ppo(normalize_rewards=True, normalize_advantages=True, clip_rewards=True)
    generator = torch.Generator().manual_seed(1)
    values, log_ratio = torch.randn(2, 8, 5, generator=generator)
    lengths = [5, 1, 2, 4, 3, 3, 5, 1]
    scores = (2 * torch.randn(8, generator=generator)).tolist()

    def part(rows):
        return rollout_of(scores[rows], lengths[rows], values=values[rows], log_ratio=log_ratio[rows], size=5)

    whole = make_experience(part(slice(None)), args, kl_coeff=0.3)
    halves = [part(slice(0, 3)), part(slice(3, 8))]

    def experiences(totals):
        """Each half, where the k-th sum over devices is totals[k]; also the moments that each device brings."""
        brought, results = [], []
        for half in halves:
            calls = []

            def global_sum(mine, calls=calls):
                calls.append(mine)
                return totals[len(calls) - 1] if len(calls) <= len(totals) else mine

            results.append(make_experience(half, args, 0.3, global_sum=global_sum))
            brought.append(calls)
        return results, brought

    totals = []
    for k in range(2):  # scores first, then advantages, which depend on them
        _, brought = experiences(totals)
        totals.append(brought[0][k] + brought[1][k])
    results, _ = experiences(totals)
    for name in ("rewards", "advantages", "returns"):
        joined = torch.cat([getattr(result, name) for result in results])
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-5, atol=1e-6)
    alone = torch.cat([make_experience(half, args, 0.3).advantages for half in halves])
    assert (alone - whole.advantages).abs().max() > 0.01  # whitening each half on its own is something else


def test_all_empty_responses_give_finite_numbers():
    rollout = rollout_of([0.7, 0.7, 0.7], [1, 1, 1], values=torch.full((3, 1), 0.2))
    args = ppo(normalize_rewards=True, normalize_advantages=True, clip_rewards=True)
    experience = make_experience(rollout, args, kl_coeff=0.1)
    assert experience.returns.flatten().tolist() == pytest.approx([0.7] * 3)
    assert torch.isfinite(experience.advantages).all()


def test_a_score_of_zero_is_a_score():
    experience = make_experience(rollout_of([0.0], [2], values=torch.tensor([[1.0, 1.0]])), ppo(), kl_coeff=0.1)
    assert experience.advantages[0].tolist() == pytest.approx([-0.95, -1.0])  # delta 0 and -1, lambda 0.95


def test_moments_see_every_response():
    """The count that reaches the sum over devices is that of all responses, then of all response tokens."""
    seen = []
    rollout = rollout_of([1.0, -2.0, 0.5, 3.0], [4, 1, 2, 3])

    def global_sum(mine):
        seen.append(mine)
        return mine

    make_experience(rollout, ppo(normalize_rewards=True, normalize_advantages=True), 0.1, global_sum=global_sum)
    assert [total[0].item() for total in seen] == [4, 4 + 1 + 2 + 3]
    torch.testing.assert_close(seen[0], moments(rollout.scores, torch.ones(4, dtype=torch.bool)))


def test_a_rollout_is_not_changed():
    rollout = rollout_of([1.0, -2.0, 0.5, 3.0], [4, 1, 2, 3], log_ratio=torch.rand(4, 4))
    tensors = {name: value for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    make_experience(rollout, ppo(normalize_rewards=True, normalize_advantages=True, missing_eos_penalty=1.0), 0.1)
    assert all(torch.equal(value, getattr(rollout, name)) for name, value in before.items())


def test_select_takes_the_same_rows_of_advantages_and_returns():
    experience = make_experience(
        rollout_of([1.0, -2.0, 0.5, 3.0], [4, 1, 3, 2], values=torch.rand(4, 4)), ppo(), kl_coeff=0.1
    )
    chosen = experience.select([3, 1])
    for name in ("rewards", "advantages", "returns"):
        assert torch.equal(getattr(chosen, name), getattr(experience, name)[[3, 1], :2])


def test_a_fit_changes_no_loss_and_gives_few_shapes():
    rollout = rollout_of([1.0, 2.0, 3.0], [2, 1, 3], values=torch.rand(3, 3), log_ratio=torch.rand(3, 3))
    experience = make_experience(rollout, ppo(), kl_coeff=0.1)
    plain, fitted = (experience.select([1, 0], fit) for fit in (None, Fit(4, Width(64, 8), Width(64, 8))))
    assert {name: tuple(getattr(fitted, name).shape) for name in ("rewards", "advantages", "returns")} == dict.fromkeys(
        ("rewards", "advantages", "returns"), (4, 8)
    )
    texts = fitted.rollout.texts
    assert texts.ids.shape == texts.mask.shape == texts.places.shape == (4, 8)
    assert texts.mask.sum(1).tolist() == [2, 3, 0, 0]  # a prompt of one token each, and responses of 1 and 2
    assert fitted.rollout.response_mask.sum(1).tolist() == [1, 2, 0, 0]
    logprobs, values = torch.randn(2, 2), torch.randn(2, 2)
    for other in (fitted, plain):
        assert other.rollout.prompt_ids.shape[1] == (other is plain)
    wide = [F.pad(value, (0, 6, 0, 2), value=math.nan) for value in (logprobs, values)]  # junk in the padding
    for small, large, objective in (
        (logprobs, wide[0], lambda batch, of: policy_objective(batch, of, None, ppo())[0]),
        (values, wide[1], lambda batch, of: value_objective(batch, of, ppo())),
    ):
        torch.testing.assert_close(objective(fitted, large), objective(plain, small))


# Estimators without a critic


def test_rloo_uses_score_and_kl_of_whole_responses():
    log_ratio = torch.tensor([[0.5, -1.0, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [2.0, 7.0, 7.0]])
    rollout = rollout_of([1.0, 4.0, 0.0, 2.0], [2, 3, 3, 1], log_ratio=log_ratio)
    experience = make_experience(rollout, ppo(advantage_estimator="rloo"), kl_coeff=0.5, group_size=2)
    # returns: 1 - .5 * -.5 = 1.25, 4 - .5 * 3 = 2.5; 0, 2 - .5 * 2 = 1; each less the other's
    expected = [[-1.25, -1.25, 0], [1.25, 1.25, 1.25], [-1, -1, -1], [1, 0, 0]]
    torch.testing.assert_close(experience.advantages, torch.tensor(expected))


def test_grpo_advantages_have_one_sign_per_response_and_no_second_whitening():
    rollout = rollout_of([1.0, 3.0, 0.0, 0.0], [2, 3, 3, 1])
    args = ppo(advantage_estimator="grpo", normalize_advantages=True)
    experience = make_experience(rollout, args, kl_coeff=0.0, group_size=2)
    # deviations -1 and 1, sample deviation sqrt(2); the second prompt's are equal
    a = 1 / (math.sqrt(2) + 1e-4)
    torch.testing.assert_close(experience.advantages, torch.tensor([[-a, -a, 0], [a, a, a], [0, 0, 0], [0, 0, 0]]))


def test_kl_estimator_of_the_reward():
    rollout = rollout_of([0.0], [2], log_ratio=torch.tensor([[0.5, -1.0]]))
    rewards = make_experience(rollout, ppo(kl_estimator="k2"), kl_coeff=2.0).rewards
    torch.testing.assert_close(rewards, torch.tensor([[-0.25, -1.0]]))  # -2 * r^2 / 2


# The losses of an update


def experience_of(seed=0):
    """Two ragged responses, and logits over five tokens under which they were not sampled."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    draw = [torch.randn(2, 3, generator=generator) for _ in range(7)]
    rollout = Rollout(
        prompt_ids=torch.ones(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        response_ids=torch.tensor([[0, 4, 2], [1, 3, 3]]),
        response_mask=mask,
        logprobs=draw[0] - 2,
        ref_logprobs=draw[1] - 2,
        entropies=draw[2],
        values=draw[3],
        scores=torch.zeros(2),
        part_scores=torch.zeros(2, 1),
        token_scores=torch.zeros(2, 3),
        ended=torch.ones(2, dtype=torch.bool),
    )
    return Experience(rollout, draw[4], draw[5], draw[6]), torch.randn(2, 3, 5, generator=generator)


def test_policy_objective_is_surrogate_less_entropy_plus_kl():
    experience, logits = experience_of()
    r = experience.rollout
    args = ppo(clip_coeff=0.1, clip_coeff_high=0.4, dual_clip=2.0, entropy_coeff=0.3, kl_loss_coeff=0.7)
    logprobs = gather_logprobs(logits, r.response_ids)
    surrogate = policy_loss(logprobs, r.logprobs, experience.advantages, r.response_mask, 0.1, 0.4, 2.0)[0]
    bonus = entropy(logits)[r.response_mask].sum()
    kl = kl_loss(logprobs, r.logprobs, r.ref_logprobs, r.response_mask)[0]
    loss, statistics = policy_objective(experience, logprobs, entropy(logits), args)
    torch.testing.assert_close(loss, surrogate - 0.3 * bonus + 0.7 * kl)
    assert {"approx_kl", "clip_fraction", "ratio_mean"} <= statistics.keys()
    plain, _ = policy_objective(experience, logprobs, None, ppo())
    torch.testing.assert_close(plain, policy_loss(logprobs, r.logprobs, experience.advantages, r.response_mask, 0.2)[0])


def test_the_entropy_bonus_raises_the_entropy():
    experience, logits = experience_of()
    experience = dataclasses.replace(experience, advantages=torch.zeros(2, 3))
    logits.requires_grad_()
    logprobs = gather_logprobs(logits, experience.rollout.response_ids)
    policy_objective(experience, logprobs, entropy(logits), ppo(entropy_coeff=1.0))[0].backward()
    mask = experience.rollout.response_mask
    before = entropy(logits)[mask].sum()
    assert entropy(logits - 0.1 * logits.grad)[mask].sum() > before


def test_value_objective_knows_its_own_clip_and_the_huber_error():
    experience, _ = experience_of()
    r, values = experience.rollout, torch.randn(2, 3)
    for args, clip, delta in (
        (ppo(), 0.2, None),
        (ppo(value_clip_coeff=0.5), 0.5, None),
        (ppo(value_loss="huber", huber_delta=0.3), 0.2, 0.3),
    ):
        expected = value_loss(values, r.values, experience.returns, r.response_mask, clip, delta)[0]
        torch.testing.assert_close(value_objective(experience, values, args), expected)


def test_normalized_values_are_compared_on_the_scale_of_the_critic():
    experience, _ = experience_of()
    norm = ValueNorm()
    norm.update(moments(torch.tensor([8.0, 12.0]), torch.ones(2, dtype=torch.bool)))  # mean 10, deviation 2
    r, values = experience.rollout, torch.randn(2, 3)
    expected = value_loss(values, (r.values - 10) / 2, (experience.returns - 10) / 2, r.response_mask, 0.2)[0]
    torch.testing.assert_close(value_objective(experience.normalized(norm), values, ppo()), expected)
