"""Four and eight gloo processes against one: single steps, and runs of SFT, RM and PPO, under DDP and FSDP2.

A step sees the same samples however many processes there are: the mini-batch of each is smaller by as much.
"""

import os
import subprocess
import sys

import many_processes
import pytest
import torch
from safetensors.torch import load_file

from rlhf_stages import loop, plan
from rlhf_stages.args import FabricArgs
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.rollout.generators import HuggingFaceGenerator

from helpers import ROOT, read_metrics, save_causal, write_toy_data
from stage_losses import STAGES, three_steps

plan_windows = plan.epoch_windows
# one process makes the runs that all of these look at
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


def windows_of_eight(count, *, mini, micro, seed, epoch, **_):
    """What eight devices see in each step, as one: the records that fill up the last step come twice there."""
    ranks = [
        plan_windows(count, mini=mini // 8, micro=1, seed=seed, epoch=epoch, rank=rank, world_size=8)
        for rank in range(8)
    ]
    return [[[row for rank in step for part in rank for row in part]] for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """21 records to train on, which neither 4 nor 8 divides, and 9 to validate on; and the runs of one process."""
    folder = tmp_path_factory.mktemp("processes")
    write_toy_data(folder / "toy" / "tiny", train=21, held_out=9)
    save_causal(folder / "model", dropout=0.1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HuggingFaceGenerator, "__call__", many_processes.answers)
        patched.setattr(plan, "epoch_windows", windows_of_eight)
        assert many_processes.stages(folder, "one", 1, *many_processes.EVERY) == {}
        assert many_processes.stages(folder, "one-few", 1, *many_processes.FEW) == {}
    return folder


@pytest.fixture(scope="module", params=[4, 8])
def processes(request, folder):
    """All runs and steps on so many processes."""
    script = [sys.executable, str(ROOT / "tests" / "many_processes.py"), str(folder), str(request.param)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    result = subprocess.run(script, capture_output=True, text=True, timeout=500, env=env, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return request.param


def held(folder, processes):
    """What each process has left."""
    return [torch.load(folder / f"{processes}-{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_is_that_of_one_process(folder, processes, tmp_path, stage):
    """Every process has another number of tokens, so that a mean of their means is another loss.

    Losses, norms and weights are fp32 sums of the same numbers in another order. The largest differences seen: 2e-6 of
    a loss (and 1e-6 of its size), 1e-4 of a norm of 150 (again 1e-6 of it), 1e-7 of a weight, its last bit.
    """
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)
    losses, norms, parameters = three_steps(fabric, STAGES[stage](tmp_path), [8])
    ranks = held(folder, processes)
    for strategy in (name for name, stages in many_processes.STEPS.items() if stage in stages):
        for found in (rank[strategy] for rank in ranks):
            torch.testing.assert_close(found[stage][0], losses, rtol=5e-6, atol=1e-6)
            torch.testing.assert_close(found[stage][1], norms, rtol=5e-6, atol=1e-6)
            for theirs, ours in zip(found[stage][2], parameters, strict=True):
                torch.testing.assert_close(theirs, ours, rtol=0, atol=5e-7)


# clocks, and what hangs on how a step is cut: the padding, and what compares the responses of one device
NOT_COMPARED = (
    *("info/time", "info/elapsed_seconds", "info/tokens_per_seconds", "info/padding_percentage"),
    *("info/ppo_time", "info/rollout_time", "info/generation_time", "health/duplicate_percentage", "health/distinct_2"),
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("stage", ["sft", "rm", "ppo"])
def test_a_run_is_that_of_one_process(folder, processes, strategy, stage):
    """Metrics and weights of three steps, the last of them with records that come twice; validation included.

    In PPO the responses are fixed, see `many_processes.answers`. All else is as in any run: scores are scaled and
    advantages whitened over all processes, values normalized, and the KL coefficient follows the KL of all.
    """
    one = folder / ("one-few" if strategy == "ddp" else "one") / "toy" / "tiny" / stage
    other = folder / f"{strategy}{processes}" / "toy" / "tiny" / stage
    metrics, theirs = read_metrics(one), read_metrics(other)
    assert metrics.keys() == theirs.keys()
    assert {"sft": "train/loss", "rm": "train/loss", "ppo": "info/kl_coeff"}[stage] in metrics
    for name in metrics.keys() - set(NOT_COMPARED):
        # a bias of the reward model that rounding alone moves, see below, shifts all of its scores alike: by 4e-5
        shifted = stage == "rm" and "reward" in name and not name.endswith(("margin", "std"))
        # 1e-5: ten times the largest relative difference; 1e-6: of what is 0 but for rounding, as a whitened mean is
        assert theirs[name] == pytest.approx(metrics[name], rel=1e-5, abs=2e-4 if shifted else 1e-6), name
    weights, others = (load_file(resolve_checkpoint(run) / "model.safetensors") for run in (one, other))
    assert weights.keys() == others.keys()
    for name in weights:
        # the bias of attention keys, and the last one in a reward model: their gradient is rounding alone, of which
        # Adam makes steps; others it leads apart by 4e-6 at most, where a gradient is hardly more than that
        if stage == "ppo" or not name.endswith(("c_attn.bias", "ln_f.bias")):
            torch.testing.assert_close(others[name], weights[name], rtol=0, atol=2e-5)


def test_fewer_records_to_validate_on_than_processes_are_refused_where_weights_are_divided(folder, processes):
    """By a sentence on every process and before anything is written; that DDP works with three the runs above show."""
    for errors in (rank["errors"] for rank in held(folder, processes)):
        assert errors.keys() == {"sft", "rm", "dpo", "classifier", "ppo"}
        for message in errors.values():
            assert message.startswith(
                f"there are 3 records to validate on, and the weights are divided over {processes}"
            )
    assert not (folder / f"refused{processes}").exists()
