"""Ranks that people give to the replies of an item: 1 is the best, equal ranks are a tie.

Legend: k replies of an item. Pure Python: k is at most 9.
"""

from collections.abc import Sequence
from itertools import combinations

from rlhf_stages.feedback.wording import Refusal

LETTERS = "ABCDEFGHI"  # What the page calls the replies, in the order in which it shows them


def find_conflict(ranks: Sequence[int | None], changed: int) -> int | None:
    """The other reply that holds the rank of reply `changed` already, or None."""
    wanted = ranks[changed]
    if wanted is None:
        return None
    return next((i for i, rank in enumerate(ranks) if rank == wanted and i != changed), None)


def complete_ranks(ranks: Sequence[int | None], ties: bool) -> tuple[int, ...]:
    """Ranks of k replies without gaps: 1, 1, 3 becomes 1, 1, 2.

    Raises:
        Refusal: a reply has no rank, a rank lies outside 1 to k, or two share one and `ties` is off.
    """
    given = [rank for rank in ranks if rank is not None]
    if len(given) < len(ranks):
        missing = [LETTERS[i] for i, rank in enumerate(ranks) if rank is None]
        raise Refusal("unranked", replies=", ".join(missing))
    if not given or not 1 <= min(given) <= max(given) <= len(given):
        raise Refusal("rank_range", count=len(ranks))
    for first, second in combinations(range(len(given)), 2):
        if given[first] == given[second] and not ties:
            raise Refusal("rank_held", rank=given[first], reply=LETTERS[first])
    place = {rank: number for number, rank in enumerate(sorted(set(given)), start=1)}
    return tuple(place[rank] for rank in given)


def read_ranks(text: str, count: int) -> tuple[int, ...]:
    """Ranks as a person types them: "2, 1, 1, 3". Raises Refusal as `complete_ranks` does, ties allowed."""
    words = text.replace(",", " ").replace("，", " ").split()
    if len(words) != count or not all(word.isascii() and word.isdigit() for word in words):
        raise Refusal("ranks_text", count=count)
    return complete_ranks([int(word[:3]) for word in words], ties=True)


def groups(ranks: Sequence[int | None]) -> list[list[int]]:
    """Replies with a rank, best first; those that share a rank stand together."""
    held = sorted({rank for rank in ranks if rank is not None})
    return [[i for i, rank in enumerate(ranks) if rank == wanted] for wanted in held]


def order_text(ranks: Sequence[int | None]) -> str:
    """The order in letters: "B > A = C"."""
    return " > ".join(" = ".join(LETTERS[i] for i in group) for group in groups(ranks))


def ordered_lists(ranks: Sequence[int]) -> list[list[int]]:
    """What a reward model can learn from, as lists of replies, best first, whose pairs are all strict.

    Without ties that is one list. A list with ties has no such form, so it becomes its strict pairs, one by one: the
    loss is a mean over pairs, so it is the loss of the list with the tied pairs left out.
    """
    parts = groups(ranks)
    if len(parts) == len(ranks):
        return [[group[0] for group in parts]] if len(parts) > 1 else []
    return [[i, j] for better, worse in combinations(parts, 2) for i in better for j in worse]
