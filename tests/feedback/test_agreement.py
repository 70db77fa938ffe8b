from itertools import product
from math import isnan, sqrt

import pytest
import torch
from torchmetrics.functional import kendall_rank_corrcoef

from rlhf_stages.feedback.agreement import (
    agreement_of,
    kendall_tau_b,
    krippendorff_alpha,
    middle_ranks,
    work_of,
)
from rlhf_stages.feedback.records import Item, Judgement, Opinion


def test_tau_of_orders_by_hand():
    assert kendall_tau_b([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert kendall_tau_b([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # of six pairs one is turned round: (5 - 1) / 6
    assert kendall_tau_b([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6, rel=1e-12)
    # a has five untied pairs, b all six; one of the five is turned round: (4 - 1) / sqrt(5 * 6)
    assert kendall_tau_b([1, 1, 2, 3], [1, 2, 4, 3]) == pytest.approx(3 / sqrt(30), rel=1e-12)
    # both tie, not the same: untied pairs of a: 01 02; of b: 02 12; in common 02, and it agrees
    assert kendall_tau_b([1, 2, 2], [1, 1, 2]) == pytest.approx(1 / 2, rel=1e-12)
    assert isnan(kendall_tau_b([1, 1, 1], [1, 2, 3]))
    assert isnan(kendall_tau_b([1], [1]))


def test_tau_is_that_of_torchmetrics():
    rankings = [r for r in product(range(1, 5), repeat=4) if len(set(r)) > 1]
    for a, b in zip(rankings[::7], rankings[::-5], strict=False):
        theirs = kendall_rank_corrcoef(torch.tensor(a).double(), torch.tensor(b).double(), variant="b").item()
        assert kendall_tau_b(a, b) == pytest.approx(theirs, abs=1e-6)


# Four observers and twelve units; the table of Krippendorff (2011), section C
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
)


def test_alpha_of_the_example_of_krippendorff():
    units = [[value for value in unit if value is not None] for unit in zip(*OBSERVERS, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.815, abs=5e-4)  # printed there for the ordinal metric


def test_alpha_by_hand():
    # Values 1 1 | 1 2 | 2 3: n_1 = 3, n_2 = 2, n_3 = 1, n = 6. d(1,2) = (3+2 - 5/2)^2 = 6.25,
    # d(2,3) = (2+1 - 3/2)^2 = 2.25, d(1,3) = (6 - 4/2)^2 = 16. Observed 6.25 + 2.25 = 8.5;
    # expected 3*2*6.25 + 2*1*2.25 + 3*1*16 = 90. alpha = 1 - 5 * 8.5 / 90.
    assert krippendorff_alpha([[1, 1], [1, 2], [2, 3]]) == pytest.approx(1 - 42.5 / 90, rel=1e-12)
    # a unit that one person judged changes nothing; nor does the distance of the values, only their order
    assert krippendorff_alpha([[1, 1], [9], [1, 7], [7, 8]]) == pytest.approx(1 - 42.5 / 90, rel=1e-12)
    # three values in a unit: pairs over m - 1 = 2. n_1 = 3, n_2 = 2, n = 5; d = 6.25; observed 2 * 6.25 / 2;
    # expected 3*2*6.25. The other unit: 1 2. alpha = 1 - 4 * (6.25 + 6.25) / 37.5
    assert krippendorff_alpha([[1, 1, 2], [2, 1]]) == pytest.approx(1 - 50 / 37.5, rel=1e-12)
    assert krippendorff_alpha([[1, 1], [2, 2]]) == 1
    assert isnan(krippendorff_alpha([[1, 1]]))
    assert isnan(krippendorff_alpha([]))


def test_middle_ranks_by_hand():
    assert middle_ranks([1, 1, 2]) == [1.5, 1.5, 3]
    assert middle_ranks([2, 1, 2, 2]) == [3, 1, 3, 3]


def opinion(said):
    return Opinion("ranked", said) if isinstance(said, tuple) else Opinion(said)


def judged(*rows):
    """(item, annotator, ranks or verdict, seconds) as the store gives them."""
    return [
        (
            Judgement(n, 1, item, who, opinion(said), seconds, who, "", False),
            Item(item, "p", ("a", "b", "c"), "m", "d", {}, ""),
        )
        for n, (item, who, said, seconds) in enumerate(rows)
    ]  # fmt: skip


def test_agreement_is_that_of_items_ranked_more_than_once():
    found = agreement_of(
        judged(
            (1, "a", (1, 2, 3), 1), (1, "b", (1, 3, 2), 1), (1, "c", "skipped", 1),
            (2, "a", (1, 2, 3), 1), (2, "b", (1, 1, 1), 1),  # no tau: b prefers nothing
            (3, "a", (3, 2, 1), 1), (4, "b", "all_bad", 1), (4, "a", (1, 2, 3), 1),
        )
    )  # fmt: skip
    assert found.items == 2
    assert found.tau == pytest.approx(1 / 3, rel=1e-12)
    # replies of item 1: (1,1) (2,3) (3,2); of item 2: (1,2) (2,2) (3,2), 2 being the middle of the tie
    assert found.alpha == pytest.approx(krippendorff_alpha([[1, 1], [2, 3], [3, 2], [1, 2], [2, 2], [3, 2]]))
    nothing = agreement_of(judged((1, "a", (1, 2, 3), 1)))
    assert (nothing.items, isnan(nothing.tau), isnan(nothing.alpha)) == (0, True, True)


def test_work_by_person():
    found = work_of(
        judged((1, "b", (1, 2, 3), 4), (2, "b", "skipped", 1), (3, "b", "skipped", 2), (1, "a", "all_bad", 3))
    )
    assert list(found) == ["a", "b"]
    assert (dict(found["b"].verdicts), found["b"].seconds) == ({"ranked": 1, "skipped": 2}, 2)
    assert found["a"].verdicts["ranked"] == 0
