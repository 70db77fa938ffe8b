import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BloomConfig

from rlhf_stages.args import ModelArgs
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.forward import (
    adapters_off,
    check_packing,
    logits_at,
    packed_logits,
    sequence_logprobs,
    text_logits,
)
from rlhf_stages.models.loading import load_causal, prepare_training

from helpers import KINDS, make_tokenizer, right_padded, save_causal, shake_adapters

PROMPTS = [[1, 5, 6, 7], [1], [1, 9, 10, 11, 12, 13, 14]]
RESPONSES = [[20, 21, 2], [22, 2], [23, 24, 25, 26, 2]]
TEMPERATURE = 0.7


def token_by_token(model, prompt, response, temperature):
    """Log-probability of each response token, from a forward over exactly what stands before it."""
    logprobs = []
    for place in range(len(response)):
        logits = model(torch.tensor([prompt + response[:place]])).logits[0, -1]
        logprobs.append(torch.log_softmax(logits.double() / temperature, -1)[response[place]])
    return torch.stack(logprobs).float()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_response_logprobs_equal_a_loop_over_unpadded_texts(tmp_path, kind, lora):
    model = load_causal(save_causal(tmp_path, kind), make_tokenizer(), ModelArgs())
    if lora:
        model = shake_adapters(prepare_training(model, ModelArgs(finetune_mode="lora")))
    model.eval()
    ids, mask = right_padded([prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)], 3)
    response_ids, _ = right_padded(RESPONSES, 3)
    # token t of a response is predicted at the token before it; the row of the longest text ends the others' places
    places = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4], [6, 7, 8, 9, 10]])
    logits = logits_at(model, ids, mask, places)
    assert logits.shape == (3, 5, 100)
    logprobs = gather_logprobs(logits / TEMPERATURE, response_ids)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = token_by_token(model, prompt, response, TEMPERATURE)
        torch.testing.assert_close(logprobs[row, : len(response)], expected, rtol=0, atol=2e-5)


def test_text_logits_of_a_padded_row_are_those_of_the_row_alone(tmp_path):
    model = load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()).eval()
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    logits = text_logits(model, *right_padded(rows, 3))
    for row, line in zip(rows, logits, strict=True):
        torch.testing.assert_close(line[: len(row)], model(torch.tensor([row])).logits[0], rtol=0, atol=2e-5)


def test_only_the_places_asked_for_reach_the_output_layer(tmp_path):
    model = load_causal(save_causal(tmp_path, "llama"), make_tokenizer(), ModelArgs()).eval()
    ids, mask = right_padded([[1, 5, 6, 7], [1, 8]], 3)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    logits = logits_at(model, ids, mask, torch.tensor([[2, 0], [1, 1]]))
    every = text_logits(model, ids, mask)
    assert seen == [(2, 2, 100), (2, 4, 100)]  # and the call after it sees every place again
    torch.testing.assert_close(logits, torch.stack([every[0, [2, 0]], every[1, [1, 1]]]))


TEXTS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def spans(*pairs):
    starts, ends = torch.tensor(pairs).unbind(1)
    return starts, ends


