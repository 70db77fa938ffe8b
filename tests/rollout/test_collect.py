import dataclasses
import math

import pytest
import torch

from rlhf_stages.args import ModelArgs, PPOArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.masking import moments
from rlhf_stages.models.loading import load_causal, load_scalar
from rlhf_stages.rollout.collect import (
    Rollout,
    check_finite,
    concatenate,
    join,
    make_experience,
    response_logprobs,
    response_values,
    score_responses,
    select_rows,
)
from rlhf_stages.rollout.generation import Responses

from helpers import left_padded, make_tokenizer, right_padded, save_causal, save_classifier

PAD = 3
PROMPTS = [[1, 5, 6, 7], [1], [1, 9, 10, 11, 12, 13, 14], [1, 15]]
RESPONSES = [[20, 21, 2], [22, 2], [23, 24, 25, 26, 27], [2]]
ENDED = torch.tensor([True, True, False, True])
TEMPERATURE = 0.7


def ppo(**changes):
    plain = {"normalize_rewards": False, "normalize_advantages": False, "clip_rewards": False}
    return PPOArgs(sft_experiment_dir="", rm_experiment_dir="", **{**plain, **changes})


@pytest.fixture
def models(tmp_path):
    """Actor and critic in training mode, reference and reward model in evaluation mode, dropout in every config."""
    args, tokenizer = ModelArgs(disable_dropout=True), make_tokenizer()
    actor, reference = (save_causal(tmp_path / name, "gpt2", seed, dropout=0.3) for seed, name in enumerate("ab"))
    critic, reward = (save_classifier(tmp_path / name, "opt", seed, dropout=0.3) for seed, name in enumerate("cd"))
    return {
        "actor": load_causal(actor, tokenizer, args).train(),
        "reference": load_causal(reference, tokenizer, args).eval(),
        "critic": load_scalar(critic, tokenizer, args, trained_head=True).train(),
        "reward_model": load_scalar(reward, tokenizer, args, trained_head=True).eval(),
    }


def batches(rows):
    prompts = PromptBatch(*left_padded([PROMPTS[row] for row in rows], PAD))
    return prompts, Responses(*right_padded([RESPONSES[row] for row in rows], PAD), ENDED[rows])


def score(models, rows):
    return score_responses(*batches(rows), **models, temperature=TEMPERATURE)


def test_join_moves_padding_to_the_end_and_keeps_where_each_token_is_predicted():
    prompts, responses = batches([0, 1, 2, 3])
    texts = join(prompts, responses)
    size = 7 + 5  # the third text is the longest
    expected, mask = right_padded([a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)], PAD)
    assert texts.ids.shape == (4, size)
    assert torch.equal(texts.ids, expected)
    assert torch.equal(texts.mask, mask)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        assert texts.places[row, : len(response)].tolist() == [len(prompt) - 1 + t for t in range(len(response))]
        assert texts.places[row].max() < size


@torch.no_grad()
def test_every_number_equals_a_loop_over_unpadded_texts(models):
    rollout = score(models, [0, 1, 2, 3])
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for place, token in enumerate(response):
            before = torch.tensor([prompt + response[:place]])
            whole = torch.ones_like(before, dtype=torch.bool)
            for name in ("actor", "reference"):
                logits = models[name](before).logits[0, -1] / TEMPERATURE
                found = {"actor": rollout.logprobs, "reference": rollout.ref_logprobs}[name][row, place]
                assert found.item() == pytest.approx(torch.log_softmax(logits, -1)[token].item(), abs=2e-5)
            # the value of the state before the token is chosen
            value = models["critic"](before, whole)[0, -1]
            assert rollout.values[row, place].item() == pytest.approx(value.item(), abs=2e-5)
        text = torch.tensor([prompt + response])
        expected = models["reward_model"](text, torch.ones_like(text, dtype=torch.bool))[0, -1]
        assert rollout.scores[row].item() == pytest.approx(expected.item(), abs=2e-5)
        for values in (rollout.logprobs, rollout.ref_logprobs, rollout.values):
            assert not values[row, len(response) :].any()
    assert torch.equal(rollout.ended, ENDED)


