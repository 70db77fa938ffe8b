import itertools

import pytest
import torch

from rlhf_stages.data.collate import (
    PromptBatch,
    Width,
    collate_finetune,
    collate_packed,
    collate_preference,
    collate_prompts,
    pad_left,
    pad_right,
)
from rlhf_stages.data.shards import Record

from helpers import left_padded

EOS = 2


def record(prompt, *responses, truncated=None, targets=None, ratings=None):
    return Record(
        torch.tensor(prompt, dtype=torch.int64),
        tuple(torch.tensor(response, dtype=torch.int64) for response in responses),
        tuple(truncated or [False] * len(responses)),
        None if targets is None else torch.tensor(targets),
        ratings,
    )


LONG = record([1, 7, 8], [9, 6, EOS])
SHORT = record([1], [5, EOS])


def finetune(*records, pad=0, ignore=-1, use_targets=False, mask_prompt=True):
    return collate_finetune(
        records, pad_token_id=pad, ignore_index=ignore, use_targets=use_targets, mask_prompt=mask_prompt
    )


@pytest.mark.parametrize("pad", [0, EOS])
def test_finetune_batch_pads_on_the_right_and_keeps_the_eos_target_even_if_padding_is_eos(pad):
    batch = finetune(LONG, SHORT, pad=pad)
    assert batch.input_ids.tolist() == [[1, 7, 8, 9, 6, EOS], [1, 5, EOS, pad, pad, pad]]
    assert batch.attention_mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    assert batch.targets.tolist() == [[1, 7, 8, 9, 6, EOS], [1, 5, EOS, -1, -1, -1]]
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
    assert batch.attention_mask.dtype == torch.bool


@pytest.mark.parametrize("ignore", [-1, -100])
def test_use_targets_ignores_the_prompt_unless_the_data_say_otherwise(ignore):
    masked = finetune(LONG, SHORT, ignore=ignore, use_targets=True)
    assert masked.targets.tolist() == [[ignore] * 3 + [9, 6, EOS], [ignore, 5, EOS] + [ignore] * 3]
    assert masked.input_ids.tolist() == [[1, 7, 8, 9, 6, EOS], [1, 5, EOS, 0, 0, 0]]
    open_prompt = finetune(LONG, SHORT, ignore=ignore, use_targets=True, mask_prompt=False)
    assert open_prompt.targets.tolist() == [[1, 7, 8, 9, 6, EOS], [1, 5, EOS] + [ignore] * 3]


def packed(*rows, length=10, use_targets=False, mask_prompt=True):
    return collate_packed(
        rows, length=length, pad_token_id=0, ignore_index=-1, use_targets=use_targets, mask_prompt=mask_prompt
    )


def test_packed_rows_by_hand():
    batch = packed([SHORT, LONG], [SHORT])
    assert batch.input_ids.tolist() == [[1, 5, EOS, 1, 7, 8, 9, 6, EOS, 0], [1, 5, EOS] + [0] * 7]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2] + [0] * 7]
    assert batch.attention_mask.tolist() == [[True] * 9 + [False], [True] * 3 + [False] * 7]
    # the first token of each text is not to be predicted
    assert batch.targets.tolist() == [[-1, 5, EOS, -1, 7, 8, 9, 6, EOS, -1], [-1, 5, EOS] + [-1] * 7]
    assert {t.dtype for t in (batch.input_ids, batch.position_ids, batch.targets)} == {torch.int64}
    responses = packed([SHORT, LONG], use_targets=True)
    assert responses.targets.tolist() == [[-1, 5, EOS, -1, -1, -1, 9, 6, EOS, -1]]


def test_packing_counts_the_tokens_that_count_without_it():
    cut, empty = record([1, 4], [5, EOS], truncated=[True]), record([1], [])
    own = record([1, 7], [8, 9], targets=[7, -1, 8, 9])
    records = [LONG, cut, own, SHORT, empty]
    for use_targets, mask_prompt in itertools.product((True, False), repeat=2):
        apart = finetune(*records, use_targets=use_targets, mask_prompt=mask_prompt).targets[:, 1:]
        rows = packed(records, length=20, use_targets=use_targets, mask_prompt=mask_prompt).targets[:, 1:]
        assert rows[rows != -1].tolist() == apart[apart != -1].tolist()
    assert own.targets.tolist() == [7, -1, 8, 9]


