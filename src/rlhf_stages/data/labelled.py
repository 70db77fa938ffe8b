"""Labelled texts for a classifier: the files of a prepared folder; and texts read, checked, split and encoded."""

import hashlib
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import ClassifierArgs
from rlhf_stages.data.info import is_folder_name
from rlhf_stages.data.readers import is_text
from rlhf_stages.data.shards import Size
from rlhf_stages.data.sources import SPLITS, Source, fraction, read_source
from rlhf_stages.data.tokenizer import encode_whole
from rlhf_stages.files import read_json, write_text

# a column with more of them holds something else
MAX_LABELS = 1000
_TRUE, _FALSE = {"true", "1", "yes"}, {"false", "0", "no", ""}
_COLUMN_WORDS = {"test": "test", "val": "validation", "dev": "validation"}
_SPLIT_WORDS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}


class Row(NamedTuple):
    """A text and its label, and the split where it belongs."""

    split: str
    text: str
    label: str


@dataclass(frozen=True)
class LabelledData:
    """Labelled texts by split, with labels as places in `labels`.

    `raw` is what `args.json` of the experiment keeps: where they come from, and counts of what was kept and dropped.
    """

    dataset: str
    labels: tuple[str, ...]
    splits: dict[str, list[tuple[str, int]]]
    raw: dict[str, Any]

    def encode(
        self, split: str, tokenizer: PreTrainedTokenizerBase, max_length: int, batch: int = 10_000
    ) -> "LabelledTexts | None":
        """The texts of a split as ids; None if it has none."""
        rows = self.splits[split]
        texts = [text for text, _ in rows]
        parts = (encode_whole(tokenizer, texts[i : i + batch], max_length) for i in range(0, len(texts), batch))
        ids = list(chain.from_iterable(parts))
        return LabelledTexts(split, ids, [label for _, label in rows], len(self.labels)) if rows else None

    def summary(self) -> str:
        """A line for each split: how many texts of each label were kept, and what was dropped."""
        lines = []
        for split, counts in self.raw["counts"].items():
            labels = ", ".join(f"{n:,} {label}" for label, n in counts["kept"].items())
            dropped = ", ".join(f"{n:,} {reason}" for reason, n in counts["dropped"].items()) or "none"
            lines.append(f"{split}: {len(self.splits[split]):,} texts ({labels or 'none'}); dropped: {dropped}")
        return "\n".join(lines)


class LabelledText(NamedTuple):
    """Ids of a text (T,) int64, and the place of its label."""

    ids: Tensor
    label: int


class LabelledTexts(Dataset[LabelledText]):
    """Encoded texts of one split, in memory."""

    def __init__(self, split: str, ids: Sequence[Sequence[int]], labels: Sequence[int], num_labels: int) -> None:
        self.path = Path(split)
        self._ids = [torch.tensor(row, dtype=torch.int32) for row in ids]
        self._labels = list(labels)
        self._num_labels = num_labels

    @property
    def fingerprint(self) -> str:
        """Tells these texts and labels from others."""
        total = hashlib.sha256(torch.tensor(self._labels).numpy().tobytes())
        for row in self._ids:
            total.update(len(row).to_bytes(8, "little") + row.numpy().tobytes())
        return total.hexdigest()[:16]

    @property
    def sizes(self) -> list[Size]:
        """One text each, and its tokens."""
        return [(1, len(row)) for row in self._ids]

    @property
    def label_counts(self) -> Tensor:
        """Texts of each label, (L,) int64."""
        return torch.tensor(self._labels).bincount(minlength=self._num_labels)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> LabelledText:
        return LabelledText(self._ids[index].long(), self._labels[index])


