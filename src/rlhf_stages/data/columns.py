"""The columns of a shard: what they are, whether they fit each other, and their records in another order.

The names and shapes stand in `rlhf_stages.data.shards`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_stages.data.dictionaries import is_whole

FORMAT_VERSION = 1
_COLUMNS = {
    "tokens": torch.int32,
    "segment_offsets": torch.int64,
    "record_offsets": torch.int64,
    "truncated": torch.bool,
    "ratings": torch.float32,
    "metadata": torch.uint8,
    "metadata_offsets": torch.int64,
}
_OPTIONAL = ("ratings", "metadata", "metadata_offsets")


def reorder(columns: dict[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """The same records in another order (also a selection of them)."""
    records, segments = columns["record_offsets"], columns["segment_offsets"]
    picked = torch.as_tensor(order, dtype=torch.int64)
    segment_order = _ranges(records[:-1][picked], records[1:][picked])
    token_order = _ranges(segments[:-1][segment_order], segments[1:][segment_order])
    reordered: dict[str, Tensor] = {
        "tokens": columns["tokens"][token_order],
        "segment_offsets": _offsets(segments.diff()[segment_order]),
        "record_offsets": _offsets(records.diff()[picked]),
        **{name: columns[name][segment_order] for name in ("truncated", "ratings") if name in columns},
    }
    if "metadata" in columns:
        places = columns["metadata_offsets"]
        reordered["metadata"] = columns["metadata"][_ranges(places[:-1][picked], places[1:][picked])]
        reordered["metadata_offsets"] = _offsets(places.diff()[picked])
    return reordered


def _ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """The integers of [starts[i], ends[i]) one after the other."""
    lengths = ends - starts
    total = int(lengths.sum())
    return torch.arange(total) + (starts - _offsets(lengths)[:-1]).repeat_interleave(lengths, output_size=total)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def check_columns(content: Any, path: Path) -> dict[str, Tensor]:
    """The columns of what a file holds.

    Raises:
        ValueError: it is no shard, or one that is damaged.
    """
    if not isinstance(content, dict) or "format_version" not in content:
        raise ValueError(f"{path} is a {type(content).__name__}, expected a shard; prepare it again")
    version = content["format_version"]
    if not isinstance(version, int) or version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r:.100}, this version reads {FORMAT_VERSION}")
    columns: dict[str, Tensor] = {}
    for name, dtype in _COLUMNS.items():
        if name in _OPTIONAL and name not in content:
            continue
        column = content.get(name)
        if not isinstance(column, Tensor) or column.dtype != dtype or column.dim() != 1 or not is_whole(column):
            raise ValueError(f"{path}: column {name!r} is missing or not a flat {dtype} tensor; prepare it again")
        columns[name] = column
    records, segments, tokens = columns["record_offsets"], columns["segment_offsets"], columns["tokens"]
    whole = (
        len(records) > 0
        and len(segments) > 0
        and int(records[0]) == int(segments[0]) == 0
        and int(records[-1]) == len(segments) - 1 == len(columns["truncated"])
        and int(segments[-1]) == len(tokens)
        and bool((records[1:] > records[:-1]).all())  # their difference could run over
        and bool((segments[1:] >= segments[:-1]).all())
        and len(columns.get("ratings", columns["truncated"])) == len(columns["truncated"])
        and _metadata_fits(columns)
    )
    if not whole:
        raise ValueError(f"{path}: its offsets do not fit its tokens; the file is damaged, prepare it again")
    return columns


def _metadata_fits(columns: dict[str, Tensor]) -> bool:
    content, offsets = columns.get("metadata"), columns.get("metadata_offsets")
    if content is None or offsets is None:
        return content is offsets
    return (
        len(offsets) == len(columns["record_offsets"])
        and int(offsets[0]) == 0
        and int(offsets[-1]) == len(content)
        and bool((offsets[1:] >= offsets[:-1]).all())
    )


def check_ratings(columns: dict[str, Tensor], path: Path) -> None:
    """Every response has a rating, and no worse one a higher one: a margin is their difference."""
    if "ratings" not in columns:
        raise ValueError(f"{path} has no ratings to take margins from; write them too, or leave --use_margin out")
    records = columns["record_offsets"]
    responses = torch.ones(int(records[-1]), dtype=torch.bool)
    responses[records[:-1]] = False
    ratings = columns["ratings"].where(responses, torch.nan)  # so that no response rises above its prompt
    rises = ratings.diff(prepend=ratings[:1]) > 0
    for wrong, what in ((responses & ~ratings.isfinite(), "is not rated"), (rises, "is rated above a better one")):
        if wrong.any():
            record = int(torch.searchsorted(records, int(wrong.long().argmax()), right=True)) - 1
            advice = "a margin needs a rating of each response, best first; or leave --use_margin out"
            raise ValueError(f"{path}: a response of record {record} {what}; {advice}")
