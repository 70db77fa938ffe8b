"""The shard: prompts with their responses as token ids, in one memory-mapped file.

Legend: N records, S segments (a prompt or a response), M tokens.

A record is a prompt and k responses, best first: k = 1 to fine-tune on, k >= 2 as a preference, k = 0 as a prompt.
On disk it is columns, so that opening is instant and memory stays flat: `tokens` (M,) int32, `segment_offsets` (S + 1,)
int64 into the tokens, `record_offsets` (N + 1,) int64 into the segments (first the prompt, then its responses), and
`truncated` (S,) bool, true where a response was cut to fit; optionally `ratings` (S,) float32, what people gave each
response, NaN at prompts and where nobody did. Lists of dictionaries as seed projects write them are read as well
(`prompt_len`, `input_ids`, `targets` or `chosen_input_ids`, `rejected_input_ids`, optionally `margin`).
"""

import hashlib
import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rlhf_stages.data.dictionaries import is_whole, parse_dictionaries

FORMAT_VERSION = 1
_COLUMNS = {
    "tokens": torch.int32,
    "segment_offsets": torch.int64,
    "record_offsets": torch.int64,
    "truncated": torch.bool,
    "ratings": torch.float32,  # May be left out
}


@dataclass(frozen=True)
class Record:
    """One prompt and its responses, best first, as int64 ids.

    `truncated[i]` says that response i was cut; `targets` (T,) is only there when the shard brought its own, and so is
    `ratings`, with a number per response (NaN if it has none).
    """

    prompt: Tensor
    responses: tuple[Tensor, ...]
    truncated: tuple[bool, ...]
    targets: Tensor | None = None
    ratings: tuple[float, ...] | None = None

    def sequence(self, response: int = 0) -> Tensor:
        """Ids of the prompt and one of its responses, (T,)."""
        return torch.cat([self.prompt, self.responses[response]])


class ShardWriter:
    """Collects records in flat arrays and saves them as one shard."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._segment_offsets = array("q", [0])
        self._record_offsets = array("q", [0])
        self._truncated = bytearray()
        self._ratings = array("f")

    def __len__(self) -> int:
        return len(self._record_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all records."""
        return len(self._tokens)

    def add(
        self,
        prompt: Sequence[int],
        responses: Sequence[Sequence[int]] = (),
        truncated: Sequence[bool] = (),
        ratings: Sequence[float] = (),
    ) -> None:
        """Append a record; `truncated` and `ratings` have an entry per response, none means not cut and not rated."""
        cut = (False, *(truncated or [False] * len(responses)))
        rated = (torch.nan, *(ratings or [torch.nan] * len(responses)))
        for segment, was_cut, rating in zip((prompt, *responses), cut, rated, strict=True):
            self._tokens.extend(segment)
            self._segment_offsets.append(len(self._tokens))
            self._truncated.append(was_cut)
            self._ratings.append(rating)
        self._record_offsets.append(len(self._segment_offsets) - 1)

    def columns(self) -> dict[str, Tensor]:
        """What was added, as the columns of a shard; `ratings` only if something was rated."""
        columns = {
            "tokens": _tensor(self._tokens, torch.int32),
            "segment_offsets": _tensor(self._segment_offsets, torch.int64),
            "record_offsets": _tensor(self._record_offsets, torch.int64),
            "truncated": _tensor(self._truncated, torch.bool),
        }
        ratings = _tensor(self._ratings, torch.float32)
        return columns if bool(ratings.isnan().all()) else {**columns, "ratings": ratings}

    def save(self, path: Path, order: Sequence[int] | None = None) -> None:
        """Write the shard in one piece (temporary name, then rename), records in the given order."""
        columns = self.columns()
        atomic_save({"format_version": FORMAT_VERSION} | (columns if order is None else _reorder(columns, order)), path)


class Shard(Dataset[Record]):
    """A shard opened for reading; indexing gives a `Record`."""

    def __init__(self, columns: dict[str, Tensor], targets: Sequence[Tensor | None] | None, path: Path) -> None:
        self.path = path
        self._columns = columns
        self._targets = targets

    def __len__(self) -> int:
        return len(self._columns["record_offsets"]) - 1

    @property
    def fingerprint(self) -> str:
        """Tells this shard from others, at the cost of reading its offsets and a part of its tokens."""
        some = [self._columns[name] for name in ("segment_offsets", "record_offsets")]
        some += [self._columns["tokens"][: 2**20], self._columns["tokens"][-(2**20) :]]
        return hashlib.sha256(b"".join(column.numpy().tobytes() for column in some)).hexdigest()[:16]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return int(self._columns["segment_offsets"].diff()[self._columns["record_offsets"][:-1]].max())

    def __getitem__(self, index: int) -> Record:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {self.path}, which has {len(self)}")
        c = self._columns
        first, last = c["record_offsets"][index : index + 2].tolist()
        bounds = c["segment_offsets"][first : last + 1].tolist()
        prompt, *responses = (c["tokens"][a:b].long() for a, b in pairwise(bounds))
        return Record(
            prompt,
            tuple(responses),
            tuple(c["truncated"][first + 1 : last].tolist()),
            None if self._targets is None else self._targets[index],
            tuple(c["ratings"][first + 1 : last].tolist()) if "ratings" in c else None,
        )