@torch.no_grad()
def test_the_ratio_of_the_first_update_is_one(models):
    """Rollouts in other batches than the update, dropout in the config, temperature, left padding: all at once."""
    rollout = concatenate([score(models, [1, 0]), score(models, [2]), score(models, [3])])
    experience = make_experience(rollout, ppo(), kl_coeff=0.1)
    for rows in ([0], [3, 1], [2, 0, 1, 3]):
        r = experience.select(torch.tensor(rows)).rollout
        log_ratio = response_logprobs(models["actor"], r.texts, r.response_ids, TEMPERATURE) - r.logprobs
        assert log_ratio[r.response_mask].abs().max() < 1e-5
        assert (response_values(models["critic"], r.texts) - r.values)[r.response_mask].abs().max() < 2e-5


@pytest.mark.parametrize(
    ("name", "model"),
    [("logprobs", "actor"), ("ref_logprobs", "reference"), ("values", "critic"), ("scores", "reward model")],
)
def test_a_number_that_is_not_finite_is_refused_with_its_model_and_row(models, name, model):
    rollout = score(models, [0, 1, 2, 3])
    check_finite(rollout)
    for bad in (math.nan, math.inf):
        values = getattr(rollout, name).detach().clone()
        values[2] = bad
        with pytest.raises(FloatingPointError, match=rf"of the {model} are not finite for 1 of 4 .*\[2\]"):
            check_finite(dataclasses.replace(rollout, **{name: values}))


def numbers(rollout, row):
    """All that a row says, without padding."""
    inside, prompt = rollout.response_mask[row], rollout.prompt_mask[row]
    return {
        "prompt": rollout.prompt_ids[row][prompt].tolist(),
        "response": rollout.response_ids[row][inside].tolist(),
        **{name: getattr(rollout, name)[row][inside].tolist() for name in ("logprobs", "ref_logprobs", "values")},
        **{name: getattr(rollout, name)[row].item() for name in ("scores", "ended")},
    }


def test_concatenate_and_select_keep_every_rows_numbers(models):
    parts = [score(models, rows) for rows in ([0, 1], [2], [3])]
    rows = [numbers(part, row) for part in parts for row in range(len(part.scores))]
    together = concatenate(parts)
    assert [numbers(together, row) for row in range(4)] == rows
    assert together.texts.ids.shape == together.texts.mask.shape == (4, 7 + 5)
    for picked in ([2, 0], [1], [3], [3, 1], [0, 1, 2, 3]):
        chosen = select_rows(together, torch.tensor(picked))
        assert [numbers(chosen, row) for row in range(len(picked))] == [rows[row] for row in picked]
        longest = max(len(PROMPTS[row]) for row in picked), max(len(RESPONSES[row]) for row in picked)
        assert (chosen.prompt_ids.shape[1], chosen.response_ids.shape[1]) == longest
        assert chosen.prompt_mask[:, -1].all()  # still padded on the left
        assert chosen.response_mask[:, 0].all()  # and responses on the right


def test_select_takes_the_same_rows_of_advantages_and_returns(models):
    experience = make_experience(score(models, [0, 1, 2, 3]), ppo(), kl_coeff=0.1)
    chosen = experience.select(torch.tensor([3, 1]))
    for name in ("rewards", "advantages", "returns"):
        assert torch.equal(getattr(chosen, name), getattr(experience, name)[[3, 1], :2])


# Scores to advantages


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
        values=zeros if values is None else values,
        scores=torch.tensor(scores),
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

            results.append(make_experience(half, args, 0.3, global_sum))
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


def test_moments_see_every_response(models):
    """The count that reaches the sum over devices is that of all responses, then of all response tokens."""
    seen = []
    rollout = score(models, [0, 1, 2, 3])

    def global_sum(mine):
        seen.append(mine)
        return mine

    make_experience(rollout, ppo(normalize_rewards=True, normalize_advantages=True), 0.1, global_sum)
    assert [total[0].item() for total in seen] == [4, sum(map(len, RESPONSES))]
    torch.testing.assert_close(seen[0], moments(rollout.scores, torch.ones(4, dtype=torch.bool)))


def test_a_rollout_is_not_changed(models):
    rollout = score(models, [0, 1, 2, 3])
    before = {field.name: getattr(rollout, field.name).clone() for field in dataclasses.fields(rollout)}
    make_experience(rollout, ppo(normalize_rewards=True, normalize_advantages=True, missing_eos_penalty=1.0), 0.1)
    assert all(torch.equal(value, getattr(rollout, name)) for name, value in before.items())
