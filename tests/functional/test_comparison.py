import math

import pytest

from rlhf_stages.functional.comparison import sign_test, wilson_interval

Z = 1.959963984540054  # 97.5 % of a normal distribution lie below


@pytest.mark.parametrize(("wins", "count"), [(8, 10), (1, 3), (50, 100), (311, 500), (1, 1000)])
def test_the_ends_of_the_interval_solve_wilsons_equation(wins, count):
    low, high = wilson_interval(wins, count)
    assert 0 < low < wins / count < high < 1
    for p in (low, high):
        assert abs(wins / count - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / count), rel=1e-9)


def test_known_intervals():
    # z^2 = 3.8414588; without a win the ends are 0 and z^2 / (10 + z^2) = 3.8414588 / 13.8414588
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-7)
    assert wilson_interval(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-7)
    assert all(map(math.isnan, wilson_interval(0, 0)))
    wide, narrow = wilson_interval(8, 10, 0.99), wilson_interval(8, 10, 0.9)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (8, 2, 0.109375),  # 2 (1 + 10 + 45) / 1024
        (2, 8, 0.109375),
        (9, 1, 0.021484375),  # 2 (1 + 10) / 1024
        (10, 0, 0.001953125),  # 2 / 1024
        (5, 5, 1.0),  # both tails share the middle
        (3, 2, 1.0),
        (0, 0, 1.0),
        (1, 0, 1.0),
    ],
)
def test_the_sign_test_by_hand(wins, losses, p):
    assert sign_test(wins, losses) == p


def test_the_sign_test_of_many():
    # 1000 tosses are close to normal, with a correction of a half for steps of one
    assert sign_test(540, 460) == pytest.approx(math.erfc((40 - 0.5) / math.sqrt(250) / math.sqrt(2)), rel=0.01)
    assert sign_test(6000, 6000) == 1.0  # 2^12000 is no float