def write_texts(folder: Path, kind: str, rows: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write `<kind>_<split>.jsonl` from texts and labels. A split of none has no file: an empty one is an error."""
    for split, texts in rows.items():
        path = folder / f"{kind}_{split}.jsonl"
        lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in texts]
        write_text(path, lines) if lines else path.unlink(missing_ok=True)


def read_labelled(args: ClassifierArgs) -> LabelledData:
    """Read the labelled texts of `--source`, or of a prepared `--data_dir`.

    The splits are those of the source; where it has none for validation or testing, a share of the training texts
    becomes one, by a hash of seed and text alone. No text is on two sides (testing keeps it, then validation), and one
    with two labels on the same side is dropped.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: no text can be used, there are not at least two labels, or one that training does not know.
    """
    dropped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    if args.source is None:
        dataset, sources = _prepared(args)
    else:
        dataset, sources = args.source_names[0], [(None, read_source(args.source, columns=args.names("columns")))]
    rows = [row for split, source in sources for row in _usable(source, split, args, dropped)]
    if not rows:
        _refuse_nothing(args, sources, dropped)
    rows = _apart(_placed(rows, args), dropped)
    names = _label_names(rows, args)
    splits: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    for row in rows:
        splits[row.split].append((row.text, names[row.label][0]))
    labels = tuple(dict(sorted(names.values())).values())
    if not splits["validation"]:
        warnings.warn("no text for validation: nothing is validated, and `best` is the last checkpoint", stacklevel=2)
    counts = {}
    for split in SPLITS:
        kept = Counter(labels[place] for _, place in splits[split])
        counts[split] = {"kept": {x: kept[x] for x in labels}, "dropped": dict(dropped[split].most_common())}
    raw = {"dataset": dataset, "source": args.source or args.data_dir, "labels": labels, "counts": counts}
    return LabelledData(dataset, labels, splits, raw)


def _prepared(args: ClassifierArgs) -> tuple[str, list[tuple[str | None, Source]]]:
    """Name of the data set of a prepared folder, and its splits."""
    folder = Path(args.data_dir)
    files = {split: folder / f"{args.label_kind}_{split}.jsonl" for split in SPLITS}
    if not files["train"].is_file():
        raise FileNotFoundError(
            f"no {files['train']}; prepare the texts (prepare_data.py --stage=classify, if the data set has it), or"
            " name a --source of labelled texts"
        )
    found = read_json(folder / "args.json").get("dataset") if (folder / "args.json").is_file() else None
    dataset = found or folder.resolve().parent.name
    if not is_folder_name(dataset):
        raise ValueError(f"{folder / 'args.json'}: dataset is {dataset!r:.100}, expected a name of letters and digits")
    return dataset, [(split, read_source(str(path))) for split, path in files.items() if path.is_file()]


def _usable(source: Source, split: str | None, args: ClassifierArgs, dropped: dict[str, Counter[str]]) -> Iterator[Row]:
    """What of a source is a text with a label.

    Args:
        split: that of all its rows; None leaves it to the source, or to the column that says it.
    """
    for own, record in source:
        side = split or (own if args.split_column is None else _side(record, args.split_column))
        text, label = record.get(args.text_column), _label_of(record.get(args.label_column))
        if not isinstance(text, str) or not is_text(text):
            dropped[side]["no text"] += 1
        elif not text.strip():
            dropped[side]["empty text"] += 1
        elif label is None:
            dropped[side]["no label"] += 1
        else:
            yield Row(side, text, label)
    for own, reasons in source.skipped.items():
        dropped[split or own].update(reasons)


def _label_of(value: Any) -> str | None:
    """A label as text, whatever the format makes of it; None if there is none."""
    if isinstance(value, float) and value.is_integer():  # a column of integers with gaps
        value = int(value)
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    return text if text and is_text(text) else None


def _side(record: Mapping[str, Any], column: str) -> str:
    """The split that a column names: by name, or by true and false where the column is called after a split."""
    value = str(record.get(column, "")).strip().lower()
    side = _SPLIT_WORDS.get(value, value)
    if side in SPLITS:
        return side
    named = next((side for word, side in _COLUMN_WORDS.items() if word in column), None)
    if column not in record or named is None or value not in _TRUE | _FALSE:
        raise ValueError(
            f"--split_column={column} is {record.get(column)!r:.50} in a row; expected train, validation or test, or"
            " true or false in a column such as is_valid or is_test"
        )
    return named if value in _TRUE else "train"


def _refuse_nothing(
    args: ClassifierArgs, sources: Sequence[tuple[str | None, Source]], dropped: Mapping[str, Counter[str]]
) -> None:
    reasons = sum(dropped.values(), Counter())
    first = next((record for _, source in sources for _, record in source), {})
    bad = next((source.first_skipped for _, source in sources if source.first_skipped), None)
    raise ValueError(
        f"{args.source or args.data_dir} has no labelled text ({', '.join(f'{n:,} {r}' for r, n in reasons.items())});"
        f" --text_column={args.text_column} --label_column={args.label_column}, and the columns are"
        f" {', '.join(map(str, first)) or 'none'}{f'; first bad line: {bad}' if bad else ''}"[:600]
    )


def _placed(rows: Sequence[Row], args: ClassifierArgs) -> list[Row]:
    """The rows in the splits of the source, or where the hash of a text sends it if the source lacks a split."""
    found = {row.split for row in rows}
    kept = found if "train" in found else {"train"}
    placed = []
    for row in rows:
        split = row.split if row.split in kept else "train"
        digest = hashlib.sha256(f"{args.seed}\0{row.text}".encode()).digest()
        if split == "train" and "test" not in kept and fraction(digest, 1) < args.test_percentage:
            split = "test"
        elif split == "train" and "validation" not in kept and fraction(digest, 2) < args.validation_percentage:
            split = "validation"
        placed.append(row._replace(split=split))
    return placed


def _apart(rows: Iterable[Row], dropped: dict[str, Counter[str]]) -> list[Row]:
    """Without texts of two labels, and without texts of training (validation) that are used for testing."""
    rows = list(rows)
    labels, owner = defaultdict(set), {}
    for row in rows:
        labels[row.split, row.text].add(row.label)
    for split in reversed(SPLITS):
        owner.update({text: split for side, text in labels if side == split and text not in owner})
    kept = []
    for row in rows:
        if owner[row.text] != row.split:
            dropped[row.split][f"also in {owner[row.text]}"] += 1
        elif len(labels[row.split, row.text]) > 1:
            dropped[row.split]["two labels"] += 1
        else:
            kept.append(row)
    return kept


def _label_names(rows: Sequence[Row], args: ClassifierArgs) -> dict[str, tuple[int, str]]:
    """Place and name of each label as it stands in the data."""
    training = {row.label for row in rows if row.split == "train"}
    if len(training) < 2:
        raise ValueError(
            f"the training texts have {len(training)} label ({', '.join(training) or 'none'}); there is nothing to tell"
            f" apart with fewer than two; is --label_column={args.label_column} the right column?"
        )
    if len(training) > MAX_LABELS:
        raise ValueError(
            f"--label_column={args.label_column} holds {len(training):,} different values, more than {MAX_LABELS:,};"
            " is it the right column?"
        )
    given = args.names("labels")
    if not given:
        are_numbers = all(label.removeprefix("-").isdecimal() for label in training)
        ordered = sorted(training, key=lambda label: (int(label) if are_numbers else 0, label))
        names = {label: (place, label) for place, label in enumerate(ordered)}
    elif training <= set(given):
        names = {label: (place, label) for place, label in enumerate(given)}
    else:
        names = {str(place): (place, name) for place, name in enumerate(given)}
        if unknown := sorted(training - names.keys()):
            raise ValueError(
                f"--labels={args.labels} names neither {unknown[0]!r:.50} itself nor, as the number of a label from 0,"
                f" what it stands for; the labels of the training texts are {', '.join(sorted(training))[:200]}"
            )
    for row in rows:
        if row.label not in names:
            raise ValueError(
                f"the {row.split} texts have the label {row.label!r:.50}, which no training text has"
                f" ({', '.join(sorted(training))[:200]}); name all of them with --labels, or leave those texts out"
            )
    return names