@pytest.mark.parametrize("junk", [3, 2, 57])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sequence_logprobs_equal_a_loop_over_unpadded_texts(tmp_path, kind, junk):
    model = load_causal(save_causal(tmp_path, kind), make_tokenizer(), ModelArgs()).eval()
    padded = right_padded(TEXTS, junk)
    # responses; whole texts (nothing predicts the first token); stretches that end early, are empty or one token
    for pairs in ([(4, 7), (1, 3), (7, 12)], [(0, 7), (0, 3), (0, 12)], [(2, 6), (2, 2), (11, 12)]):
        expected = [
            token_by_token(model, text[: max(a, 1)], text[max(a, 1) : b], 1.0).sum() if b > max(a, 1) else 0.0
            for text, (a, b) in zip(TEXTS, pairs, strict=True)
        ]
        logprobs = sequence_logprobs(model, *padded, *spans(*pairs))
        torch.testing.assert_close(logprobs, torch.tensor(expected), rtol=0, atol=1e-4)
        sized = sequence_logprobs(model, *padded, *spans(*pairs), size=15)
        torch.testing.assert_close(sized, logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pairs", [[(4, 4), (0, 1), (12, 12)], [(0, 0)] * 3, [(1, 0), (0, 1), (0, 0)]])
def test_sequence_logprobs_of_empty_stretches_are_0(tmp_path, pairs):
    model = load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs())
    logprobs = sequence_logprobs(model, *right_padded(TEXTS, 3), *spans(*pairs))
    logprobs.sum().backward()
    assert logprobs.tolist() == [0, 0, 0]
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_the_prompt_adds_the_same_to_every_response(tmp_path):
    """So that it cancels between the responses of a list, in the value and in the gradient."""
    model = load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()).eval()
    texts = right_padded([PROMPTS[0] + response for response in RESPONSES], 3)
    ends = torch.tensor([4 + len(response) for response in RESPONSES])
    responses, whole = (
        sequence_logprobs(model, *texts, torch.full_like(ends, start), ends) for start in (len(PROMPTS[0]), 0)
    )
    shared = whole - responses
    assert shared[0] < -1
    torch.testing.assert_close(shared, shared[:1].expand(3), rtol=1e-5, atol=0)
    gradients = [
        torch.autograd.grad(logprobs[0] - logprobs[2], model.transformer.wte.weight, retain_graph=True)[0]
        for logprobs in (responses, whole)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_without_its_adapters_a_model_is_exactly_what_they_were_trained_from(tmp_path):
    folder, args = save_causal(tmp_path), ModelArgs(finetune_mode="lora")
    frozen = load_causal(folder, make_tokenizer(), ModelArgs())
    model = shake_adapters(prepare_training(load_causal(folder, make_tokenizer(), args), args))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    inputs = (*right_padded(TEXTS, 3), *spans((4, 7), (1, 3), (7, 12)))
    expected = sequence_logprobs(frozen, *inputs)
    before = sequence_logprobs(model, *inputs)
    with torch.no_grad(), adapters_off(model):
        assert torch.equal(sequence_logprobs(model, *inputs), expected)
    after = sequence_logprobs(model, *inputs)
    assert torch.equal(before, after)
    assert (after - expected).abs().min() > 1e-3
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained != []
    with pytest.raises(KeyError), adapters_off(model):  # an error inside does not leave them off
        raise KeyError
    assert torch.equal(sequence_logprobs(model, *inputs), before)


# Several texts in a row

TEXTS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def packed_row(texts, tail=3):
    """The texts one after the other with padding behind them, and their positions."""
    ids = torch.tensor([[token for text in texts for token in text] + [3] * tail])
    return ids, torch.tensor([[place for text in texts for place in range(len(text))] + [0] * tail])


def token_losses(logits, texts):
    """Loss of each token of each text but its first."""
    losses, start = [], 0
    for text in texts:
        losses.append(cross_entropy(logits[start : start + len(text) - 1], torch.tensor(text[1:]), reduction="none"))
        start += len(text)
    return torch.cat(losses)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_a_row_has_the_losses_and_gradients_that_it_has_alone(tmp_path, kind, lora):
    model = load_causal(save_causal(tmp_path, kind), make_tokenizer(), ModelArgs())
    if lora:
        model = shake_adapters(prepare_training(model, ModelArgs(finetune_mode="lora")))
    model.eval()

    def gradients(losses):
        model.zero_grad()
        losses.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    alone = torch.cat([token_losses(model(torch.tensor([text])).logits[0], [text]) for text in TEXTS])
    packed = token_losses(packed_logits(model, *packed_row(TEXTS))[0], TEXTS)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    expected, found = gradients(alone), gradients(packed)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_neighbours_change_nothing(tmp_path, kind):
    model = load_causal(save_causal(tmp_path, kind), make_tokenizer(), ModelArgs()).eval()
    other = [[50 + token % 40 for token in TEXTS[0]], TEXTS[1], [90] * len(TEXTS[2])]
    start, end = len(TEXTS[0]), len(TEXTS[0]) + len(TEXTS[1])
    one, two = (packed_logits(model, *packed_row(texts))[0] for texts in (TEXTS, other))
    torch.testing.assert_close(two[start:end], one[start:end], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(two[end:], one[end:])
    # nor where the row has them in another place
    moved = packed_logits(model, *packed_row([TEXTS[2], TEXTS[1]]))[0]
    start = len(TEXTS[2])
    torch.testing.assert_close(moved[start : start + len(TEXTS[1])], one[len(TEXTS[0]) : end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_can_pack_are_taken_as_they_are(tmp_path, kind):
    model = load_causal(save_causal(tmp_path, kind, dropout=0.1), make_tokenizer(), ModelArgs()).train()
    check_packing(model)
    assert model.training


def test_a_model_that_sees_more_than_its_text_is_refused(tmp_path, monkeypatch):
    # OPT makes no mask of its own from the positions
    model = load_causal(save_causal(tmp_path, "opt"), make_tokenizer(), ModelArgs())
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda attention_mask=None, **more: forward(**more))
    with pytest.raises(ValueError, match=r"^--packing: OPTForCausalLM reads .* --micro_batch_tokens"):
        check_packing(model)
    monkeypatch.setattr(model, "forward", lambda position_ids=None, **more: forward(**more))
    with pytest.raises(ValueError, match=r"^--packing: OPTForCausalLM"):
        check_packing(model)


def test_a_model_without_positions_is_refused():
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=20, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match=r"^--packing: BloomForCausalLM"):
        check_packing(bloom)
