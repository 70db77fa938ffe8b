import pytest

from rlhf_stages.kl_control import AdaptiveKL, FixedKL


def test_a_fixed_coefficient_stays():
    control = FixedKL(0.3)
    control.update(100.0, samples=1_000)
    assert control.coeff == 0.3


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 0.01)),  # 10 % above: error .1, times 100 samples of a horizon of 10,000
        (0.09, 0.5 * (1 - 0.1 * 0.01)),
        (5.0, 0.5 * (1 + 0.2 * 0.01)),  # far above: error clipped at .2
        (0.0, 0.5 * (1 - 0.2 * 0.01)),
        (-3.0, 0.5 * (1 - 0.2 * 0.01)),  # an estimate may be negative
    ],
)
def test_one_update_by_hand(kl, expected):
    control = AdaptiveKL(0.5, target=0.1, horizon=10_000)
    control.update(kl, samples=100)
    assert control.coeff == pytest.approx(expected, rel=1e-12)


def test_updates_compound():
    control = AdaptiveKL(1.0, target=0.1, horizon=100)
    for _ in range(3):
        control.update(1.0, samples=50)  # 1 + .2 * .5
    assert control.coeff == pytest.approx(1.1**3, rel=1e-12)


def test_the_coefficient_keeps_its_sign_when_a_rollout_is_larger_than_the_horizon():
    control = AdaptiveKL(1.0, target=0.1, horizon=10)
    control.update(0.0, samples=128)  # counts as one horizon: 1 - .2
    assert control.coeff == pytest.approx(0.8, rel=1e-12)


def test_it_settles_a_toy_policy_on_the_target():
    # the KL of this policy falls as the coefficient grows: kl = .02 / coeff, so that .1 is reached at .2
    control = AdaptiveKL(1.0, target=0.1, horizon=1_000)
    for _ in range(500):
        control.update(0.02 / control.coeff, samples=100)
    assert control.coeff == pytest.approx(0.2, rel=1e-2)
