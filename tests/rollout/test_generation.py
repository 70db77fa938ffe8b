import pytest
import torch

from rlhf_stages.args import GenerationArgs, ModelArgs, RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.models.forward import logits_at
from rlhf_stages.models.loading import load_causal, prepare_training
from rlhf_stages.rollout.collect import join, policy_outputs
from rlhf_stages.rollout.generation import cut_at_stop, generate, make_sampler

from helpers import left_padded, make_tokenizer, plain_sampler, save_causal, shake_adapters

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


@pytest.mark.parametrize(("kind", "lora"), [("gpt2", False), ("opt", False), ("llama", True)])
def test_logprobs_are_those_of_the_distribution_sampled_from(tmp_path, kind, lora):
    model = load(tmp_path, lora, kind=kind, generation_config=HOSTILE)
    args = RolloutArgs(max_new_tokens=12, temperature=0.7, num_return_sequences=2)
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))
    responses = generate(model, prompts, args, plain_sampler(0.7), PAD, logprobs=True)
    assert responses.ids.shape[0] == 6
    expected = responses.logprobs[responses.mask]
    assert not responses.logprobs[~responses.mask].any()

    with torch.no_grad():
        said = policy_outputs(model, join(prompts.repeat(2), responses), responses.ids, plain_sampler(0.7))
    torch.testing.assert_close(said.logprobs[responses.mask], expected, rtol=0, atol=2e-5)


def test_a_hostile_generation_config_does_not_change_greedy_text(tmp_path):
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))
    args = GenerationArgs(max_new_tokens=16, do_sample=False)
    clean, hostile = (
        generate(load(tmp_path / name, generation_config=config), prompts, args, plain_sampler(), PAD)
        for name, config in (("clean", None), ("hostile", HOSTILE))
    )
    assert torch.equal(clean.ids, hostile.ids)
    assert len(set(clean.ids.flatten().tolist())) > 5


def test_greedy_text_of_a_padded_row_is_that_of_the_row_alone(tmp_path):
    model = load(tmp_path)
    args = GenerationArgs(max_new_tokens=10, do_sample=False)
    together = generate(model, PromptBatch(*left_padded(PROMPTS, PAD)), args, plain_sampler(), PAD)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, PromptBatch(*left_padded([prompt], PAD)), args, plain_sampler(), PAD)
        assert together.ids[row][together.mask[row]].tolist() == alone.ids[0][alone.mask[0]].tolist()


def test_top_k_and_beams_are_passed_on(tmp_path):
    model = load(tmp_path)
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))

    def ids(**changes):
        torch.manual_seed(0)
        return generate(model, prompts, GenerationArgs(max_new_tokens=6, **changes), plain_sampler(), PAD).ids.tolist()

    greedy = ids(do_sample=False)
    assert ids(top_k=1) == greedy
    assert ids(top_p=1e-6) == greedy
    assert ids(top_k=0, temperature=1e-4) == greedy
    assert ids(top_k=0) != greedy
    assert ids(do_sample=False, num_beams=4) != greedy


# Restrictions that sampler and scorer share


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_the_sampler_forbids_the_scorer_forbids(tmp_path, kind):
    """A minimum length, a stop token of one's own, spare rows in the embedding, temperature, left padding."""
    model = load(tmp_path, kind=kind, vocab_size=120)
    stop_ids = [EOS, *range(40, 80)]
    sampler = plain_sampler(0.7, min_new_tokens=4, stop_ids=stop_ids)
    args = RolloutArgs(max_new_tokens=8, temperature=0.7, min_new_tokens=4, num_return_sequences=30)
    prompts = PromptBatch(*left_padded(PROMPTS, PAD))
    responses = generate(model, prompts, args, sampler, PAD, logprobs=True)
    lengths = responses.mask.sum(1)
    assert lengths.min() == 4  # the stop token may be the fourth, and in 90 responses it is
    assert lengths.max() > 4
    assert responses.ids.max() < 100
    stops = torch.isin(responses.ids, torch.tensor(stop_ids)) & responses.mask
    assert torch.equal(stops.any(1), responses.ended)
    texts = join(prompts.repeat(30), responses)
    said = policy_outputs(model, texts, responses.ids, sampler).logprobs
    torch.testing.assert_close(said[responses.mask], responses.logprobs[responses.mask], rtol=0, atol=2e-5)
    scored = torch.softmax(sampler.logits(logits_at(model, texts.ids, texts.mask, texts.places)), -1)
    assert not scored[..., 100:].any()
    assert not scored[:, :3, stop_ids].any()
    assert scored[:, 3:, EOS].min() > 0


def test_the_sampler_of_the_flags():
    tokenizer = make_tokenizer()
    assert make_sampler(RolloutArgs(temperature=0.5, min_new_tokens=3), tokenizer) == plain_sampler(0.5, 3)
    assert make_sampler(GenerationArgs(do_sample=False), tokenizer) == plain_sampler()
    word = tokenizer.convert_ids_to_tokens(20)
    assert make_sampler(GenerationArgs(stop_token=word), tokenizer).stop_ids == (EOS, 20)
    with pytest.raises(ValueError, match=r"--stop_token='name the price' is \d+ tokens of this tokenizer, not one"):
        make_sampler(GenerationArgs(stop_token="name the price"), tokenizer)
