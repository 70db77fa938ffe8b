"""Recorded updates are those that are not recorded."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs, PPOArgs
from rlhf_stages.data.collate import Width
from rlhf_stages.graphs import CudaRecorder, Graphs, capture, map_tensors
from rlhf_stages.rollout.collect import Fit

from helpers import read_metrics, run_stage
from stage_losses import Actor, Critic


class Again:
    """Stands for a CUDA graph on the CPU: the same work on the same tensors, into the same tensors."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, work):
        self.recorded += 1
        loss, statistics = work()

        def replay():
            new, others = work()
            loss.copy_(new)
            for name, value in others.items():
                statistics[name].copy_(value)

        return (loss, statistics), replay


class Unasked(TorchDispatchMode):
    """On the CPU: refuses what a CUDA graph could not hold, since the host would wait for the device or feed it."""

    waiting = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "lift_fresh"})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.waiting or by_mask:
            raise RuntimeError(f"{name} cannot be recorded")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fabric():
    return loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


def prepared(stage, fabric):
    stage.model = fabric.setup(stage.model)
    return stage


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [Actor, Critic])
def test_a_replayed_update_has_the_gradient_of_the_plain_one(tmp_path, fabric, kind):
    stage = prepared(kind(tmp_path), fabric)
    fit, record = Fit(3, Width(64, 16), Width(64, 16)), Again()
    graphs = Graphs(record, pytest.fail)
    loss_sum = partial(stage.loss_sum, stage.model)
    for windows in ([[0, 1, 2], [3, 4, 5], [6, 7]], [[7, 3, 1], [0]]):  # the second time all has been recorded
        plain = [stage.experience.select(rows) for rows in windows]
        stage.model.zero_grad()
        expected_loss, total, outcomes = loop.accumulate(fabric, stage.model, plain, loss_sum, stage.count)
        expected = gradients(stage.model)
        stage.model.zero_grad()
        fitted = [stage.experience.select(rows, fit) for rows in windows]
        loss, count, replayed = loop.accumulate(fabric, stage.model, fitted, loss_sum, stage.count, graphs=graphs)
        assert count == total
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close([part for part, _ in replayed], [part for part, _ in outcomes])
        found = gradients(stage.model)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        if record.recorded == 1:
            first = {name: p.grad.data_ptr() for name, p in stage.model.named_parameters() if p.grad is not None}
    assert record.recorded == len({tuple(b.rollout.texts.ids.shape) for b in fitted})
    assert first == {name: p.grad.data_ptr() for name, p in stage.model.named_parameters() if p.grad is not None}


def test_a_new_shape_is_recorded_and_what_was_returned_stays(tmp_path, fabric):
    """A replay writes over its own outcome, not over what was given away."""
    weight = torch.nn.Linear(1, 1, bias=False)
    record = Again()
    graphs = Graphs(record, pytest.fail)

    def work(batch, total):
        loss = (weight.weight * batch.rewards).sum()
        (loss / total).backward()
        return loss.detach(), {"size": batch.rewards.sum()}

    batches = [Actor(tmp_path).experience.select(rows) for rows in ([0, 1], [1, 2], [3])]
    graphs.clear_gradients(weight)
    given = [graphs("name", work, batch, torch.tensor(2.0)) for batch in batches]
    sums = [batch.rewards.sum() for batch in batches]
    torch.testing.assert_close([loss for loss, _ in given], [(weight.weight * s).sum().detach() for s in sums])
    torch.testing.assert_close([statistics["size"] for _, statistics in given], sums)
    torch.testing.assert_close(weight.weight.grad, (sum(sums) / 2).reshape(1, 1))
    shapes = {batch.rollout.texts.ids.shape + batch.rewards.shape for batch in batches}
    assert record.recorded == len(shapes)


def test_what_cannot_be_recorded_is_run_as_it_is(tmp_path, fabric):
    stage, lines = prepared(Actor(tmp_path), fabric), []

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    graphs = Graphs(refuse, lines.append)
    batches, loss_sum = list(stage.batches([4, 4])), partial(stage.loss_sum, stage.model)
    stage.model.zero_grad()
    expected, _, _ = loop.accumulate(fabric, stage.model, batches, loss_sum, stage.count)
    wanted = gradients(stage.model)
    loss, _, _ = loop.accumulate(fabric, stage.model, batches, loss_sum, stage.count, graphs=graphs)
    assert loss == expected
    assert all(torch.equal(gradients(stage.model)[name], gradient) for name, gradient in wanted.items())
    assert set(lines) == {"--cuda_graphs: not recorded, operation not permitted when stream is capturing"}


