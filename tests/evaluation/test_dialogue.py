"""The dialogue suite."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_stages.args import FabricArgs, ModelArgs
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.dialogue import human_measures, intent_matches, measures, references_of, response_nll
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.loop import freeze, start_fabric
from rlhf_stages.models.loading import load_causal

from helpers import make_tokenizer, save_causal


class Scripted:
    """A classifier that finds a question where there is a question mark."""

    labels = ("inform", "question")

    def __init__(self):
        self.seen = []

    def probabilities(self, texts):
        self.seen += texts
        asks = torch.tensor([float("?" in text) for text in texts])
        return torch.stack([1 - asks, asks], dim=1)


def record(prompt, response, truncated=False, **metadata):
    return Record(torch.tensor(prompt), (torch.tensor(response),), (truncated,), metadata=metadata)


RECORDS = [
    record([1, 5, 6], [20, 21, 2], act="question", last_turn="Hi."),
    record([1, 7], [23, 24, 25, 26], truncated=True, act="inform", last_turn="Well."),
    record([1, 8, 9, 10], [27, 2], act="inform"),
]


def total(measure):
    return measure.value(measure.counts.sum(0))


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


def replies(*texts):
    return [
        Reply(prompt="", text=text, tokens=number + 1, ended=number > 0, kl=0.5 * number, reward=None, gold=None)
        for number, text in enumerate(texts)
    ]


def test_measures_of_a_policy(wordnet):
    found, whole = measures(
        replies("you want tea?", "the red tea", " "),
        ([3.0, 4.0, 5.0], [2, 3, 1]),
        ["do you want tea?", "the red tea", "no"],
        RECORDS,
        Scripted(),
        "act",
    )
    numbers = {name: total(measure) for name, measure in found.items()}
    assert numbers["perplexity"] == pytest.approx(math.exp(12 / 6))
    assert numbers["intent accuracy"] == 1.0
    assert numbers["rouge1"] == pytest.approx((6 / 7 + 1 + 0) / 3)
    assert 0.5 < numbers["METEOR"] < 1
    # words and the question mark: 3 + 1, 3, 0; of four-grams one of one; the brevity penalty is exp(1 - 9 / 7)
    assert numbers["SacreBLEU"] == pytest.approx(math.exp(1 - 9 / 7))
    assert numbers["mean length (words)"] == pytest.approx(6 / 3)
    assert numbers["mean length (tokens)"] == pytest.approx(2)
    assert numbers["KL to the first (nats)"] == pytest.approx(0.5)
    assert numbers["empty replies (%)"] == pytest.approx(100 / 3)
    assert numbers["cut-off replies (%)"] == pytest.approx(100 / 3)
    assert whole == {"distinct-1": 1.0, "distinct-2": 1.0}
    without, _ = measures(replies("a"), ([1.0], [1]), ["a"], RECORDS[:1], None, "act")
    assert "intent accuracy" not in without


def test_humans_have_what_needs_no_reference():
    found, whole = human_measures(["do you?", "no no no", "?"], RECORDS, Scripted(), "act")
    assert {name: total(m) for name, m in found.items()} == pytest.approx(
        {"mean length (words)": 2.0, "intent accuracy": 2 / 3}
    )
    assert whole["distinct-1"] == pytest.approx(4 / 6)


def test_the_classifier_reads_the_last_utterance_and_the_reply():
    classifier = Scripted()
    assert intent_matches(["what?", "so?", "so"], RECORDS, classifier, "act") == [1.0, 0.0, 1.0]
    assert classifier.seen == ["Hi.\nwhat?", "Well.\nso?", "\nso"]
    with pytest.raises(ValueError, match="'mood' is None, which is not among"):
        intent_matches(["a", "b", "c"], RECORDS, classifier, "mood")
    with pytest.raises(ValueError, match="'act' is 'shout'"):
        intent_matches(["a"], [record([1], [2], act="shout")], classifier, "act")


def test_references_are_the_first_responses():
    tokenizer = make_tokenizer()
    ids = tokenizer("the red tea")["input_ids"]
    assert references_of([record([1], [*ids, 2])], tokenizer) == ["the red tea"]
    with pytest.raises(ValueError, match="come without responses"):
        references_of([Record(torch.tensor([1]), (), ())], tokenizer)
