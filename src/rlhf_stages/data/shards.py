"""The shard: prompts with their responses as token ids, in one memory-mapped file.

Legend: N records, S segments (a prompt or a response), M tokens.

A record is a prompt and k responses, best first: k = 1 to fine-tune on, k >= 2 as a preference, k = 0 as a prompt.
On disk it is columns, so that opening is instant and memory stays flat: `tokens` (M,) int32, `segment_offsets` (S + 1,)
int64 into the tokens, `record_offsets` (N + 1,) int64 into the segments (first the prompt, then its responses), and
`truncated` (S,) bool, true where a response was cut to fit; optionally `ratings` (S,) float32, what people gave each
response, NaN at prompts and where nobody did; and `metadata`, uint8, a JSON object per record (no byte for an empty
one), with `metadata_offsets` (N + 1,) int64. Lists of dictionaries as other projects write them are read as well
(`prompt_len`, `input_ids`, `targets` or `chosen_input_ids`, `rejected_input_ids`, optionally `margin`, `metadata`).
"""

import hashlib
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rlhf_stages.data.columns import FORMAT_VERSION, check_columns, check_ratings, reorder
from rlhf_stages.data.dictionaries import parse_dictionaries
from rlhf_stages.data.metadata import pack, unpack

Item_co = TypeVar("Item_co", covariant=True)
Size = tuple[int, int]  # Texts that a record brings to a forward pass, and tokens of the longest of them


class EmptyShardError(ValueError):
    """A shard without records."""


@dataclass(frozen=True)
class Record:
    """One prompt and its responses, best first, as int64 ids.

    `truncated[i]` says that response i was cut; `targets` (T,) is only there when the shard brought its own, and so is
    `ratings`, with a number per response (NaN if it has none). `metadata` is what the data set says about the record.
    """

    prompt: Tensor
    responses: tuple[Tensor, ...]
    truncated: tuple[bool, ...]
    targets: Tensor | None = None
    ratings: tuple[float, ...] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

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
        self._metadata = bytearray()
        self._metadata_offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._record_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all records."""
        return len(self._tokens)

    @property
    def num_metadata_bytes(self) -> int:
        """Bytes of the metadata of all records."""
        return len(self._metadata)

    def add(
        self,
        prompt: Sequence[int],
        responses: Sequence[Sequence[int]] = (),
        truncated: Sequence[bool] = (),
        ratings: Sequence[float] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Append a record; `truncated` and `ratings` have an entry per response, none means not cut and not rated.

        Raises:
            TypeError, ValueError: the metadata is nothing that JSON can hold.
        """
        self._metadata += pack(metadata or {})  # first, because it can fail
        self._metadata_offsets.append(len(self._metadata))
        cut = (False, *(truncated or [False] * len(responses)))
        rated = (torch.nan, *(ratings or [torch.nan] * len(responses)))
        for segment, was_cut, rating in zip((prompt, *responses), cut, rated, strict=True):
            self._tokens.extend(segment)
            self._segment_offsets.append(len(self._tokens))
            self._truncated.append(was_cut)
            self._ratings.append(rating)
        self._record_offsets.append(len(self._segment_offsets) - 1)

    def columns(self) -> dict[str, Tensor]:
        """What was added, as the columns of a shard; `ratings` and `metadata` only if a record has some."""
        columns = {
            "tokens": _tensor(self._tokens, torch.int32),
            "segment_offsets": _tensor(self._segment_offsets, torch.int64),
            "record_offsets": _tensor(self._record_offsets, torch.int64),
            "truncated": _tensor(self._truncated, torch.bool),
        }
        ratings = _tensor(self._ratings, torch.float32)
        if not bool(ratings.isnan().all()):
            columns["ratings"] = ratings
        if self._metadata:
            columns["metadata"] = _tensor(self._metadata, torch.uint8)
            columns["metadata_offsets"] = _tensor(self._metadata_offsets, torch.int64)
        return columns

    def save(self, path: Path, order: Sequence[int] | None = None) -> None:
        """Write the shard in one piece (temporary name, then rename), records in the given order."""
        columns = self.columns()
        atomic_save({"format_version": FORMAT_VERSION} | (columns if order is None else reorder(columns, order)), path)


