"""Whether one of two things is preferred to the other: an interval for the share of wins, and a test of one half.

Pure Python; ties are for the caller to leave out, and to name.
"""

from fractions import Fraction
from math import comb, nan, sqrt
from statistics import NormalDist


def wilson_interval(wins: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval for a share of which `wins` of `count` independent draws were seen; NaN for none. Draws that hang
    together may count as one, and then wins are fractions.

    Both ends solve |wins / count - p| = z sqrt(p (1 - p) / count). Unlike the interval around the share it stays within
    0 and 1, and is not a point where all draws are alike.
    Source: Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927).
    """
    if count == 0:
        return nan, nan
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = wins / count, 1 + z**2 / count
    middle = (share + z**2 / (2 * count)) / shrink
    half = z * sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / shrink
    return max(middle - half, 0.0), min(middle + half, 1.0)


def sign_test(wins: int, losses: int) -> float:
    """Probability, if wins and losses are equally likely, of a count at least as uneven as this one; 1 for none.

    Exact and two-sided: twice the lower tail of a binomial distribution with p = 1/2, at most 1.
    """
    count = wins + losses
    tail = sum(comb(count, k) for k in range(min(wins, losses) + 1))
    return float(min(Fraction(2 * tail, 2**count), Fraction(1)))
