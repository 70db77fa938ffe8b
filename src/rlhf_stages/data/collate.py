"""Records to batches.

Legend: B sequences, T tokens (longest of the batch), P prompt tokens (longest), S sequences of all lists, Q pairs.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_stages.data.labelled import LabelledText
from rlhf_stages.data.shards import Record
from rlhf_stages.functional.masking import first_difference, length_mask


class Width(NamedTuple):
    """Few widths for many batches: the next multiple, but no more than the longest of all."""

    longest: int
    multiple: int = 64

    def of(self, size: int) -> int:
        """How wide a batch of this size is made."""
        return max(size, min(-(-size // self.multiple) * self.multiple, self.longest))


@dataclass(frozen=True)
class FinetuneBatch:
    """Right-padded texts: input_ids, targets (B, T) int64; attention_mask (B, T) bool."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor


@dataclass(frozen=True)
class PackedBatch(FinetuneBatch):
    """Rows that several texts share; `position_ids` (B, T) int64 start at 0 with each text, and stay 0 in the padding.

    The first token of a text does not count: it would be predicted from the text before.
    """

    position_ids: Tensor


@dataclass(frozen=True)
class PreferenceBatch:
    """Right-padded texts of B ranked lists and all their pairs.

    input_ids (S, T) int64, attention_mask (S, T) bool, lengths (S,) int64; better, worse (Q,) int64 index the S texts,
    lists (Q,) int64 the B lists; starts (Q,) int64 is the first token at which the two of a pair differ; margins (Q,)
    fp32 is the difference of their ratings, or 0 if margins were not asked for. The response of a text is its tokens
    from prompt_lengths to response_ends, (S,) int64, without the EOS that ends a truncated one; response_mask (S, R)
    bool says how many tokens that are, the first token of a text left out, since nothing predicts it.
    """

    input_ids: Tensor
    attention_mask: Tensor
    lengths: Tensor
    better: Tensor
    worse: Tensor
    lists: Tensor
    starts: Tensor
    margins: Tensor
    prompt_lengths: Tensor
    response_ends: Tensor
    response_mask: Tensor


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts, so that generation continues each from its last token: input_ids, attention_mask (B, P).

    `records` are those that the prompts come from, or none.
    """

    input_ids: Tensor
    attention_mask: Tensor
    records: tuple[Record, ...] = ()

    def first(self, count: int) -> "PromptBatch":
        """The first prompts, with the columns that are padding in all of them cut away."""
        ids, mask = self.input_ids[:count], self.attention_mask[:count]
        longest = int(mask.sum(1).max())
        return PromptBatch(ids[:, ids.shape[1] - longest :], mask[:, mask.shape[1] - longest :], self.records[:count])

    def repeat(self, times: int) -> "PromptBatch":
        """Each prompt `times` times in a row."""
        return PromptBatch(
            self.input_ids.repeat_interleave(times, dim=0),
            self.attention_mask.repeat_interleave(times, dim=0),
            tuple(record for record in self.records for _ in range(times)),
        )


@dataclass(frozen=True)
class LabelledBatch:
    """Right-padded texts and their labels: input_ids (B, T) int64, attention_mask (B, T) bool, labels (B,) int64."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


def collate_finetune(
    records: Sequence[Record],
    *,
    pad_token_id: int,
    ignore_index: int,
    use_targets: bool,
    mask_prompt: bool,
    width: Width | None = None,
) -> FinetuneBatch:
    """Texts to learn. With `use_targets` the prompt does not count (unless the data were made with
    `mask_prompt=False`); without, every token of the text counts. Padding never does, and neither does the EOS that
    ends a truncated response: the text went on.
    """
    input_ids, lengths = pad_right([record.sequence() for record in records], pad_token_id, width)
    targets, _ = pad_right(
        [_targets(record, ignore_index, use_targets, mask_prompt) for record in records], ignore_index, width
    )
    return FinetuneBatch(input_ids, length_mask(lengths, input_ids.shape[1]), targets)