class Records(Protocol[Item_co]):
    """What a stage reads, by number: a shard, or something else that has a name and knows itself."""

    @property
    def path(self) -> Path:
        """Its file, or a name for it."""

    @property
    def fingerprint(self) -> str:
        """Tells it from others."""

    @property
    def sizes(self) -> Sequence[Size]:
        """What each of them brings to a forward pass."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item_co: ...


class Shard(Dataset[Record]):
    """A shard opened for reading; indexing gives a `Record`.

    `responses` says what is read of it: prompts alone (0), the first response of each (1), or all of them (2).
    """

    def __init__(
        self, columns: dict[str, Tensor], targets: Sequence[Tensor | None] | None, path: Path, responses: int = 0
    ) -> None:
        self.path = path
        self.responses = responses
        self._columns = columns
        self._targets = targets

    def __len__(self) -> int:
        return len(self._columns["record_offsets"]) - 1

    @property
    def fingerprint(self) -> str:
        """Tells this shard from others, at the cost of reading its offsets and a part of its tokens."""
        some = [self._columns[name] for name in ("segment_offsets", "record_offsets")]
        some += [self._columns["tokens"][: 2**20], self._columns["tokens"][-(2**20) :]]
        some += [self._columns["metadata"][: 2**20]] if "metadata" in self._columns else []
        return hashlib.sha256(b"".join(column.numpy().tobytes() for column in some)).hexdigest()[:16]

    @property
    def sizes(self) -> list[Size]:
        """Texts of each record, as many as are read of it, and tokens of the longest of them."""
        firsts, lengths = self._columns["record_offsets"], self._columns["segment_offsets"].diff()
        prompts, texts = lengths[firsts[:-1]], firsts.diff() - 1
        if self.responses < 2:
            texts = torch.ones_like(texts)
            longest = lengths[firsts[:-1] + 1] if self.responses else torch.zeros_like(prompts)
        else:
            of_record = torch.arange(len(self)).repeat_interleave(firsts.diff())
            replies = lengths.index_fill(0, firsts[:-1], 0)
            longest = torch.zeros_like(prompts).scatter_reduce(0, of_record, replies, "amax")
        return list(zip(texts.tolist(), (prompts + longest).tolist(), strict=True))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return int(self._columns["segment_offsets"].diff()[self._columns["record_offsets"][:-1]].max())

    def __getitem__(self, index: int) -> Record:
        """The record of an index.

        Raises:
            IndexError: there is no such record.
            ValueError: its metadata is damaged.
        """
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
            self.metadata(index),
        )

    def metadata(self, index: int) -> dict[str, Any]:
        """What the data set says about a record, {} if it says nothing. Raises as indexing does."""
        if "metadata" not in self._columns:
            return {}
        start, end = self._columns["metadata_offsets"][index : index + 2].tolist()
        try:
            return unpack(self._columns["metadata"][start:end].numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path}: the metadata of record {index} is damaged ({error}); prepare it again"
            ) from None


def open_shard(path: Path, *, responses: int = 0, vocab_size: int | None = None, rated: bool = False) -> Shard:
    """Open a shard whose records must have at least `responses` responses, and ids below `vocab_size`.

    With `rated` every response must have a rating, none above that of a better one.

    Raises:
        FileNotFoundError: there is no such shard.
        EmptyShardError: it holds no records.
        ValueError: the file is damaged, of another version, or of another kind than asked for.
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
        shard = _from_dictionaries(content, path, responses)
    else:
        shard = Shard(check_columns(content, path), None, path, responses)
    if len(shard) == 0:
        raise EmptyShardError(f"{path} holds no records; look at the counts in {path.parent / 'args.json'}")
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
        check_ratings(shard._columns, path)
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


def _from_dictionaries(rows: list[Any], path: Path, responses: int) -> Shard:
    """Read the list-of-dictionaries form."""
    writer, targets, bytes_in_file = ShardWriter(), [], path.stat().st_size
    for prompt, replies, ratings, target, metadata in parse_dictionaries(rows, path):
        writer.add(prompt, replies, ratings=ratings, metadata=metadata)
        targets.append(target)
        # the same long record a million times makes a small file; as JSON, a value takes a few times more
        if max(writer.num_tokens, writer.num_metadata_bytes // 16) > bytes_in_file:
            raise ValueError(f"{path} holds more tokens or metadata than bytes: its records are one and the same")
    return Shard(writer.columns(), targets, path, responses)
