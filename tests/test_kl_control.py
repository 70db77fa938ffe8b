import pytest

from rlhf_stages.kl_control import ErrorKL, FixedKL, HorizonKL, make_kl_control


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
    control = HorizonKL(0.5, target=0.1, horizon=10_000)
    control.update(kl, samples=100)
    assert control.coeff == pytest.approx(expected, rel=1e-12)


def test_updates_compound():
    control = HorizonKL(1.0, target=0.1, horizon=100)
    for _ in range(3):
        control.update(1.0, samples=50)  # 1 + .2 * .5
    assert control.coeff == pytest.approx(1.1**3, rel=1e-12)


def test_the_coefficient_keeps_its_sign_when_a_rollout_is_larger_than_the_horizon():
    control = HorizonKL(1.0, target=0.1, horizon=10)
    control.update(0.0, samples=128)  # counts as one horizon: 1 - .2
    assert control.coeff == pytest.approx(0.8, rel=1e-12)


def test_it_settles_a_toy_policy_on_the_target():
    # the KL of this policy falls as the coefficient grows: kl = .02 / coeff, so that .1 is reached at .2
    control = HorizonKL(1.0, target=0.1, horizon=1_000)
    for _ in range(500):
        control.update(0.02 / control.coeff, samples=100)
    assert control.coeff == pytest.approx(0.2, rel=1e-2)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.05, 1.0),  # on target
        (0.055, 1.01),  # 10 % above: 1 + 0.1 * 0.1
        (0.06, 1.02),  # 20 % above
        (5.0, 1.02),  # far above: the error is clipped to 0.2
        (0.045, 0.99),
        (-1.0, 0.98),
    ],
)
@pytest.mark.parametrize("samples", [1, 1000])
def test_error_controller_moves_by_two_percent_at_most(kl, factor, samples):
    control = ErrorKL(0.2, target=0.05)
    control.update(kl, samples)
    assert control.coeff == pytest.approx(0.2 * factor, rel=1e-9)


def test_ten_saturated_updates_of_the_error_controller():
    control = ErrorKL(0.2, target=0.05)
    for _ in range(10):
        control.update(1.0, samples=4)
    assert control.coeff == pytest.approx(0.2438, abs=1e-4)  # 0.2 * 1.02^10, as OpenRL's


def test_controllers_by_name():
    assert make_kl_control("fixed", 0.3, 6.0, 100) == FixedKL(0.3)
    assert make_kl_control("horizon", 0.3, 6.0, 100) == HorizonKL(0.3, 6.0, 100)
    assert make_kl_control("error", 0.3, 6.0, 100) == ErrorKL(0.3, 6.0)
