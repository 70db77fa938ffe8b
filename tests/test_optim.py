import math
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

from rlhf_stages import optim
from rlhf_stages.args import TrainArgs
from rlhf_stages.optim import can_fuse, learning_rate_factor, make_optimizer, make_schedule, set_up
from rlhf_stages.state import on_host, read_state, write_state


def model():
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))


def rates(peak, warmup, total):
    """Learning rate of each step of a run, as the optimizer sees it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = make_schedule(optimizer, (peak, "cosine", warmup), total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_learning_rate_by_hand():
    # 3 steps of warm-up at 1/4, 2/4, 3/4 of the peak; then steps 3 to 7 along half a cosine: 0, 1/4, 1/2, 3/4, 1 of
    # the way, (1 + cos) / 2 = 1, .853553, .5, .146447, 0; the floor is 1e-6 / 1e-4 = .01 of the peak
    shares = [0.25, 0.5, 0.75, *(0.01 + 0.99 * share for share in (1, 0.8535534, 0.5, 0.1464466, 0))]
    assert [learning_rate_factor(step, 1e-4, 3, 8) for step in range(8)] == pytest.approx(shares, rel=1e-6)
    assert rates(1e-4, 3, 8) == pytest.approx([1e-4 * share for share in shares], rel=1e-6)


def test_learning_rate_stays_at_the_floor_after_the_last_step():
    for step in (7, 8, 9, 50):
        assert learning_rate_factor(step, 1e-4, 3, 8) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize("peak", [1e-3, 1e-5, 3e-6, 1e-6, 1e-8])
def test_learning_rate_rises_to_the_peak_and_never_again(peak):
    seen = rates(peak, 5, 40)
    assert max(seen) == seen[5] == pytest.approx(peak, rel=1e-12)
    assert seen[:6] == sorted(seen[:6])
    assert seen[5:] == sorted(seen[5:], reverse=True)
    assert seen[-1] == pytest.approx(1e-6 if peak >= 1e-5 else peak / 10, rel=1e-9)
    assert min(seen) > 0


def test_a_warm_up_longer_than_the_run_is_cut_and_the_peak_is_reached():
    with pytest.warns(UserWarning, match="a warm-up of 100 steps is more than half of the 20 steps; 2 are used"):
        seen = rates(1e-4, 100, 20)
    assert seen[:3] == pytest.approx([1e-4 / 3, 2e-4 / 3, 1e-4], rel=1e-9)
    assert seen[-1] == pytest.approx(1e-6, rel=1e-9)


def test_a_warm_up_of_half_the_run_is_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates(1e-4, 10, 20)[10] == 1e-4


def test_runs_of_one_and_two_steps_use_the_peak():
    assert rates(1e-4, 0, 1) == [1e-4]
    assert rates(1e-4, 0, 2) == pytest.approx([1e-4, 1e-6], rel=1e-9)
    with pytest.warns(UserWarning, match="0 are used"):
        assert rates(1e-4, 100, 1) == [1e-4]


def test_a_learning_rate_of_0_is_0():
    assert rates(0.0, 0, 4) == [0.0] * 4


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_only_matrices_decay_and_the_options_arrive(name):
    args = TrainArgs(optimizer=name, weight_decay=0.3, optimizer_eps=1e-5, optimizer_beta1=0.8, optimizer_beta2=0.9)
    optimizer = make_optimizer(model(), args, 0.01)
    assert type(optimizer) is getattr(torch.optim, name)
    decay = {p.shape: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {(2, 3): 0.3, (4, 2): 0.3, (2,): 0.0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 5
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-5)


def test_one_step_of_adamw_by_hand():
    # from 1 with gradient 2 the moments' quotient is 2 / sqrt(4): a step of lr (less eps / 2), and lr * decay for the
    # matrix; Adam's decay would enter the gradient instead and be normalised away
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    optimizer = make_optimizer(layer, TrainArgs(weight_decay=0.5), 0.1)
    layer.weight.grad, layer.bias.grad = torch.full((1, 1), 2.0), torch.full((1,), 2.0)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(1 - 0.1 * 0.5 - 0.1, rel=1e-5)
    assert layer.bias.item() == pytest.approx(1 - 0.1, rel=1e-5)


def steps(optimizer_args, fused=False, count=5, sizes=(80, 60)):
    """Weights after some steps on fixed gradients, and the optimizer."""
    torch.manual_seed(0)
    layer = nn.Linear(*sizes)
    optimizer = make_optimizer(layer, optimizer_args, 0.01, fused)
    for _ in range(count):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()]), optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_fused_optimizer_is_the_same(name):
    args = TrainArgs(optimizer=name, weight_decay=0.3)
    (expected, plain), (found, fused) = steps(args), steps(args, fused=True)
    assert [group["fused"] for group in plain.param_groups] == [None] * 2
    assert [group["fused"] for group in fused.param_groups] == [True] * 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "scaler", "fits"), [("cuda", None, True), ("cuda", "a loss scale", False), ("cpu", None, False)]
)
def test_where_a_fused_optimizer_fits(device, scaler, fits):
    strategy = SimpleNamespace(precision=SimpleNamespace(scaler=scaler))
    assert can_fuse(SimpleNamespace(device=torch.device(device), strategy=strategy)) is fits


def test_on_a_cpu_nothing_is_fused():
    fabric = Fabric(accelerator="cpu", devices=1)
    _, optimizer, _ = set_up(fabric, model(), TrainArgs(), (0.01, "constant", 0), 10)
    assert [group["fused"] for group in optimizer.param_groups] == [None] * 2


def test_eight_bit_moments_without_the_package(monkeypatch):
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"AdamW8bit needs bitsandbytes: pip install 'rlhf_stages\[memory\]'"):
        make_optimizer(model(), TrainArgs(optimizer="AdamW8bit"), 0.01)


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, ModelParallelStrategy])
def test_eight_bit_moments_are_not_for_split_weights(strategy):
    fabric = SimpleNamespace(strategy=strategy.__new__(strategy))
    with pytest.raises(ValueError, match="--optimizer=AdamW8bit does not go with FSDP"):
        set_up(fabric, model(), TrainArgs(optimizer="AdamW8bit"), (0.01, "constant", 0), 10)


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra memory")


@needs_bitsandbytes
def test_eight_bit_moments_are_nearly_those_of_adamw(tmp_path):
    settings = {"weight_decay": 0.3, "optimizer_eps": 1e-6, "optimizer_beta1": 0.8, "optimizer_beta2": 0.9}
    (expected, _), (found, optimizer) = (steps(TrainArgs(optimizer=n, **settings)) for n in ("AdamW", "AdamW8bit"))
    # five steps of at most 0.01; 8 bits in blocks leave a few percent of that
    assert 1e-6 < (found - expected).abs().mean() < 0.002
    assert (found - expected).abs().max() < 0.02
    sizes = {tuple(p.shape): s["state1"].element_size() for p, s in optimizer.state.items()}
    assert sizes == {(60, 80): 1, (60,): 4}  # small tensors keep fp32
    # what is written and read back, as by a resumed run, goes on with the same bits
    write_state(on_host(optimizer.state_dict()), "optimizer", tmp_path)
    going_on = []
    for restore in (False, True):
        again, other = steps(TrainArgs(optimizer="AdamW8bit", **settings), count=5)
        if restore:
            _, other = steps(TrainArgs(optimizer="AdamW8bit", **settings), count=2)
            other.load_state_dict(read_state(tmp_path, "optimizer"))
            with torch.no_grad():
                weight, bias = other.param_groups[0]["params"][0], other.param_groups[1]["params"][0]
                weight.copy_(again[: weight.numel()].view_as(weight))
                bias.copy_(again[weight.numel() :])
        for parameter in (p for group in other.param_groups for p in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        other.step()
        going_on.append([p.detach() for group in other.param_groups for p in group["params"]])
    for one, two in zip(*going_on, strict=True):
        assert torch.equal(one, two)


def test_frozen_parameters_are_left_out():
    frozen = model()
    frozen[0].requires_grad_(False)
    frozen[1].requires_grad_(False)
    optimizer = make_optimizer(frozen, TrainArgs(), 0.01)
    assert [p is frozen[2].weight for group in optimizer.param_groups for p in group["params"]] == [True]


def test_a_model_in_which_nothing_trains_is_refused():
    with pytest.raises(ValueError, match=r"no parameter of the model trains.*--finetune_mode"):
        make_optimizer(model().requires_grad_(False), TrainArgs(), 0.01)


def test_both_halves_of_the_cosine_are_symmetric():
    seen = [learning_rate_factor(step, 1.0, 0, 101) for step in range(101)]
    floor = 1e-6
    for step in range(51):
        assert seen[step] + seen[100 - step] == pytest.approx(1 + floor, rel=1e-9)
    assert seen[25] == pytest.approx(floor + (1 - floor) * math.cos(math.pi / 8) ** 2, rel=1e-9)
