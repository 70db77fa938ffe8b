import pytest
import torch

from rlhf_stages.functional.masking import moments
from rlhf_stages.value_norm import ValueNorm


def of(*values):
    tensor = torch.tensor(values)
    return moments(tensor, torch.ones(len(values), dtype=torch.bool))


def test_before_the_first_update_nothing_changes():
    values = torch.tensor([1.0, -3.0])
    assert torch.equal(ValueNorm().normalize(values), values)
    assert torch.equal(ValueNorm().denormalize(values), values)


def test_the_first_update_counts_fully():
    norm = ValueNorm(beta=0.99)
    norm.update(of(8.0, 12.0))  # mean 10, deviation 2: no pull towards 0
    assert norm.normalize(torch.tensor([10.0, 14.0])).tolist() == pytest.approx([0.0, 2.0])
    assert norm.denormalize(torch.tensor([0.0, 2.0])).tolist() == pytest.approx([10.0, 14.0])


def test_later_updates_weigh_by_beta_and_not_by_size():
    norm = ValueNorm(beta=0.5)
    norm.update(of(0.0))
    norm.update(of(3.0, 3.0, 3.0))
    # weights 1/4 and 1/2 of the sums: mean (0 / 4 + 3 / 2) / (3 / 4) = 2; squares 4.5 / .75 = 6: variance 2
    assert norm.normalize(torch.tensor([2.0])).item() == pytest.approx(0.0, abs=1e-6)
    assert norm.denormalize(torch.tensor([1.0])).item() == pytest.approx(2 + 2**0.5)


def test_equal_returns_do_not_divide_by_zero():
    norm = ValueNorm()
    norm.update(of(5.0, 5.0))
    assert norm.normalize(torch.tensor([6.0])).item() == pytest.approx(1.0)


def test_there_and_back():
    norm = ValueNorm()
    norm.update(of(1.0, 2.0, 7.0))
    values = torch.randn(4, 3)
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)