def test_targets_that_the_data_bring_are_used_only_with_use_targets():
    brought = record([1, 7], [9, EOS], targets=[-1, -1, -1, 4])
    assert finetune(LONG, brought, use_targets=True).targets.tolist() == [
        [-1, -1, -1, 9, 6, EOS],
        [-1, -1, -1, 4, -1, -1],
    ]
    for mask_prompt in (True, False):
        assert finetune(brought, use_targets=True, mask_prompt=mask_prompt).targets.tolist() == [[-1, -1, -1, 4]]
    assert finetune(brought).targets.tolist() == [[1, 7, 9, EOS]]


@pytest.mark.parametrize("use_targets", [False, True])
def test_the_eos_of_a_truncated_response_is_no_target(use_targets):
    cut = record([1], [5, EOS], truncated=[True])
    batch = finetune(LONG, cut, use_targets=use_targets)
    assert batch.targets[1].tolist() == [-1 if use_targets else 1, 5, -1, -1, -1, -1]
    assert batch.targets[0, -1] == EOS
    assert batch.input_ids[1].tolist() == [1, 5, EOS, 0, 0, 0]


def test_finetune_learns_the_best_of_several_responses():
    best_is_first = record([1], [5, EOS], [6, 6, EOS], truncated=[False, True])
    assert finetune(best_is_first).targets.tolist() == [[1, 5, EOS]]


