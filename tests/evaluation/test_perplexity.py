"""Perplexity of the data's own responses."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_stages.args import FabricArgs, ModelArgs
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.bootstrap import with_intervals
from rlhf_stages.evaluation.perplexity import perplexity, response_nll
from rlhf_stages.loop import freeze, start_fabric
from rlhf_stages.models.loading import load_causal

from helpers import make_tokenizer, save_causal


def record(prompt, response, truncated=False):
    return Record(torch.tensor(prompt), (torch.tensor(response),), (truncated,))


RECORDS = [
    record([1, 5, 6], [20, 21, 2]),
    record([1, 7], [23, 24, 25, 26], truncated=True),
    record([1, 8, 9, 10], [27, 2]),
]


def test_nll_is_that_of_each_response_alone(tmp_path):
    fabric = start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)
    tokenizer = make_tokenizer()
    model = freeze(fabric, load_causal(save_causal(tmp_path, "llama"), tokenizer, ModelArgs()))
    totals, tokens = response_nll(model, RECORDS, tokenizer, fabric, batch_size=2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for row, (total_nll, count) in enumerate(zip(totals, tokens, strict=True)):
        prompt, response = RECORDS[row].prompt.tolist(), RECORDS[row].responses[0].tolist()
        response = response[:-1] if RECORDS[row].truncated[0] else response  # its EOS says nothing
        with torch.no_grad():
            logprobs = plain(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = -sum(logprobs[len(prompt) - 1 + t, token].item() for t, token in enumerate(response))
        assert (count, total_nll) == (len(response), pytest.approx(expected, abs=1e-4))


def test_every_token_weighs_the_same():
    """Not every response: exp((3 + 4 + 5) / (2 + 3 + 1)) and not the mean of three."""
    measure = perplexity(([3.0, 4.0, 5.0], [2, 3, 1]))["perplexity"]
    assert measure.value(measure.counts.sum(0)) == pytest.approx(math.exp(12 / 6))


def test_responses_that_were_cut_to_nothing_make_no_resample_empty():
    found = with_intervals({"a": perplexity(([0.0, 2.0, 0.0, 6.0], [0, 1, 0, 2]))}, 200, seed=0)["a"]["perplexity"]
    assert found["value"] == pytest.approx(math.exp(8 / 3))
    assert math.exp(2) <= found["low"] <= found["high"] <= math.exp(3)
    assert perplexity(([0.0], [0])) == perplexity(([], [])) == {}
