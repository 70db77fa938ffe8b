import pytest
import torch

from rlhf_stages.args import ModelArgs
from rlhf_stages.functional.losses import gather_logprobs
from rlhf_stages.models.forward import logits_at, text_logits
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