def test_preference_pairs_of_ranked_lists_of_any_length():
    three = record([1], [5, EOS], [6, EOS], [7, 8, EOS])
    two = record([1, 9], [4, 4, EOS], [4, EOS])
    four = record([], [3], [4], [5], [6])
    batch = collate_preference([three, two, four], pad_token_id=0)
    assert batch.input_ids.tolist() == [
        [1, 5, EOS, 0, 0],
        [1, 6, EOS, 0, 0],
        [1, 7, 8, EOS, 0],
        [1, 9, 4, 4, EOS],
        [1, 9, 4, EOS, 0],
        [3, 0, 0, 0, 0],
        [4, 0, 0, 0, 0],
        [5, 0, 0, 0, 0],
        [6, 0, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [3, 3, 4, 5, 4, 1, 1, 1, 1]
    assert batch.attention_mask.sum(1).tolist() == batch.lengths.tolist()
    assert batch.attention_mask[:, 0].all()
    pairs = list(zip(batch.better.tolist(), batch.worse.tolist(), strict=True))
    expected = [(0, 1), (0, 2), (1, 2), (3, 4), *itertools.combinations((5, 6, 7, 8), 2)]
    assert pairs == expected
    assert batch.lists.tolist() == [0, 0, 0, 1, *[2] * 6]
    assert batch.starts.tolist() == [1, 1, 1, 3, *[0] * 6]
    assert batch.margins.tolist() == [0.0] * 10
    assert batch.prompt_lengths.tolist() == [1, 1, 1, 2, 2, 0, 0, 0, 0]
    assert batch.response_ends.tolist() == batch.lengths.tolist()
    assert batch.response_mask.sum(1).tolist() == [2, 2, 3, 3, 2, 0, 0, 0, 0]  # without a prompt nothing predicts it


def test_a_margin_is_the_difference_of_the_ratings_if_it_is_asked_for():
    three = record([1], [5, EOS], [6, EOS], [7, EOS], ratings=(7.0, 4.5, 4.5))
    two = record([1, 9], [4, 4, EOS], [4, EOS], ratings=(-1.0, -3.0))
    batch = collate_preference([three, two], pad_token_id=0, use_margin=True)
    assert batch.margins.tolist() == [2.5, 2.5, 0.0, 2.0]
    assert batch.margins.dtype == torch.float32
    assert collate_preference([three, two], pad_token_id=0).margins.tolist() == [0.0] * 4


def test_the_response_of_a_preference_ends_before_the_eos_of_a_truncated_one():
    rows = [
        record([1, 7], [5, EOS], [5, 6, EOS], truncated=[False, True]),
        record([1], [4, EOS], [9, EOS], [8, 8, 8, EOS], truncated=[True, False, True]),
    ]
    batch = collate_preference(rows, pad_token_id=0)
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1, 1]
    assert batch.lengths.tolist() == [4, 5, 3, 3, 5]
    assert batch.response_ends.tolist() == [4, 4, 2, 3, 4]
    assert batch.attention_mask.sum(1).tolist() == [4, 5, 3, 3, 5]  # the model still reads it
    assert batch.response_mask.tolist() == [[n > i for i in range(3)] for n in (2, 2, 1, 2, 3)]
    wider = collate_preference(rows, pad_token_id=0, width=Width(longest=10, multiple=4))
    assert (wider.input_ids.shape, wider.response_mask.shape) == ((5, 8), (5, 4))
    assert torch.equal(wider.response_mask[:, :3], batch.response_mask)


@pytest.mark.parametrize("pad", [0, EOS, 8])
def test_starts_where_the_texts_part_whatever_the_padding_id_is(pad):
    rows = [
        record([1, 7], [5, 6, EOS], [5, 4, EOS]),  # at the second token of the responses
        record([1], [5, 8, 8], [5]),  # one is a prefix: at its end, even if the other goes on with the padding id
        record([1], [5], [5, 8]),
        record([1], [5, EOS], [5, EOS]),  # equal: at the end of both
    ]
    assert collate_preference(rows, pad_token_id=pad).starts.tolist() == [3, 2, 2, 3]


def test_preference_batch_of_prompts_alone_has_no_pair():
    batch = collate_preference([record([1], [5])], pad_token_id=0)
    assert {getattr(batch, name).shape for name in ("better", "worse", "lists", "starts", "margins")} == {(0,)}


@pytest.mark.parametrize("pad", [0, 1])
def test_prompts_are_padded_on_the_left(pad):
    batch = collate_prompts([record([1, 7, 8], [9]), record([1, 6]), record([1])], pad_token_id=pad)
    assert batch.input_ids.tolist() == [[1, 7, 8], [pad, 1, 6], [pad, pad, 1]]
    assert batch.attention_mask.tolist() == [[True] * 3, [False, True, True], [False, False, True]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.attention_mask.dtype == torch.bool


def test_repeat_keeps_the_copies_of_a_prompt_together():
    batch = PromptBatch(torch.tensor([[1, 2], [0, 3]]), torch.tensor([[True, True], [False, True]])).repeat(2)
    assert batch.input_ids.tolist() == [[1, 2], [1, 2], [0, 3], [0, 3]]
    assert batch.attention_mask.tolist() == [[True, True], [True, True], [False, True], [False, True]]


def test_records_go_along_with_their_prompts():
    records = [record([1, 7, 8], [9]), record([1, 6]), record([1])]
    batch = collate_prompts(records, pad_token_id=0)
    assert batch.records == tuple(records)
    assert [r.prompt.tolist() for r in batch.first(2).repeat(2).records] == [[1, 7, 8], [1, 7, 8], [1, 6], [1, 6]]


def test_pad_right_and_left_mirror_each_other():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    right, lengths = pad_right(rows, 9)
    assert right.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert lengths.tolist() == [3, 1]
    left = pad_left([row.flip(0) for row in rows], 9)
    assert left.input_ids.flip(1).tolist() == right.tolist()


def test_the_first_prompts_lose_the_padding_that_is_in_all_of_them():
    ids, mask = left_padded([[4], [5, 6], [7, 8, 9]], pad=3)
    some = PromptBatch(ids, mask).first(2)
    assert some.input_ids.tolist() == [[3, 4], [5, 6]]
    assert some.attention_mask.tolist() == [[False, True], [True, True]]
    assert PromptBatch(ids, mask).first(9).input_ids.tolist() == ids.tolist()
