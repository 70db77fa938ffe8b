import json
import math
import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from safetensors.torch import load_file
from torch import nn

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs, ModelArgs, TrainArgs
from rlhf_stages.data.info import DataInfo
from rlhf_stages.data.tokenizer import encode_prompt
from rlhf_stages.engines import make_fabric
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.loading import load_causal
from rlhf_stages.plan import epoch_windows

from helpers import (
    ROOT,
    make_tokenizer,
    read_metrics,
    run_stage,
    save_causal,
    toy_rows,
    write_data,
    write_toy_data,
)
from stage_losses import DPO, RM, SFT, STAGES, Actor, Critic, texts, three_steps


@pytest.fixture
def fabric():
    return loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


def test_no_validation_shard_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"no .*preference_validation\.pt: nothing is validated"):
        shard = loop.open_validation(tmp_path, "preference_validation.pt", responses=2, vocab_size=10)
    assert shard is None


def test_prompts_of_their_own_come_before_those_of_fine_tuning(tmp_path):
    assert loop.prompt_shard_name(tmp_path, "validation") == "finetune_validation.pt"
    (tmp_path / "prompt_train.pt").touch()
    assert loop.prompt_shard_name(tmp_path, "validation") == "prompt_validation.pt"


def test_what_is_due():
    assert [step for step in range(1, 8) if loop.is_due(step, 3, total_steps=7)] == [3, 6, 7]
    assert [step for step in range(1, 4) if loop.is_due(step, 500, total_steps=3)] == [3]


def test_padding_by_hand():
    batches = [
        SimpleNamespace(attention_mask=torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()),
        SimpleNamespace(attention_mask=torch.tensor([[1, 1]]).bool()),
    ]
    assert loop.padding(batches).item() == pytest.approx(40.0)  # 4 of 10 places


# Devices


def test_seeds_of_ranks_are_far_apart(monkeypatch):
    seeds = []
    monkeypatch.setattr(loop, "seed_everything", lambda seed, verbose: seeds.append(seed))
    loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=42)
    assert seeds == [42]
    assert loop.SEED_STRIDE == 100_003


@pytest.mark.parametrize(
    ("accelerator", "devices", "what"), [("cuda", "1", "CUDA"), ("nonsense", "1", "nonsense"), ("cpu", "0", "0")]
)
def test_devices_that_are_not_there_are_one_error(accelerator, devices, what):
    if accelerator == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(ValueError, match=f"--accelerator={accelerator} --devices={devices}: .*{what}"):
        loop.start_fabric(FabricArgs(accelerator=accelerator, devices=devices), seed=1)


@pytest.mark.parametrize(
    ("flags", "ddp"),
    [
        ({"devices": "2"}, True),
        ({"devices": "1", "num_nodes": 2}, True),
        ({"devices": "1", "strategy": "ddp"}, True),
        ({"devices": "1"}, False),
        ({"devices": "auto"}, False),
    ],
)
def test_several_devices_do_not_broadcast_buffers(flags, ddp):
    strategy = make_fabric(FabricArgs(accelerator="cpu", **flags)).strategy
    assert isinstance(strategy, DDPStrategy) == ddp
    assert not ddp or strategy._ddp_kwargs == {"broadcast_buffers": False, "gradient_as_bucket_view": True}


