"""Raw records, one at a time, from local files, folders, saved datasets or the hub; and what a stage can use of them.

A hash of its key alone decides a record's stage: the stages are disjoint by key, in whatever order they are prepared.
"""

import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.data.readers import READERS, TABLES, BadLine, Line, is_text, read_saved

SPLITS = ("train", "validation", "test")
_HUB_ID = re.compile(r"(?!.*\.(jsonl?|csv|tsv|txt|parquet|gz|zip)$)\w[\w.-]*(/\w[\w.-]*)?")
_SPLIT = re.compile(r"(train|training|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)

_Part = tuple[str, str, Callable[[], Iterable[Line]]]  # Split, name for messages, what opens it


class Source:
    """Iterates `(split, record)`, afresh each time; the split is train, validation or test.

    `skipped[split]["bad line"]` counts the rows of the last pass that could not be read, and `first_skipped` says where
    the first of them is.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self.skipped: dict[str, Counter[str]] = {}
        self.first_skipped: str | None = None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        self.skipped, self.first_skipped = defaultdict(Counter), None
        for split, name, rows in self._parts:
            for row in rows():
                if isinstance(row, BadLine):
                    self.skipped[split]["bad line"] += 1
                    self.first_skipped = self.first_skipped or f"{name}, line {row.line}: {row.why}"
                else:
                    yield split, row


def read_source(source: str, ignore: Sequence[str] = (), columns: Sequence[str] = ()) -> Source:
    """Find the records of `source`: a data file, a folder of them, a folder of `save_to_disk`, or a hub id.

    The split of a file is the start of its name (train, validation or valid or dev, test), else of that of the nearest
    folder within `source` that says one; that of a dataset is the name of its split. Anything else is train. Files and
    splits whose name starts with one of `ignore` are left out. `columns` name the columns of csv and tsv files that
    have no header.

    Raises:
        FileNotFoundError: `source` looks like a local path and is not there.
        ValueError: nothing in it can be read, or the hub does not give it.
    """
    path = Path(source).expanduser()
    if path.is_file():
        parts = [_file_part(path, [path.name], columns)]
    elif path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        parts = _dataset_parts(read_saved(path), source, ignore)
    elif path.is_dir():
        files = [file for file in _data_files(path) if not file.name.startswith(tuple(ignore))]
        parts = [_file_part(file, file.relative_to(path).parts, columns) for file in files]
        if not parts:
            raise ValueError(f"--source {source}: the folder holds no file that ends in {', '.join(READERS)}")
    elif _HUB_ID.fullmatch(source):
        parts = _dataset_parts(_load(source), source, ignore)
    else:
        raise FileNotFoundError(f"--source {source}: there is no such file or folder")
    return Source(parts)


def _split_of(*names: str) -> str:
    """The split that the last name which says one starts with; else train."""
    match = next(filter(None, map(_SPLIT.match, reversed(names))), None)
    word = match[1].lower() if match else "train"
    return "train" if word == "training" else word if word in SPLITS else "validation"


def _data_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.name.lower().endswith(tuple(READERS)) and path.is_file())
    return sorted(path for path in files if not any(p.startswith(".") for p in path.relative_to(folder).parts))


def _file_part(path: Path, names: Sequence[str], columns: Sequence[str]) -> _Part:
    """`names`: of the folders that may say its split, and its own."""
    reader = next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)
    if reader is None:
        raise ValueError(f"--source {path}: expected a name that ends in {', '.join(READERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); fetch it again, or leave it out")
    if not columns:
        return _split_of(*names), str(path), partial(reader, path)
    table = TABLES.get(path.suffix.lower())
    if table is None:
        raise ValueError(f"{path}: --columns names the columns of {' and '.join(TABLES)} files only")
    return _split_of(*names), str(path), partial(table, path, columns)


def _dataset_parts(loaded: Any, name: str, ignore: Sequence[str]) -> list[_Part]:
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    return [
        (_split_of(split), f"{name} [{split}]", partial(iter, rows))
        for split, rows in splits.items()
        if not split.startswith(tuple(ignore))
    ]


def _load(source: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source)
    except Exception as error:  # offline, unknown, gated: a dozen types
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{source!r} is not a local path, nor a dataset that the hub gives ({why}); give --source a local file or"
            " folder"
        ) from None


@dataclass(frozen=True)
class Example:
    """What a data set makes of one raw record."""

    prompt: str
    responses: tuple[str, ...]  # Best first; one is enough to fine-tune, none for a prompt
    key: str  # Records with the same key land on the same side of every split
    ratings: tuple[float, ...] = ()  # What people gave each response, none if they only ranked them
    metadata: Mapping[str, Any] = field(default_factory=dict)  # What else is known, as JSON can hold it


class SkipRecord(Exception):
    """Raised by a `to_example` for a record that it cannot use; the message is the reason to count."""


@dataclass(slots=True)
class Row:
    """What is remembered of a record: never its text, once it is tokenized."""

    split: str  # Of the source at first, then where the record goes
    reason: str | None = None  # Why it is dropped
    digest: bytes = b""  # Hash of seed and key; empty if the record has no usable key
    inputs: bytes = b""  # Hash of what makes two records the same input
    index: int = -1  # Place in the writer
    length: int = 0  # Tokens of the prompt and the longest response
    truncated: bool = False
    ratings: tuple[float, ...] = ()
    metadata: Mapping[str, Any] | None = None  # Until it is written


Records = Iterable[tuple[str, Mapping[str, Any]]]  # Split and raw record
ToExample = Callable[[Mapping[str, Any]], Example]
Texts = tuple[str, tuple[str, ...]]  # Prompt and the responses that the stage uses
Judged = tuple[Row, Texts | None, Mapping[str, Any]]


def text_of(record: Mapping[str, Any], *names: str) -> str | None:
    """The first of the named fields that the record has, or None.

    Raises:
        SkipRecord: the field is not text.
    """
    value = next((record[name] for name in names if record.get(name) is not None), None)
    if value is not None and not isinstance(value, str):
        raise SkipRecord("not text")
    return value


def judge(records: Records, to_example: ToExample, args: TextDataArgs, seen: set[str]) -> Iterator[Judged]:
    """Rows of this stage with the texts to tokenize, or a reason to drop them; `seen` collects the source's splits.

    Records that no stage could use have no stage either: each stage counts them.
    """
    shares = args.stage_shares
    for split, record in records:
        if split not in SPLITS:
            raise ValueError(f"the source has a split {split!r}, expected one of {', '.join(SPLITS)}")
        seen.add(split)
        row = Row(split)
        try:
            example = to_example(record)
            responses = _used_responses(example, args.stage)
            row.digest, row.inputs = _digest(str(args.seed), example.key), _digest(example.prompt, *responses[:1])
            row.ratings, row.metadata = example.ratings[: len(responses)], example.metadata
        except SkipRecord as skip:
            row.reason = str(skip)
            yield row, None, record
            continue
        if _stage_of(row.digest, shares) != args.stage:
            continue
        if args.stage == "preference" and args.remove_same_responses and len(set(responses)) < len(responses):
            row.reason = "same response"
        elif any(len(response.strip()) < args.minimum_response_length for response in responses):
            row.reason = "too short"
        yield row, (example.prompt, responses), record


def _used_responses(example: Example, stage: str) -> tuple[str, ...]:
    """The responses that a stage uses."""
    needed = {"prompt": 0, "finetune": 1, "preference": 2}[stage]
    if len(example.responses) < needed:
        raise SkipRecord("missing rejected" if example.responses else "missing chosen")
    responses = example.responses if stage == "preference" else example.responses[:needed]
    if not all(map(is_text, (example.key, example.prompt, *responses))):
        raise SkipRecord("not text")
    if not example.prompt.strip():
        raise SkipRecord("empty prompt")
    if not all(response.strip() for response in responses):
        raise SkipRecord("empty reply")
    return responses


def _digest(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode()).digest()


def fraction(digest: bytes, part: int) -> float:
    """A number in [0, 1) from 8 of the 32 bytes; the parts are independent of each other."""
    return (int.from_bytes(digest[8 * part : 8 * part + 8], "big") >> 11) / 2**53


def _stage_of(digest: bytes, shares: Mapping[str, float]) -> str:
    upper = itertools.accumulate(shares.values())
    return next((stage for stage, bound in zip(shares, upper, strict=True) if fraction(digest, 0) < bound), "prompt")
