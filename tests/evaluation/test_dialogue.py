"""The dialogue suite."""

import math

import pytest
import torch

from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.dialogue import measures, references_of, text_measures
from rlhf_stages.evaluation.policies import Reply

from helpers import make_tokenizer


def asks(prompts, responses, metadata):
    """Says that a question is one where there is a question mark."""
    return [float(("?" in r) == (facts["act"] == "question")) for r, facts in zip(responses, metadata, strict=True)]


def record(prompt, response, truncated=False, **metadata):
    return Record(torch.tensor(prompt), (torch.tensor(response),), (truncated,), metadata=metadata)


RECORDS = [
    record([1, 5, 6], [20, 21, 2], act="question", last_turn="Hi."),
    record([1, 7], [23, 24, 25, 26], truncated=True, act="inform", last_turn="Well."),
    record([1, 8, 9, 10], [27, 2], act="inform"),
]


def total(measure):
    return measure.value(measure.counts.sum(0))


def replies(*texts):
    return [
        Reply(prompt="", text=text, tokens=number + 1, ended=number > 0, kl=0.5 * number, reward=None, gold=None)
        for number, text in enumerate(texts)
    ]


def test_measures_of_a_policy(wordnet):
    given = replies("you want tea?", "the red tea", " ")
    references = ["do you want tea?", "the red tea", "no"]
    found, whole = measures(given, references, RECORDS, asks)
    numbers = {name: total(measure) for name, measure in found.items()}
    assert numbers["intent accuracy"] == 1.0
    assert numbers["rouge1"] == pytest.approx((6 / 7 + 1 + 0) / 3)
    assert 0.5 < numbers["METEOR"] < 1
    # words and the question mark: 3 + 1, 3, 0; of four-grams one of one; the brevity penalty is exp(1 - 9 / 7)
    assert numbers["SacreBLEU"] == pytest.approx(math.exp(1 - 9 / 7))
    assert numbers["mean length (words)"] == pytest.approx(6 / 3)
    assert numbers["mean length (tokens)"] == pytest.approx(2)
    assert numbers["KL to the reference (nats)"] == pytest.approx(0.5)
    assert whole == {"distinct-1": 1.0, "distinct-2": 1.0}
    without, _ = measures(given[:1], references[:1], RECORDS[:1], None)
    assert "intent accuracy" not in without


def test_humans_have_what_needs_no_reference():
    found, whole = text_measures(["", "", ""], ["do you?", "no no no", "?"], RECORDS, asks)
    assert {name: total(m) for name, m in found.items()} == pytest.approx(
        {"mean length (words)": 2.0, "intent accuracy": 2 / 3}
    )
    assert whole["distinct-1"] == pytest.approx(4 / 6)


def test_intent_is_that_of_prompt_response_and_metadata():
    def judge(*seen):
        assert seen == (["", ""], ["a b", "c"], [RECORDS[0].metadata, RECORDS[1].metadata])
        return [1.0, 0.0]

    found, _ = text_measures(["", ""], ["a b", "c"], RECORDS[:2], judge)
    assert total(found["intent accuracy"]) == 0.5


def test_references_are_the_first_responses():
    tokenizer = make_tokenizer()
    ids = tokenizer("the red tea")["input_ids"]
    assert references_of([record([1], [*ids, 2])], tokenizer) == ["the red tea"]
    with pytest.raises(ValueError, match="come without responses"):
        references_of([Record(torch.tensor([1]), (), ())], tokenizer)