def test_models_that_take_turns_share_the_memory_of_gradients_and_one_alone_does_not():
    actor, critic = (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2))
    graphs = Graphs(Again(), pytest.fail)
    places = []
    for model in (actor, critic, actor):
        graphs.clear_gradients(model)
        places.append([p.grad.data_ptr() for p in model.parameters()])
        assert len(set(places[-1])) == 4
        model(torch.ones(1, 2)).sum().backward()
        assert any(p.grad.any() for p in model.parameters())
        graphs.clear_gradients(model)
        assert not any(p.grad.any() for p in model.parameters())
        model.zero_grad()
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        ("sft", []),
        *[("rm", [f"--loss_type={kind}"]) for kind in ("per_sample", "average")],
        ("rm", ["--loss_type=last_token", "--center_rewards_coeff=0.01"]),
        ("dpo", []),
        ("dpo", ["--use_masked_targets=False"]),
        ("ppo", ["--entropy_coeff=0.01", "--kl_loss_coeff=0.1", "--normalize_values"]),
        ("ppo", ["--share_actor_critic", "--value_loss=huber"]),
    ],
)
def test_no_loss_asks_the_device_anything(tmp_path, tiny_run, monkeypatch, stage, flags):
    def record(work):
        with Unasked():
            return Again()(work)

    monkeypatch.setattr(loop, "make_graphs", lambda fabric, args: Graphs(record, pytest.fail))
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    start = {"sft": [f"--model_name={tiny_run.model}"], "ppo": [f"--rm_experiment_dir={tiny_run.rm}"]}.get(stage, [])
    start += [] if stage == "sft" else [f"--sft_experiment_dir={tiny_run.sft}"]
    sizes = ["--mini_batch_size=8", "--micro_batch_size=4", "--max_steps=1", "--cuda_graphs"]
    sizes += [] if stage == "rm" else ["--max_new_tokens=4"]
    sizes += ["--rollout_size=8", "--rollout_mini_batch_size=8"] if stage == "ppo" else []
    run_stage(stage, tmp_path, tiny_run.data, *start, *sizes, *flags)


def test_cuda_graphs_need_one_gpu(fabric):
    with pytest.raises(ValueError, match="one GPU"):
        loop.make_graphs(fabric, PPOArgs(sft_experiment_dir="", rm_experiment_dir="", cuda_graphs=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Actor, Critic])
def test_a_graph_has_the_gradient_of_the_plain_update(tmp_path, kind):
    fabric = loop.start_fabric(FabricArgs(accelerator="cuda", devices="1"), seed=1)
    stage = prepared(kind(tmp_path), fabric)
    model, experience = stage.model, map_tensors(stage.experience, Tensor.cuda)
    graphs = Graphs(CudaRecorder(), pytest.fail)
    loss_sum = partial(stage.loss_sum, model)
    for windows in ([[0, 1, 2], [3, 4, 5], [6, 7]], [[7, 3, 1], [0]]):
        model.zero_grad()
        plain = [experience.select(rows) for rows in windows]
        expected_loss, _, _ = loop.accumulate(fabric, model, plain, loss_sum, stage.count)
        expected = gradients(model)
        model.zero_grad()
        fitted = [experience.select(rows, Fit(3, Width(64, 16), Width(64, 16))) for rows in windows]
        loss, _, _ = loop.accumulate(fabric, model, fitted, loss_sum, stage.count, graphs=graphs)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-3, atol=1e-5)
        found = gradients(model)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
def test_random_numbers_go_on_where_nothing_could_be_recorded():
    torch.manual_seed(0)
    ones = torch.ones(4, device="cuda")
    expected = torch.rand(2, device="cuda")
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        capture(lambda: ones.sum().item())
    torch.testing.assert_close(torch.rand(2, device="cuda"), expected)
    with pytest.raises(RuntimeError):
        capture(lambda: torch.rand(2, device="cuda").sum().item())
    assert not torch.equal(torch.rand(2, device="cuda"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [[], ["--gradient_checkpointing"], ["--compile"]])
def test_a_run_with_cuda_graphs_is_the_run_without(tmp_path, tiny_run, flags):
    """KL coefficient, scale of values, and learning rates change from step to step."""
    sizes = ["--rollout_size=8", "--rollout_mini_batch_size=8", "--mini_batch_size=8", "--micro_batch_size=4"]
    flags = [*flags, *sizes, f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}"]
    flags += ["--max_steps=4", "--max_new_tokens=8", "--adaptive_kl_coeff", "--normalize_values", "--log_interval=1"]
    flags += ["--accelerator=cuda", "--ppo_epochs=2", "--actor_learning_rate=1e-3", "--critic_learning_rate=1e-3"]
    of_run = {
        graphs: read_metrics(run_stage("ppo", tmp_path / str(graphs), tiny_run.data, f"--cuda_graphs={graphs}", *flags))
        for graphs in (False, True)
    }
    for name in ("train/actor_loss", "train/critic_loss", "info/approx_kl", "info/kl_coeff", "train/kl_div_mean"):
        assert of_run[True][name] == pytest.approx(of_run[False][name], rel=0.05, abs=2e-3), name


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_every_stage_can_be_recorded(tmp_path, tiny_run, stage, capfd):
    start = {"dpo": [f"--sft_experiment_dir={tiny_run.sft}"]}.get(stage, [f"--model_name={tiny_run.model}"])
    sizes = ["--mini_batch_size=4", "--micro_batch_size=2", "--max_steps=4", "--log_interval=1", "--accelerator=cuda"]
    sizes += ["--disable_dropout"]  # or the two would draw other masks
    sizes += [] if stage == "rm" else ["--max_new_tokens=4"]
    of_run = {
        graphs: read_metrics(
            run_stage(stage, tmp_path / str(graphs), tiny_run.data, f"--cuda_graphs={graphs}", *start, *sizes)
        )
        for graphs in (False, True)
    }
    assert "not recorded" not in "".join(capfd.readouterr())
    assert of_run[True]["train/loss"] == pytest.approx(of_run[False]["train/loss"], rel=0.02, abs=2e-3)
