"""What the feedback file holds, as Python sees it: items, opinions of them, and judgements (stored opinions)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_stages.feedback.wording import Refusal

VERDICTS = ("ranked", "all_bad", "skipped", "scored")
JUDGE = "judge:"  # Names of programs that judge begin so, and those of people do not
COLUMNS = "id, revision, item, annotator, verdict, ranks, reply, score, seconds, author, created, deleted"
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Item:
    """A prompt with the replies of a model, in the order in which they were sampled."""

    id: int
    prompt: str
    replies: tuple[str, ...]
    model: str
    digest: str
    settings: Mapping[str, Any]
    created: str


@dataclass(frozen=True)
class Opinion:
    """What a person says of an item: ranks of its replies, all bad, skipped, or a score of one reply."""

    verdict: str
    ranks: tuple[int, ...] | None = None
    reply: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class Judgement:
    """A stored opinion, at one of its revisions; `annotator` said it first, `author` made this revision."""

    id: int
    revision: int
    item: int
    annotator: str
    opinion: Opinion
    seconds: float
    author: str
    created: str
    deleted: bool


def check(opinion: Opinion, item: Item) -> None:
    """Refuse ranks that are not 1 to the number of different ones, one per reply, and scores of no reply."""
    count = len(item.replies)
    ranks = opinion.ranks
    if opinion.verdict == "ranked":
        fits = ranks is not None and len(ranks) == count and set(ranks) == set(range(1, len(set(ranks)) + 1))
    elif opinion.verdict == "scored":
        score = opinion.score
        fits = opinion.reply in range(count) and score is not None and abs(score) < float("inf")
    else:
        fits = opinion.verdict in VERDICTS
    if not fits:
        raise Refusal("no_fit", number=item.id)


def item_of(row: Row) -> Item:
    """The item that a row of its table is."""
    number, prompt, replies, model, digest, settings, created = row
    return Item(number, prompt, tuple(json.loads(replies)), model, digest, json.loads(settings), created)


def judgement_of(row: Row) -> Judgement:
    """The judgement that a row of `COLUMNS` is."""
    number, revision, item, annotator, verdict, ranks, reply, score, seconds, author, created, deleted = row
    opinion = Opinion(verdict, None if ranks is None else tuple(json.loads(ranks)), reply, score)
    return Judgement(number, revision, item, annotator, opinion, seconds, author, created, bool(deleted))


def dump(value: Any) -> str:
    """JSON as the file holds it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
