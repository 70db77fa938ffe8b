"""Chinese sentiment: reviews with labels, ranked lists of reviews, and prompts that ask for a review.

The three come from different files, so that each stage has all of its own; what may not meet are the lists and the
reviews, since many lists hold reviews of the labelled corpora.
"""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_stages.args import ZhSentimentArgs
from rlhf_stages.data.labelled import write_texts
from rlhf_stages.data.rank_lists import RankList, read_rank_lists
from rlhf_stages.data.readers import BadLine, is_text
from rlhf_stages.data.sources import SPLITS, Example, Source, fraction

PROMPTS = ("刚收到货，感觉", "这部电影很", "说实话，真的很", "这次购物总的来说体验很")
LIST_PROMPT = "评论："  # The default of --list_prompt
LABELS = {"0": "negative", "1": "positive"}
# the halves of the reviews to train on: one classifier is the reward, another one, that never saw its texts, judges
HALVES = ("a", "b")

Record = tuple[str, Mapping[str, Any]]  # Split, and what `to_example` reads


class Review(NamedTuple):
    """A labelled review: its split, its text on one line, negative or positive, and its half if it is to train on."""

    split: str
    text: str
    label: str
    half: str


def plain(text: str) -> str:
    """Letters, digits and characters of a text in lower case: texts with the same say the same, if there are any."""
    return "".join(character for character in text if character.isalnum()).lower() or text.strip()


def place(key: str, args: ZhSentimentArgs) -> tuple[str, str]:
    """Split and half of a key, by a hash of seed and key alone."""
    digest = hashlib.sha256(f"{args.seed}\0{key}".encode()).digest()
    is_test, is_validation = (
        fraction(digest, 1) < args.test_percentage,
        fraction(digest, 2) < args.validation_percentage,
    )
    return "test" if is_test else "validation" if is_validation else "train", HALVES[fraction(digest, 3) >= 0.5]


class Reviews:
    """The reviews of a source, read and sifted; iterating gives (split, record), the record a text and its label.

    Args:
        source: records with a text (`review`, `text`) and a label, 0 or 1.
        lists: those that no review may be in; none leaves the reviews as they are.

    Attributes:
        reviews: those that can be used.
        skipped: the reasons why others cannot, counted by split.
        in_lists: how many stand in a list word for word, and how many if only letters and digits count.
    """

    def __init__(self, source: Source, lists: Sequence[RankList], args: ZhSentimentArgs) -> None:
        self._args = args
        self.skipped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        exact = {text.strip() for ranks in lists for text in ranks.responses}
        listed = {plain(text) for text in exact}
        found: dict[str, tuple[str, str]] = {}
        labels: dict[str, set[str]] = defaultdict(set)
        numbers: Counter[str] = Counter()
        for _, record in source:
            text, label = _text_and_label(record)
            key = "" if text is None else plain(text)
            split = place(key, args)[0]
            if text is None or label is None:
                self.skipped["train"]["no text" if text is None else "no label"] += 1
                continue
            numbers["exact"] += str(record.get("review", record.get("text"))).strip() in exact
            numbers["plain"] += key in listed
            if key in listed and args.remove_leak:
                self.skipped[split]["also in a ranked list"] += 1
            elif key in found and label in labels[key]:
                self.skipped[split]["repeated"] += 1
            else:
                found.setdefault(key, (text, label))
                labels[key].add(label)
        for key in [key for key in found if len(labels[key]) > 1]:
            self.skipped[place(key, args)[0]]["two labels"] += 1
            del found[key]
        for split, reasons in source.skipped.items():
            self.skipped[split].update(reasons)
        self.first_skipped = source.first_skipped
        self.in_lists = (numbers["exact"], numbers["plain"])
        places = ((*place(key, args), *found[key]) for key in found)
        self.reviews = [Review(split, text, label, half) for split, half, text, label in places]

    def __iter__(self) -> Iterator[Record]:
        for review in self.reviews:
            prompt, rest = opening(review.text, self._args)
            yield review.split, {"prompt": prompt, "responses": (rest,), "key": review.text}