# Accumulation


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_the_same_however_it_is_cut(tmp_path, fabric, stage):
    stage = STAGES[stage](tmp_path)
    losses, norms, parameters = three_steps(fabric, stage, [8])
    assert losses[0] != losses[2]
    for sizes in ([1] * 8, [3, 4, 1]):
        other_losses, other_norms, other_parameters = three_steps(fabric, stage, sizes)
        torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(other_norms, norms, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(parameters, other_parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_the_loss_is_the_mean_over_all_tokens(tmp_path, fabric):
    """Against cross-entropy of every text on its own, token by token."""
    stage = SFT(tmp_path)
    total, tokens = 0.0, 0
    for record in texts(8):
        ids = record.sequence()
        logprobs = torch.log_softmax(stage.model(ids[None]).logits[0].double(), -1)
        for place in range(len(record.prompt), len(ids)):
            total -= logprobs[place - 1, ids[place]].item()
            tokens += 1
    losses, _, _ = three_steps(fabric, stage, [5, 3])
    assert losses[0].item() == pytest.approx(total / tokens, rel=1e-5)


def test_the_dpo_loss_is_the_mean_over_all_pairs_of_every_list(tmp_path, fabric):
    """Against each text on its own, token by token."""
    stage = DPO(tmp_path, responses=3)

    def logprob(model, prompt, response):
        logprobs = torch.log_softmax(model(torch.cat([prompt, response])[None]).logits[0].double(), -1)
        places = range(len(prompt), len(prompt) + len(response))
        return sum(logprobs[place - 1, token].item() for place, token in zip(places, response, strict=True))

    losses = []
    for record in texts(8, seed=1, responses=3):
        rewards = [
            0.3 * (logprob(stage.model, record.prompt, text) - logprob(stage.reference, record.prompt, text))
            for text in record.responses
        ]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            right = 1 / (1 + math.exp(rewards[j] - rewards[i]))
            losses.append(-0.9 * math.log(right) - 0.1 * math.log(1 - right))
    assert len(losses) == 24
    assert max(losses) - min(losses) > 0.1
    measured, _, _ = three_steps(fabric, stage, [5, 3])
    assert measured[0].item() == pytest.approx(sum(losses) / 24, rel=1e-5)


def test_weight_scales_the_gradient_and_not_the_loss(tmp_path, fabric):
    stage = Critic(tmp_path)
    losses, norms, _ = three_steps(fabric, stage, [4, 4])
    weighted_losses, weighted_norms, _ = three_steps(fabric, stage, [4, 4], weight=0.1)
    torch.testing.assert_close(weighted_losses[0], losses[0])
    torch.testing.assert_close(weighted_norms[0], 0.1 * norms[0])


class Rank:
    """One of two devices: what the other one brings to each sum is known beforehand."""

    device, world_size = torch.device("cpu"), 2

    def __init__(self, others):
        self.others = iter(others)
        self.brought = []

    def all_reduce(self, value, reduce_op):
        assert reduce_op == "sum"
        self.brought.append(value)
        return value + next(self.others, 0)

    def backward(self, loss, model):
        loss.backward()

    def no_backward_sync(self, model, enabled):
        return nullcontext()


@pytest.mark.parametrize("stage", [SFT, RM, Actor, Critic, DPO])
def test_the_mean_gradient_of_two_ranks_is_that_of_one(tmp_path, stage):
    stage = stage(tmp_path)

    def gradients(fabric, batches):
        stage.model.zero_grad()
        loss, _, _ = loop.accumulate(fabric, stage.model, batches, partial(stage.loss_sum, stage.model), stage.count)
        return loss, [parameter.grad.clone() for parameter in stage.model.parameters()]

    one = Rank([])
    one.world_size = 1
    loss, expected = gradients(one, list(stage.batches([8])))
    halves = [list(stage.batches([2, 3, 3]))[:1], list(stage.batches([2, 3, 3]))[1:]]
    counts = [sum(stage.count(batch) for batch in half) for half in halves]
    assert counts[0] != counts[1]
    parts, brought = [], []
    for half, other in zip(halves, reversed(counts), strict=True):
        rank = Rank([other])
        parts.append(gradients(rank, half)[1])
        brought.append(rank.brought[1])
    torch.testing.assert_close(sum(brought), loss, rtol=1e-5, atol=1e-6)
    for wanted, *both in zip(expected, *parts, strict=True):
        torch.testing.assert_close(sum(both) / 2, wanted, rtol=1e-4, atol=1e-6)


def test_all_but_the_last_micro_batch_skip_the_synchronization(tmp_path):
    stage, enabled = SFT(tmp_path), []

    class Watching(Rank):
        def no_backward_sync(self, model, enabled):
            calls.append(enabled)
            return nullcontext()

    calls = enabled
    batches = list(stage.batches([3, 3, 2]))
    loop.accumulate(Watching([]), stage.model, batches, partial(stage.loss_sum, stage.model), stage.count)
    assert calls == [True, True, False]


def test_a_step_in_which_nothing_counts(fabric):
    model = fabric.setup_module(nn.Linear(2, 1))
    batch = torch.ones(1, 2)
    loss, total, _ = loop.accumulate(fabric, model, [batch], lambda b: (0 * model(b)).sum(), lambda b: torch.tensor(0))
    assert (loss.item(), total.item()) == (0.0, 1)


def layer_of(fabric, lr=1.0):
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.zero_()
    return fabric.setup(layer, torch.optim.Adam(layer.parameters(), lr=lr))


def one(batch):
    return torch.tensor(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_and_is_found(fabric, bad):
    model, optimizer = layer_of(fabric)
    batches = [torch.ones(1, 2), torch.full((1, 2), bad), torch.ones(1, 2)]
    update = loop.update(fabric, model, optimizer, batches, lambda b: model(b.clamp(max=1)).sum() + b.sum(), one, 1.0)
    assert update.fault == f"the loss is {bad}"
    assert update.suspects == (1,)
    assert model.weight[0].tolist() == [0.0, 0.0]
    assert model.weight.grad is None
    assert not optimizer.state  # no moment was updated either


def test_a_gradient_that_is_not_finite_changes_nothing_and_any_sample_may_be_it(fabric):
    model, optimizer = layer_of(fabric)
    root = lambda b: (model(b).sum() + b.sum() - 2).sqrt()  # noqa: E731 (the slope of a root at 0 is infinite)
    update = loop.update(fabric, model, optimizer, [torch.ones(1, 2), torch.ones(1, 2)], root, one, 1.0)
    assert update.loss == 0
    assert update.fault in ("the gradient norm is inf", "the gradient norm is nan")
    assert update.suspects == (0, 1)
    assert model.weight[0].tolist() == [0.0, 0.0]
    assert not optimizer.state


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_fused_optimizer_leaves_the_step_out_by_itself(fabric, bad):
    """Two good steps, with or without a bad one between them, end in the same weights, moments and step count."""
    good = lambda model, b: model(b).sum()  # noqa: E731
    spoiled = {
        "loss": lambda model, b: model(b).sum() * math.nan,
        "gradient": lambda model, b: (model(b).sum() * 0).sqrt(),  # 0, with an infinite slope
    }[bad]
    ends = []
    for steps in (["good", "good"], ["good", "bad", "good"]):
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.data.fill_(0.5)
        model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True))
        for step in steps:
            loss = partial(good if step == "good" else spoiled, model)
            update = loop.update(fabric, model, optimizer, [torch.tensor([[3.0, 4.0]])], loss, one, 1.0)
            assert (update.fault is not None) == (step == "bad")
        ends.append([layer.weight.tolist(), *(t.tolist() for t in optimizer.state[layer.weight].values())])
    assert ends[0] == ends[1]
    assert optimizer.state[layer.weight]["step"] == 2


def test_clipping_by_hand(fabric):
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.zero_()
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    # gradient (3, 4), norm 5
    update = loop.update(fabric, model, optimizer, [torch.tensor([[3.0, 4.0]])], lambda b: model(b).sum(), one, 1.0)
    assert (update.norm.item(), update.fault, update.suspects) == (pytest.approx(5.0), None, ())
    assert model.weight[0].tolist() == pytest.approx([-0.6, -0.8], rel=1e-4)
    assert model.weight.grad is None


@pytest.fixture
def scaled():
    """A Fabric with the loss scale of 16-mixed; on a CPU it has to be given."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    return Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler)), scaler


def test_the_loss_scale_is_taken_off_before_clipping(scaled):
    fabric, scaler = scaled
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.zero_()
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    update = loop.update(fabric, model, optimizer, [torch.tensor([[3.0, 4.0]])], lambda b: model(b).sum(), one, 1.0)
    assert update.norm.item() == pytest.approx(5.0)  # and not 5 * 1024
    assert model.weight[0].tolist() == pytest.approx([-0.6, -0.8], rel=1e-3)
    assert scaler.get_scale() == 1024


def test_an_overflow_lowers_the_scale_and_is_no_fault_until_the_scale_is_1(scaled):
    fabric, scaler = scaled
    model, optimizer = layer_of(fabric)
    root = lambda b: (model(b).float().sum() + b.sum() - 2).sqrt()  # noqa: E731
    for scale in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        update = loop.update(fabric, model, optimizer, [torch.ones(1, 2)], root, one, 1.0)
        assert (update.fault, scaler.get_scale()) == (None, scale)
    update = loop.update(fabric, model, optimizer, [torch.ones(1, 2)], root, one, 1.0)
    assert update.fault in ("the gradient norm is inf", "the gradient norm is nan")
    assert model.weight[0].tolist() == [0.0, 0.0]
    assert not optimizer.state
    # and a good step after it is taken
    assert loop.update(fabric, model, optimizer, [torch.ones(1, 2)], lambda b: model(b).sum(), one, 1.0).fault is None
    assert model.weight[0].tolist() == pytest.approx([-1.0, -1.0], rel=1e-3)


def test_a_bad_loss_under_a_loss_scale(scaled):
    fabric, _ = scaled
    model, optimizer = layer_of(fabric)
    for _ in range(2):  # twice: the scaler must be ready for the next step
        bad = loop.update(fabric, model, optimizer, [torch.ones(1, 2)], lambda b: model(b).sum() * math.nan, one, 1.0)
        assert bad.fault == "the loss is nan"
    assert model.weight[0].tolist() == [0.0, 0.0]


# The experiment folder


@pytest.fixture
def info(tmp_path):
    return DataInfo(tmp_path / "data" / "toy" / "tiny", "toy", "tiny", None, None, True, -1, {"dataset": "toy"})


def open_it(fabric, info, tmp_path, **changes):
    args = TrainArgs(data_dir=str(info.path), log_dir=str(tmp_path / "experiments"), **changes)
    return loop.open_experiment(fabric, args, info, "sft", {"train_args": args}, [])


def test_the_folder_is_named_after_dataset_run_and_stage(fabric, info, tmp_path):
    assert open_it(fabric, info, tmp_path).dir == tmp_path / "experiments" / "toy" / "tiny" / "sft"
    named = open_it(fabric, info, tmp_path, experiment_name="mine")
    assert named.dir == tmp_path / "experiments" / "toy" / "mine" / "sft"


def test_an_existing_run_is_one_error_on_every_process(fabric, info, tmp_path):
    folder = open_it(fabric, info, tmp_path).dir
    with pytest.raises(
        ValueError, match=rf"^{folder} holds a run already; .*--resume, .*--experiment_name.*--overwrite$"
    ):
        open_it(fabric, info, tmp_path)
    follower = SimpleNamespace(
        is_global_zero=False, broadcast=lambda found: (f"{folder} holds a run already", 0, False)
    )
    with pytest.raises(ValueError, match="holds a run already"):
        open_it(follower, info, tmp_path)
    assert open_it(fabric, info, tmp_path, overwrite=True).dir == folder


def test_freeze_is_for_reading_only(fabric, tmp_path):
    model = loop.freeze(fabric, load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()).train())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_single_device_does_not_warn(tmp_path, fabric):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        three_steps(fabric, SFT(tmp_path), [4, 4])


# Two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All stages on two processes; the validation prompts of PPO are fewer than the processes."""
    folder = tmp_path_factory.mktemp("two")
    data = write_toy_data(folder / "toy" / "tiny", held_out=7)
    prompts = [prompt for prompt, _ in toy_rows(24)]
    write_data(data, make_tokenizer(), prompt={"train": prompts, "validation": prompts[:1]})
    save_causal(folder / "model", dropout=0.1)
    script = [sys.executable, str(ROOT / "tests" / "two_processes.py"), str(folder)]
    result = subprocess.run(script, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    return SimpleNamespace(folder=folder, data=data, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_two_processes_is_that_of_one(two, tmp_path, fabric, stage):
    expected = three_steps(fabric, STAGES[stage](tmp_path), [8])
    for losses, norms, parameters in (rank["steps"][stage] for rank in two.ranks):
        torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norms, expected[1], rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(expected[2], parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_devices_with_another_number_of_micro_batches_reduce_once(two, tmp_path, fabric, stage):
    losses, norms, _ = three_steps(fabric, STAGES[stage](tmp_path), [8])
    for loss, norm, reductions in (rank["uneven"][stage] for rank in two.ranks):
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(norm, norms[0], rtol=1e-5, atol=1e-6)
        assert reductions == [0]  # one bucket of gradients, once


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_micro_batches_by_tokens_on_two_processes(two, stage):
    one, other = (read_metrics(two.folder / "two" / "toy" / name / stage) for name in ("tiny", "tokens"))
    assert one.keys() == other.keys()
    clock = ("info/time", "info/elapsed_seconds", "info/tokens_per_seconds", "info/padding_percentage")
    for name in one.keys() - set(clock):
        for step in one[name] if stage == "sft" else (1,):  # what is sampled hangs on the last bits
            assert other[name].get(step) == pytest.approx(one[name].get(step), rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "dpo_lora"])
def test_two_processes_train_as_one_does(two, tmp_path, stage):
    import two_processes

    runs = two.folder / "two" / "toy"
    sft = f"--sft_experiment_dir={runs / 'tiny' / 'sft'}"
    start = {
        "sft": [f"--model_name={two.folder / 'model'}", "--max_new_tokens=4", *two_processes.SFT],
        "rm": [sft, *two_processes.RM],
        "dpo": [sft, *two_processes.DPO],
        "dpo_lora": [sft, *two_processes.DPO_LORA],
    }[stage]
    stage, _, name = stage.partition("_")
    run = run_stage(stage, tmp_path, two.data, *start, "--mini_batch_size=4", "--micro_batch_size=4")
    one, other = read_metrics(run), read_metrics(runs / (name or "tiny") / stage)
    assert one.keys() == other.keys()
    clock = ("info/time", "info/elapsed_seconds", "info/tokens_per_seconds", "info/padding_percentage")
    for name in one.keys() - set(clock):
        # a bias that rounding moves, see below, shifts all scores of a reward model alike
        shifted = stage == "rm" and "reward" in name and not name.endswith(("margin", "std"))
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-3 if shifted else 1e-5), name
    one, other = (
        load_file(resolve_checkpoint(folder) / "model.safetensors") for folder in (run, runs / run.parent.name / stage)
    )
    # the bias of the keys, and in a reward model the last one, which shifts both scores of a pair: their gradient is
    # rounding alone, of which Adam makes whole steps
    rounding = ("c_attn.bias", "ln_f.bias") if stage == "rm" else ("c_attn.bias",)
    for name in one:
        if not name.endswith(rounding):
            torch.testing.assert_close(other[name], one[name], rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_two_processes_hold_the_same_weights_and_different_samples(two):
    for one, other in zip(*(rank["models"] for rank in two.ranks), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    seen = []
    for step in (0, 1):
        parts = [rank["experience"][step] for rank in two.ranks]
        prompts = [
            [tuple(ids[mask].tolist()) for ids, mask in zip(part["prompt_ids"], part["prompt_mask"], strict=True)]
            for part in parts
        ]
        assert [len(part) for part in prompts] == [(8, 4)[step]] * 2  # 12 of the 24 prompts each
        seen += prompts[0] + prompts[1]
        assert parts[0]["response_ids"].tolist() != parts[1]["response_ids"].tolist()
        advantages = [part["advantages"][part["response_mask"]] for part in parts]
        together = torch.cat(advantages)
        assert together.mean().item() == pytest.approx(0, abs=1e-5)
        assert together.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert abs(advantages[0].mean()) > 1e-3  # whitened over both, not each on its own
    assert sorted(seen) == sorted(
        tuple(encode_prompt(make_tokenizer(), prompt)) for prompt, _ in toy_rows(24)
    )  # every prompt once


@pytest.mark.slow
def test_two_processes_log_the_numbers_of_both(two):
    metrics = read_metrics(two.folder / "two" / "toy" / "tiny" / "ppo")
    for step in (1, 2):
        scores = torch.cat([rank["experience"][step - 1]["scores"] for rank in two.ranks])
        assert metrics["train/reward_mean"][step] == pytest.approx(scores.mean().item(), abs=1e-5)
        assert metrics["debug/reward_scores_max"][step] == pytest.approx(scores.max().item(), abs=1e-5)
        assert metrics["debug/reward_scores_std"][step] == pytest.approx(scores.std(correction=0).item(), rel=1e-3)
    assert sorted(metrics["val/reward_mean"]) == [0, 1, 2]  # one prompt: the second process had nothing to validate
    assert abs(metrics["val/kl_sequence"][0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_two_processes_resume_to_the_bit(two, stage):
    one, other = (two.folder / runs / "toy" / "tiny" / stage for runs in ("two", "again"))
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert len(names) > 20
    names = [name for name in names if name.name not in ("args.json", "timing.csv")]
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


@pytest.mark.slow
def test_a_bad_reward_of_one_process_skips_the_step_of_both(two):
    folder = two.folder / "spoiled" / "toy" / "tiny" / "ppo"
    (line,) = map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
    assert line["step"] == 1
    # the first batch of the second process: 5 of its 8 prompts
    theirs = epoch_windows(24, mini=8, micro=5, seed=42, epoch=0, rank=1, world_size=2)[0][0]
    assert line["samples"] == sorted(theirs)
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 1
    assert 1 not in read_metrics(folder)["train/reward_mean"]
    assert 2 in read_metrics(folder)["train/reward_mean"]


@pytest.mark.slow
def test_two_processes_end_with_the_same_error(two):
    messages = [rank["existing"] for rank in two.ranks]
    assert messages[0] == messages[1]
    assert "holds a run already" in messages[0]