def open_shard(path: Path, *, responses: int = 0, vocab_size: int | None = None, rated: bool = False) -> Shard:
    """Open a shard whose records must have at least `responses` responses, and ids below `vocab_size`.

    With `rated` every response must have a rating, none above that of a better one.

    Raises:
        FileNotFoundError: there is no such shard.
        ValueError: the file is damaged, empty of records, of another version, or of another kind than asked for.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no shard {path}; data_prep/<dataset>/prepare_data.py writes it (see its --stage)")
    try:
        content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen types on a damaged file, and explains for a page
        reason = re.split(r"\. |\n", str(error))[0]
        raise ValueError(
            f"{path} is not a readable shard ({type(error).__name__}: {reason}); prepare it again"
        ) from None
    if isinstance(content, list):
        shard = _from_dictionaries(content, path)
    else:
        shard = Shard(_check_columns(content, path), None, path)
    if len(shard) == 0:
        raise ValueError(f"{path} holds no records; look at the counts in {path.parent / 'args.json'}")
    counts = shard._columns["record_offsets"].diff() - 1
    if int(counts.min()) < responses:
        raise ValueError(
            f"{path}: record {int(counts.argmin())} has {int(counts.min())} responses, expected at least {responses}"
            " (a finetune shard where a preference shard is needed?)"
        )
    tokens = shard._columns["tokens"]
    if vocab_size is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(
            f"{path} has token ids from {int(tokens.min())} to {int(tokens.max())}, but the model's vocabulary has"
            f" {vocab_size}: it was prepared with another tokenizer; prepare it again with the model's own"
        )
    if rated:
        _check_ratings(shard._columns, path)
    return shard


def atomic_save(content: Any, path: Path) -> None:
    """`torch.save` that leaves either the whole file or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _tensor(values: "array[int] | array[float] | bytearray", dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype).clone() if len(values) else torch.empty(0, dtype=dtype)


def _reorder(columns: dict[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """The same records in another order (also a selection of them)."""
    records, segments = columns["record_offsets"], columns["segment_offsets"]
    picked = torch.as_tensor(order, dtype=torch.int64)
    segment_order = _ranges(records[:-1][picked], records[1:][picked])
    token_order = _ranges(segments[:-1][segment_order], segments[1:][segment_order])
    return {
        "tokens": columns["tokens"][token_order],
        "segment_offsets": _offsets(segments.diff()[segment_order]),
        "record_offsets": _offsets(records.diff()[picked]),
        **{name: columns[name][segment_order] for name in ("truncated", "ratings") if name in columns},
    }


def _ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """The integers of [starts[i], ends[i]) one after the other."""
    lengths = ends - starts
    total = int(lengths.sum())
    return torch.arange(total) + (starts - _offsets(lengths)[:-1]).repeat_interleave(lengths, output_size=total)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _check_columns(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, dict) or "format_version" not in content:
        raise ValueError(f"{path} is a {type(content).__name__}, expected a shard; prepare it again")
    version = content["format_version"]
    if not isinstance(version, int) or version != FORMAT_VERSION:
        raise ValueError(f"{path} has format {version!r:.100}, this version reads {FORMAT_VERSION}")
    columns: dict[str, Tensor] = {}
    for name, dtype in _COLUMNS.items():
        if name == "ratings" and name not in content:
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
    )
    if not whole:
        raise ValueError(f"{path}: its offsets do not fit its tokens; the file is damaged, prepare it again")
    return columns


def _check_ratings(columns: dict[str, Tensor], path: Path) -> None:
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


def _from_dictionaries(rows: list[Any], path: Path) -> Shard:
    """Read the list-of-dictionaries form."""
    writer, targets, bytes_in_file = ShardWriter(), [], path.stat().st_size
    for prompt, responses, ratings, target in parse_dictionaries(rows, path):
        writer.add(prompt, responses, ratings=ratings)
        targets.append(target)
        if writer.num_tokens > bytes_in_file:  # the same long record a million times makes a small file
            raise ValueError(f"{path} holds more tokens than bytes: its records are one and the same")
    return Shard(writer.columns(), targets, path)
