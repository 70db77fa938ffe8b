"""Whether people agree: Kendall's tau-b of two rankings, Krippendorff's alpha of any number of people.

Pure Python: an item has at most 9 replies.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isqrt, nan, sqrt
from statistics import fmean, median

from rlhf_stages.feedback.records import JUDGE, Item, Judgement


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings of the same things: 1 is the same order, -1 the reverse; ties in both allowed.

    (concordant - discordant) / sqrt(pairs not tied in a * pairs not tied in b), NaN where a ranking is one tie.
    Source: Kendall, Rank Correlation Methods (1948), chapter 3.
    """
    agreement = untied_a = untied_b = 0
    for i, j in combinations(range(len(a)), 2):
        sign_a, sign_b = ((x[i] > x[j]) - (x[i] < x[j]) for x in (a, b))
        agreement += sign_a * sign_b
        untied_a += abs(sign_a)
        untied_b += abs(sign_b)
    product = untied_a * untied_b
    root = isqrt(product)
    return agreement / (root if root * root == product else sqrt(product)) if product else nan


def krippendorff_alpha(units: Iterable[Sequence[float]]) -> float:
    """Krippendorff's alpha with the ordinal metric: 1 is agreement, 0 what chance gives, NaN where all values are one.

    Args:
        units: of each thing judged, the values that people gave it; units with fewer than two do not count.

    With n_c values c in all of n: alpha = 1 - (n - 1) * sum over units of sum_{pairs} d(c, k) / (m_u - 1) over
    sum_{c<k} n_c n_k d(c, k), and d(c, k) = (sum_{g=c..k} n_g - (n_c + n_k) / 2)^2.
    Source: Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), section D.
    """
    kept = [list(unit) for unit in units if len(unit) > 1]
    counts = Counter(value for unit in kept for value in unit)
    values = sorted(counts)
    total = counts.total()
    below = {c: sum(counts[g] for g in values if g < c) for c in values}

    def distance(c: float, k: float) -> float:
        low, high = min(c, k), max(c, k)
        between = below[high] + counts[high] - below[low]
        return (between - (counts[low] + counts[high]) / 2) ** 2

    expected = sum(counts[c] * counts[k] * distance(c, k) for c, k in combinations(values, 2))
    observed = sum(sum(distance(c, k) for c, k in combinations(unit, 2)) / (len(unit) - 1) for unit in kept)
    return 1 - (total - 1) * observed / expected if expected else nan


def middle_ranks(ranks: Sequence[int]) -> list[float]:
    """Ranks whose ties share the mean of their places, so that 1, 1, 2 and 1, 2, 3 speak of the same scale."""
    return [sum(r < rank for r in ranks) + (ranks.count(rank) + 1) / 2 for rank in ranks]


@dataclass(frozen=True)
class Agreement:
    """How well people agree on the items that more than one ranked.

    `tau` is the mean over items and pairs of people; `alpha` takes each reply as a unit and its middle ranks as values.
    """

    items: int
    tau: float
    alpha: float


def agreement_of(judged: Iterable[tuple[Judgement, Item]]) -> Agreement:
    """The agreement of the rankings among what was judged; NaN where there is nothing to compare.

    Judges that are programs do not count: they are no people who could agree.
    """
    by_item: dict[int, list[list[float]]] = {}
    for judgement, item in judged:
        if judgement.opinion.ranks is not None and not judgement.annotator.startswith(JUDGE):
            by_item.setdefault(item.id, []).append(middle_ranks(judgement.opinion.ranks))
    repeated = [rows for rows in by_item.values() if len(rows) > 1]
    taus = [kendall_tau_b(a, b) for rows in repeated for a, b in combinations(rows, 2)]
    taus = [tau for tau in taus if tau == tau]
    alpha = krippendorff_alpha([values for rows in repeated for values in zip(*rows, strict=True)])
    return Agreement(len(repeated), fmean(taus) if taus else nan, alpha)


@dataclass(frozen=True)
class Work:
    """What a person did: judgements by verdict, and the median of the seconds that one took."""

    verdicts: Mapping[str, int]
    seconds: float


def work_of(judged: Iterable[tuple[Judgement, Item]]) -> dict[str, Work]:
    """The work of each annotator, by name."""
    by_person: dict[str, list[Judgement]] = {}
    for judgement, _ in judged:
        by_person.setdefault(judgement.annotator, []).append(judgement)
    return {
        name: Work(Counter(j.opinion.verdict for j in own), median(j.seconds for j in own))
        for name, own in sorted(by_person.items())
    }