def _text_and_label(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Text of a record on one line, and the name of its label; None where there is none."""
    text, label = record.get("review", record.get("text")), LABELS.get(str(record.get("label")).strip())
    if not isinstance(text, str) or not is_text(text) or not text.strip():
        return None, label
    return " ".join(text.split()), label


def opening(text: str, args: ZhSentimentArgs) -> tuple[str, str]:
    """The first 2 to `opening_length` characters of a review, as many as a hash says but half of it at most, and the
    rest of it.
    """
    digest = hashlib.sha256(f"{args.seed}\0opening\0{text}".encode()).digest()
    length = min(2 + int(fraction(digest, 0) * (args.opening_length - 1)), len(text) // 2)
    return text[:length], text[length:]


class Lists:
    """Ranked lists, each with its split; none to train on shares a text with one that is held out.

    Attributes:
        lists: those that could be read, of whatever split.
        skipped: the reasons why lines cannot be used, counted by split.
        first_skipped: where the first is that cannot be read.
    """

    def __init__(self, path: str, args: ZhSentimentArgs) -> None:
        self._args = args
        self.lists: list[RankList] = []
        self.skipped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.first_skipped: str | None = None
        for found in read_rank_lists(Path(path), args.list_prompt):
            if isinstance(found, BadLine):
                self.skipped["train"][found.why] += 1
                self.first_skipped = self.first_skipped or f"{path}, line {found.line}: {found.why}"
            else:
                texts = tuple(" ".join(text.split()) for text in found.responses)
                self.lists.append(found._replace(responses=texts))

    def __iter__(self) -> Iterator[Record]:
        skipped = {split: Counter(reasons) for split, reasons in self.skipped.items()}
        owner: dict[str, str] = {}
        placed = [(place("\n".join(ranks.responses), self._args)[0], ranks) for ranks in self.lists]
        for split in reversed(SPLITS):
            for ranks in (ranks for of_list, ranks in placed if of_list == split):
                owners = {owner.setdefault(plain(text), split) for text in ranks.responses} - {split}
                if owners:
                    skipped[split][f"a text also in {min(owners)}"] += 1
                else:
                    key = f"{split}\n" + "\n".join(ranks.responses)
                    yield split, {"prompt": self._args.list_prompt, "responses": ranks.responses, "key": key}
        self.skipped = skipped


def draw_prompts(args: ZhSentimentArgs) -> Iterator[Record]:
    """`num_prompts` prompts to train on, each drawn from all of them with equal probability, and a tenth as many to
    validate and to test on.

    Raises:
        ValueError: the file of prompts holds none.
    """
    prompts: Sequence[str] = PROMPTS
    if args.prompts is not None:
        lines = Path(args.prompts).read_text(encoding="utf-8-sig").splitlines()
        prompts = [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError(f"--prompts {args.prompts} holds no prompt; expected one a line")
    for split in SPLITS:
        rng = random.Random(f"{args.seed}/{split}")
        for number in range(args.num_prompts if split == "train" else max(args.num_prompts // 10, 1)):
            prompt = rng.choice(prompts)
            yield split, {"prompt": prompt, "responses": (), "key": f"{split}/{number}"}


def to_example(record: Mapping[str, Any]) -> Example:
    """The records are as the stages need them."""
    return Example(record["prompt"], record["responses"], key=record["key"])


def write_labelled(reviews: Iterable[Review], folder: Path, args: ZhSentimentArgs) -> dict[str, int]:
    """Write `sentiment_<half>_<split>.jsonl` for classifiers; returns the rows of each.

    The halves share validation and test, so that classifiers of both are compared on the same texts.
    """
    rows = list(reviews)
    if args.shuffle:
        random.Random(args.seed).shuffle(rows)
    counts = {}
    for half in HALVES:
        chosen = {}
        for split in SPLITS:
            of_split = [row for row in rows if row.split == split and (split != "train" or row.half == half)]
            chosen[split] = [(row.text, row.label) for row in of_split[: args.num_samples]]
            counts[f"{half} {split}"] = len(chosen[split])
        write_texts(folder, f"sentiment_{half}", chosen)
    return counts
