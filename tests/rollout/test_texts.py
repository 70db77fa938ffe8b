"""The text of a rollout."""

import torch

from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.data.shards import Record
from rlhf_stages.rollout.texts import Samples, samples_of

from helpers import left_padded, make_tokenizer, right_padded


def test_texts_references_and_metadata_of_a_batch():
    tokenizer = make_tokenizer()
    ids = {text: tokenizer(text)["input_ids"] for text in ("the red tea", " is good", " bad")}
    record = Record(
        torch.tensor([1, *ids["the red tea"]]), (torch.tensor([*ids[" bad"], 2]),), (False,), metadata={"act": "inform"}
    )
    bare = Record(torch.tensor([1, *ids[" bad"]]), (), ())
    prompts = PromptBatch(*left_padded([[1, *ids["the red tea"]], [1, *ids[" bad"]]], 3), (record, bare))
    response_ids, mask = right_padded([[*ids[" is good"], 2], [2]], 3)
    samples = samples_of(tokenizer, prompts, response_ids, mask)
    assert list(samples.prompts) == ["the red tea", " bad"]
    assert list(samples.responses) == [" is good", ""]
    assert list(samples.references) == [" bad", None]
    assert list(samples.metadata) == [{"act": "inform"}, {}]
    assert ["".join(row) for row in samples.tokens] == [" is good</s>", "</s>"]
    assert samples.row(1).responses == [""]
    twice = samples + samples.row(0)
    assert (len(twice), twice.responses[2], twice.metadata[2]) == (3, " is good", {"act": "inform"})
    unknown = samples_of(tokenizer, PromptBatch(prompts.input_ids, prompts.attention_mask), response_ids, mask)
    assert (unknown.references, unknown.metadata) == ([None, None], [{}, {}])
    assert len(Samples() + samples) == 2
