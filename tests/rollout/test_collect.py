import dataclasses
import math

import pytest
import torch

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.collate import PromptBatch, collate_preference
from rlhf_stages.data.shards import Record
from rlhf_stages.functional.losses import score_at
from rlhf_stages.models.loading import load_causal, load_scalar
from rlhf_stages.rollout.collect import (
    concatenate,
    join,
    not_finite,
    policy_outputs,
    response_values,
    score_responses,
    select_rows,
)
from rlhf_stages.rollout.generation import Responses

from helpers import left_padded, make_tokenizer, model_scorer, plain_sampler, right_padded, save_causal, save_classifier

PAD = 3
PROMPTS = [[1, 5, 6, 7], [1], [1, 9, 10, 11, 12, 13, 14], [1, 15]]
RESPONSES = [[20, 21, 2], [22, 2], [23, 24, 25, 26, 27], [2]]
ENDED = torch.tensor([True, True, False, True])
TEMPERATURE = 0.7


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
    readers = {name: model for name, model in models.items() if name != "reward_model"}
    scorer = model_scorer(models["reward_model"])
    return score_responses(*batches(rows), **readers, scorer=scorer, sampler=plain_sampler(TEMPERATURE))


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


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bert", "roberta"])
@torch.no_grad()
def test_training_evaluation_and_ppo_give_the_same_float_for_the_same_text(tmp_path, models, kind):
    """A reward model reads BOS, prompt, response and EOS alike wherever it scores, to the last bit."""
    folder = save_classifier(tmp_path / "rm", kind)
    reward_model = load_scalar(folder, make_tokenizer(), ModelArgs(), trained_head=True).eval()
    rows = [0, 1, 2, 3]
    rollout = score({**models, "reward_model": reward_model}, rows)
    responses = tuple(torch.tensor(PROMPTS[row] + RESPONSES[row]) for row in rows)
    # as a ranked list of whole texts, the way that training and evaluation read a shard
    batch = collate_preference([Record(torch.tensor([], dtype=torch.int64), responses, (False,) * 4)], pad_token_id=PAD)
    assert torch.equal(batch.input_ids, rollout.texts.ids)
    assert torch.equal(batch.attention_mask, rollout.texts.mask)
    trained = score_at(reward_model(batch.input_ids, batch.attention_mask), batch.lengths)
    assert torch.equal(trained, rollout.scores)
    for row, text in zip(rows, responses, strict=True):
        assert rollout.scores[row].item() == pytest.approx(reward_model.hf(text[None]).logits.item(), abs=2e-5)


@torch.no_grad()
def test_the_ratio_of_the_first_update_is_one(models):
    """Rollouts in other batches than the update, dropout in the config, temperature, left padding: all at once."""
    rollout = concatenate([score(models, [1, 0]), score(models, [2]), score(models, [3])])
    for rows in ([0], [3, 1], [2, 0, 1, 3]):
        r = select_rows(rollout, rows)
        said = policy_outputs(models["actor"], r.texts, r.response_ids, plain_sampler(TEMPERATURE))
        log_ratio = said.logprobs - r.logprobs
        assert log_ratio[r.response_mask].abs().max() < 1e-5
        assert (response_values(models["critic"], r.texts) - r.values)[r.response_mask].abs().max() < 2e-5


@pytest.mark.parametrize(
    ("name", "model"),
    [("logprobs", "actor"), ("ref_logprobs", "reference"), ("values", "critic"), ("part_scores", "reward model")],
)
def test_a_number_that_is_not_finite_is_found_with_its_model_and_row(models, name, model):
    rollout = score(models, [0, 1, 2, 3])
    assert not_finite(rollout) == (None, [])
    for bad in (math.nan, math.inf):
        values = getattr(rollout, name).detach().clone()
        values[2] = bad
        fault, rows = not_finite(dataclasses.replace(rollout, **{name: values}))
        assert fault.endswith(f"of the {model} are not finite for 1 of 4 responses")
        assert rows == [2]


def numbers(rollout, row):
    """All that a row says, without padding."""
    inside, prompt = rollout.response_mask[row], rollout.prompt_mask[row]
    return {
        "prompt": rollout.prompt_ids[row][prompt].tolist(),
        "response": rollout.response_ids[row][inside].tolist(),
        **{name: getattr(rollout, name)[row][inside].tolist() for name in ("logprobs", "ref_logprobs", "values")},
        **{name: getattr(rollout, name)[row].item() for name in ("part_scores", "ended")},
    }


def test_concatenate_and_select_keep_every_rows_numbers(models):
    parts = [score(models, rows) for rows in ([0, 1], [2], [3])]
    rows = [numbers(part, row) for part in parts for row in range(len(part.scores))]
    together = concatenate(parts)
    assert [numbers(together, row) for row in range(4)] == rows
    assert together.texts.ids.shape == together.texts.mask.shape == (4, 7 + 5)
    for picked in ([2, 0], [1], [3], [3, 1], [0, 1, 2, 3]):
        chosen = select_rows(together, picked)
        again = dataclasses.replace(chosen)  # with nothing known yet
        assert again.lengths == chosen.lengths
        for name in ("ids", "mask"):
            assert torch.equal(getattr(again.texts, name), getattr(chosen.texts, name))
        assert torch.equal(*(t.places[chosen.response_mask] for t in (again.texts, chosen.texts)))
        assert [numbers(chosen, row) for row in range(len(picked))] == [rows[row] for row in picked]
        longest = max(len(PROMPTS[row]) for row in picked), max(len(RESPONSES[row]) for row in picked)
        assert (chosen.prompt_ids.shape[1], chosen.response_ids.shape[1]) == longest
        assert chosen.prompt_mask[:, -1].all()  # still padded on the left
        assert chosen.response_mask[:, 0].all()  # and responses on the right
