"""FSDP2 and DeepSpeed over NCCL on two GPUs, beside DDP: the same runs as test_engines.py has on gloo."""

from importlib.util import find_spec

import pytest
import torch
from test_engines import RUNS, ZERO_FILE, assert_same_runs, torchrun, write_parents
from transformers import AutoModelForCausalLM

from rlhf_stages.experiment import resolve_checkpoint

from helpers import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ENGINES = ("fsdp", "deepspeed_stage_2", "deepspeed_stage_2_offload", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the runs start from, and every stage under DDP."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device: two of them")
    folder = tmp_path_factory.mktemp("sharded")
    write_parents(folder)
    (folder / "zero3.json").write_text(ZERO_FILE)
    torchrun(folder, "ddp", accelerator="cuda")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder):
    """Every stage on two GPUs that share weights or optimizers."""
    if request.param != "fsdp" and find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")
    torchrun(folder, str(folder / "zero3.json") if request.param == "zero3" else request.param, accelerator="cuda")
    return request.param


@pytest.mark.parametrize("stage", ["sft", "rm", "actor", "critic", "dpo"])
def test_a_sharded_step_is_that_of_ddp(folder, engine, stage):
    for rank in (0, 1):
        ours, theirs = (
            torch.load(folder / f"{name}-steps-{rank}.pt", weights_only=True, map_location="cpu")
            for name in ("ddp", engine)
        )
        for one, other in zip(ours[stage][:2], theirs[stage][:2], strict=True):
            torch.testing.assert_close(other, one, rtol=2e-3, atol=1e-4)  # TF32
        for one, other in zip(ours[stage][2], theirs[stage][2], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
        faults, changes = theirs["spoiled"]
        assert all(faults)
        assert max(changes) == 0


@pytest.mark.parametrize("run", [run for run in RUNS if "ppo" not in run])
def test_a_sharded_run_is_that_of_ddp(folder, engine, run):
    assert_same_runs(folder / "ddp" / "toy" / run, folder / engine / "toy" / run, tolerance=2e-2)


@pytest.mark.parametrize("run", ["tiny/ppo", "shared/ppo", "slots/ppo"])
def test_ppo_samples_and_learns(folder, engine, run):
    """Where rounding decides a token, the rest of a response is another one: only the first numbers agree."""
    one, other = (read_metrics(folder / name / "toy" / run) for name in ("ddp", engine))
    assert one.keys() == other.keys()
    assert other["val/kl_sequence"][0] == pytest.approx(0, abs=1e-2)
    assert all(abs(value) < 100 for value in other["train/actor_loss"].values())


@pytest.mark.parametrize("run", ["tiny/sft", "tiny/ppo"])
def test_a_resumed_run_goes_on_as_if_undisturbed(folder, engine, run):
    one, other = (read_metrics(folder / name / "toy" / run) for name in (engine, f"{engine}-again"))
    last = max(one["info/grad_norm" if "sft" in run else "info/actor_grad_norm"])
    for name in ("train/loss", "val/loss") if "sft" in run else ("train/reward_mean", "train/actor_loss"):
        assert other[name][last] == pytest.approx(one[name][last], rel=2e-2, abs=2e-3), name
    AutoModelForCausalLM.from_pretrained(resolve_checkpoint(folder / f"{engine}-again" / "toy" / run))