def collate_packed(
    rows: Sequence[Sequence[Record]],
    *,
    length: int,
    pad_token_id: int,
    ignore_index: int,
    use_targets: bool,
    mask_prompt: bool,
) -> PackedBatch:
    """Rows of `length` tokens with the texts of each one after the other; what counts is as in `collate_finetune`."""
    input_ids = torch.full((len(rows), length), pad_token_id)
    targets = torch.full((len(rows), length), ignore_index)
    position_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    for number, row in enumerate(rows):
        end = 0
        for record in row:
            ids = record.sequence()
            start, end = end, end + len(ids)
            input_ids[number, start:end] = ids
            targets[number, start:end] = _targets(record, ignore_index, use_targets, mask_prompt)
            targets[number, start : start + 1] = ignore_index
            position_ids[number, start:end] = torch.arange(len(ids))
        lengths[number] = end
    return PackedBatch(input_ids, length_mask(lengths, length), targets, position_ids)


def _targets(record: Record, ignore_index: int, use_targets: bool, mask_prompt: bool) -> Tensor:
    """The ids of a text, `ignore_index` where a token does not count, (T,)."""
    targets = record.sequence()
    if use_targets and record.targets is not None:
        targets = record.targets.clone()
    elif use_targets and mask_prompt:
        targets[: len(record.prompt)] = ignore_index
    if record.truncated[0]:
        targets[-1:] = ignore_index
    return targets


def collate_preference(
    records: Sequence[Record], *, pad_token_id: int, use_margin: bool = False, width: Width | None = None
) -> PreferenceBatch:
    """Ranked lists: every text once, and each pair of a list with the better one first.

    With `use_margin` every record must have ratings (`open_shard` sees to it).
    """
    sequences = [record.sequence(i) for record in records for i in range(len(record.responses))]
    input_ids, lengths = pad_right(sequences, pad_token_id, width)
    pairs, lists, offset = [], [], 0
    for number, record in enumerate(records):
        k = len(record.responses)
        of_list = [(offset + i, offset + j) for i in range(k) for j in range(i + 1, k)]
        pairs += of_list
        lists += [number] * len(of_list)
        offset += k
    better, worse = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    shorter = torch.minimum(lengths[better], lengths[worse])
    # where one text is a prefix of the other they differ at its end, whatever the padding id is
    starts = torch.minimum(first_difference(input_ids[better], input_ids[worse]), shorter)
    rated = [rating for record in records for rating in record.ratings or ()] if use_margin else [0.0] * len(sequences)
    ratings = torch.tensor(rated, dtype=torch.float32)
    prompt_lengths = torch.tensor([len(record.prompt) for record in records for _ in record.responses])
    response_ends = lengths - torch.tensor([int(cut) for record in records for cut in record.truncated])
    counts = (response_ends - prompt_lengths.clamp(min=1)).clamp(min=0)
    longest = int(counts.max())
    return PreferenceBatch(
        input_ids=input_ids,
        attention_mask=length_mask(lengths, input_ids.shape[1]),
        lengths=lengths,
        better=better,
        worse=worse,
        lists=torch.tensor(lists, dtype=torch.int64),
        starts=starts,
        prompt_lengths=prompt_lengths,
        response_ends=response_ends,
        response_mask=length_mask(counts, longest if width is None else width.of(longest)),
        margins=ratings[better] - ratings[worse],
    )


def collate_labelled(texts: Sequence[LabelledText], *, pad_token_id: int, width: Width | None = None) -> LabelledBatch:
    """Texts to tell the kind of."""
    input_ids, lengths = pad_right([text.ids for text in texts], pad_token_id, width)
    labels = torch.tensor([text.label for text in texts])
    return LabelledBatch(input_ids, length_mask(lengths, input_ids.shape[1]), labels)


def collate_prompts(records: Sequence[Record], *, pad_token_id: int) -> PromptBatch:
    """Prompts to continue."""
    prompts = pad_left([record.prompt for record in records], pad_token_id)
    return dataclasses.replace(prompts, records=tuple(records))


def pad_right(sequences: Sequence[Tensor], value: int, width: Width | None = None) -> tuple[Tensor, Tensor]:
    """Stack to (B, T) with `value` behind the shorter ones, and the lengths (B,)."""
    stacked = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=value)
    if width is not None:
        stacked = F.pad(stacked, (0, width.of(stacked.shape[1]) - stacked.shape[1]), value=value)
    return stacked, torch.tensor([len(sequence) for sequence in sequences])


def pad_left(sequences: Sequence[Tensor], value: int) -> PromptBatch:
    """Stack to (B, P) with `value` in front of the shorter ones, and the attention mask."""
    flipped, lengths = pad_right([sequence.flip(0) for sequence in sequences], value)
    return PromptBatch(flipped.flip(1), length_mask(lengths, flipped.shape[1]).flip(1))
