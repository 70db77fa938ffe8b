"""How often a reward model scores the better of two texts higher, by how far they are apart in length.

Legend: Q pairs, N records.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.collate import collate_preference
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.bootstrap import CONFIDENCE
from rlhf_stages.functional.comparison import wilson_interval
from rlhf_stages.functional.losses import score_at

SPLITS = ("train", "validation", "test")
# the column of what a reward model that only counts tokens would reach
LONGER_WINS = "longer wins"
ALL, IN_ORDER = "all pairs", "whole lists in order"
# tokens that the two texts of a pair are apart at least, for each bucket of differences
_BUCKETS = (1, 5, 17, 65)


@dataclass(frozen=True)
class Pairs:
    """The pairs of N ranked lists, each (Q,).

    records: number of the list that a pair comes from, 0 to N - 1. differences: tokens of the better text less those of
    the worse one. right: the better text has the higher score; a tie is wrong.
    """

    records: Tensor
    differences: Tensor
    right: Tensor


@torch.no_grad()
def judged_pairs(
    reward_model: Any, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, fabric: Fabric, batch_size: int
) -> Pairs:
    """What a reward model says of every pair of some preference records, at least one."""
    parts = []
    for start in range(0, len(records), batch_size):
        batch = collate_preference(records[start : start + batch_size], pad_token_id=int(tokenizer.pad_token_id))
        with fabric.autocast():
            scores = reward_model(batch.input_ids.to(fabric.device), batch.attention_mask.to(fabric.device)).cpu()
        ends = score_at(scores, batch.lengths)
        differences = batch.lengths[batch.better] - batch.lengths[batch.worse]
        parts.append((batch.lists + start, differences, ends[batch.better] > ends[batch.worse]))
    return Pairs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def accuracy_rows(models: Mapping[str, Pairs]) -> dict[str, dict[str, Any]]:
    """Accuracy of reward models on the same pairs, with 95 % intervals: of all, of those whose better text is longer,
    shorter or as long, and by the absolute difference of length in tokens.

    Returns:
        {row: {"n": pairs, "share": {column: {"value", "low", "high"}}}}, without the rows that have no pairs. The first
        column is `LONGER_WINS`. Where there are lists of more than two, the last row has the share of the lists whose
        scores fall strictly from the best text to the worst; its n counts lists.
    """
    pairs = next(iter(models.values()))
    right = {LONGER_WINS: pairs.differences > 0, **{name: found.right for name, found in models.items()}}
    rows = {}
    for row, kept in _groups(pairs.differences):
        if kept.any():
            lists = len(set(pairs.records[kept].tolist()))
            rows[row] = {"n": int(kept.sum()), "share": {n: _share(r[kept], lists) for n, r in right.items()}}
    lists = int(pairs.records.max()) + 1
    if lists < len(pairs.records):
        # a list is in order where no pair of it is wrong
        in_order = {name: torch.bincount(pairs.records[~r], minlength=lists) == 0 for name, r in right.items()}
        rows[IN_ORDER] = {"n": lists, "share": {name: _share(whole, lists) for name, whole in in_order.items()}}
    return rows


def _groups(differences: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield ALL, torch.ones_like(differences, dtype=torch.bool)
    yield "better text longer", differences > 0
    yield "better text shorter", differences < 0
    yield "same length", differences == 0
    apart = differences.abs()
    for low, beyond in zip(_BUCKETS, (*_BUCKETS[1:], None), strict=True):
        if beyond is None:
            yield f"over {low - 1} tokens apart", apart >= low
        else:
            yield f"{low} to {beyond - 1} tokens apart", (apart >= low) & (apart < beyond)


def _share(right: Tensor, lists: int) -> dict[str, float]:
    """The share of what is right. The pairs of a list hang together, so that for the interval a list counts as one."""
    share = float(right.double().mean())
    low, high = wilson_interval(share * lists, lists, CONFIDENCE)
    return {"value": share, "low": low, "high": high}
