import pytest
import torch
from torch import nn

from rlhf_stages.args import ModelArgs
from rlhf_stages.functional.losses import gather_logprobs
from rlhf_stages.models.forward import accepted_inputs, response_logits, text_logits
from rlhf_stages.models.loading import load_causal, prepare_training

from helpers import KINDS, left_padded, make_tokenizer, right_padded, save_causal, shake_adapters

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
    prompt_ids, prompt_mask = left_padded(PROMPTS, 3)
    response_ids, response_mask = right_padded(RESPONSES, 3)
    ids, mask = torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, response_mask], 1)
    logits = response_logits(model, ids, mask, response_ids.shape[1])
    assert logits.shape == (3, 5, 100)
    logprobs = gather_logprobs(logits, response_ids, TEMPERATURE)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = token_by_token(model, prompt, response, TEMPERATURE)
        torch.testing.assert_close(logprobs[row, : len(response)], expected, rtol=0, atol=2e-5)


def test_text_logits_of_a_padded_row_are_those_of_the_row_alone(tmp_path):
    model = load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()).eval()
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    logits = text_logits(model, *right_padded(rows, 3))
    for row, line in zip(rows, logits, strict=True):
        torch.testing.assert_close(line[: len(row)], model(torch.tensor([row])).logits[0], rtol=0, atol=2e-5)


def test_only_inputs_that_a_model_takes_are_passed():
    class Plain(nn.Module):
        def forward(self, input_ids, attention_mask):
            """Like a model with rotary positions and full logits."""

    assert set(accepted_inputs(Plain(), input_ids=1, attention_mask=2, position_ids=3)) == {
        "input_ids",
        "attention_mask",
    }


def test_logits_are_cut_the_same_when_the_model_gives_all_of_them():
    class Everything(nn.Module):
        """A hand-made model whose logits at place t say t."""

        def forward(self, input_ids, attention_mask):
            places = torch.arange(input_ids.shape[1]).float()
            return type("Output", (), {"logits": places[None, :, None].expand(len(input_ids), -1, 2)})

    ids = torch.zeros(1, 7, dtype=torch.long)
    # five response tokens stand at places 2 to 6: they are predicted at 1 to 5
    assert response_logits(Everything(), ids, ids == 0, 5)[0, :, 0].tolist() == [1, 2, 3, 4, 5]
