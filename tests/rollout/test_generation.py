import pytest
import torch

from rlhf_stages.args import GenerationArgs, ModelArgs, RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.models.loading import load_causal, prepare_training
from rlhf_stages.rollout.collect import join, response_logprobs
from rlhf_stages.rollout.generation import cut_at_stop, generate

from helpers import left_padded, make_tokenizer, save_causal, shake_adapters

PAD, EOS = 3, 2
PROMPTS = [[1, 5, 6, 7], [1, 8], [1, 9, 10, 11, 12, 13]]
HOSTILE = {
    "do_sample": True,
    "repetition_penalty": 1.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "typical_p": 0.5,
    "temperature": 3.0,
    "min_new_tokens": 6,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [20, 21, 22, 23, 24, 25],
    "begin_suppress_tokens": [30, 31, 32],
    "forced_eos_token_id": 40,
    "bad_words_ids": [[50], [51]],
    "sequence_bias": [[[60], 9.0]],
    "exponential_decay_length_penalty": [1, 1.5],
    "guidance_scale": 1.5,
    "max_length": 8,
    "eos_token_id": [70, 71],
}


# Cutting at the stop token


@pytest.mark.parametrize("stop_ids", [[EOS], [7, EOS], [9]])
def test_cut_at_stop_for_a_stop_token_at_every_place(stop_ids):
    size = 5
    for place in range(size + 1):  # `size`: none comes
        row = [11, 12, 13, 14, 15]
        if place < size:
            row[place] = stop_ids[-1]
            row[place + 1 :] = [stop_ids[-1], 16, stop_ids[0], 17][: size - place - 1]  # junk behind, stops among it
        responses = cut_at_stop(torch.tensor([row]), stop_ids, PAD)
        length = min(place + 1, size)
        assert responses.mask.tolist() == [[True] * length + [False] * (size - length)]
        assert responses.ids.tolist() == [row[:length] + [PAD] * (size - length)]
        assert responses.ended.tolist() == [place < size]


def test_a_stop_token_in_the_very_last_place_ends_the_response():
    responses = cut_at_stop(torch.tensor([[5, 6, EOS], [5, 6, 7]]), [EOS], PAD)
    assert responses.ended.tolist() == [True, False]
    assert responses.mask.all()


def test_padding_that_equals_the_stop_token_is_not_part_of_the_response():
    responses = cut_at_stop(torch.tensor([[5, EOS, EOS, EOS]]), [EOS], EOS)
    assert responses.mask.tolist() == [[True, True, False, False]]


def test_padding_before_the_stop_token_is_a_token():
    assert cut_at_stop(torch.tensor([[5, PAD, 6, EOS]]), [EOS], PAD).mask.all()


# Sampling


def load(folder, lora=False, **changes):
    args = ModelArgs(finetune_mode="lora") if lora else ModelArgs()
    model = load_causal(save_causal(folder, **changes), make_tokenizer(), args)
    return (shake_adapters(prepare_training(model, args)) if lora else model).eval()


def spy_on_scores(model, monkeypatch):
    """Let generate() also leave the scores it samples from: processed logits, (steps, B, V)."""
    seen = {}
    original = model.generate

    def wrapped(**kwargs):
        output = original(**kwargs, return_dict_in_generate=True, output_scores=True)
        seen["scores"] = torch.stack(output.scores)
        return output.sequences

    monkeypatch.setattr(model, "generate", wrapped)
    return seen


@pytest.mark.parametrize(("kind", "lora"), [("gpt2", False), ("opt", False), ("llama", True)])
def test_logprobs_are_those_of_the_distribution_sampled_from(tmp_path, monkeypatch, kind, lora):
    model = load(tmp_path, lora, kind=kind, generation_config=HOSTILE)
    seen = spy_on_scores(model, monkeypatch)
    args = RolloutArgs(max_new_tokens=12, temperature=0.7, num_return_sequences=2)
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))
    responses = generate(model, prompts, args, stop_ids=[EOS], pad_token_id=PAD)
    assert responses.ids.shape[0] == 6
    sampler = torch.log_softmax(seen["scores"], -1).transpose(0, 1)  # (B, R, V)
    assert torch.isfinite(sampler).all()  # nothing was cut off
    expected = sampler.gather(-1, responses.ids[..., None]).squeeze(-1)

    with torch.no_grad():
        logprobs = response_logprobs(model, join(prompts.repeat(2), responses), responses.ids, args.temperature)
    torch.testing.assert_close(logprobs[responses.mask], expected[responses.mask], rtol=0, atol=2e-5)


def test_a_hostile_generation_config_does_not_change_greedy_text(tmp_path):
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))
    args = GenerationArgs(max_new_tokens=16, do_sample=False)
    clean, hostile = (
        generate(load(tmp_path / name, generation_config=config), prompts, args, stop_ids=[EOS], pad_token_id=PAD)
        for name, config in (("clean", None), ("hostile", HOSTILE))
    )
    assert torch.equal(clean.ids, hostile.ids)
    assert len(set(clean.ids.flatten().tolist())) > 5


def test_greedy_text_of_a_padded_row_is_that_of_the_row_alone(tmp_path):
    model = load(tmp_path)
    args = GenerationArgs(max_new_tokens=10, do_sample=False)
    together = generate(model, PromptBatch(*left_padded(PROMPTS, PAD)), args, stop_ids=[EOS], pad_token_id=PAD)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, PromptBatch(*left_padded([prompt], PAD)), args, stop_ids=[EOS], pad_token_id=PAD)
        assert together.ids[row][together.mask[row]].tolist() == alone.ids[0][alone.mask[0]].tolist()


def test_top_k_and_beams_are_passed_on(tmp_path):
    model = load(tmp_path)
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))

    def ids(**changes):
        torch.manual_seed(0)
        return generate(
            model, prompts, GenerationArgs(max_new_tokens=6, **changes), stop_ids=[EOS], pad_token_id=PAD
        ).ids.tolist()

    greedy = ids(do_sample=False)
    assert ids(top_k=1) == greedy
    assert ids(top_p=1e-6) == greedy
    assert ids(top_k=0, temperature=1e-4) == greedy
    assert ids(top_k=0) != greedy
    assert ids(do_sample=False, num_beams=4) != greedy
