"""Mixed precision in whole runs: fp32 weights, the loss scale, and that it is kept for `--resume`.

What one update does under a loss scale stands in test_loop.py.
"""

import hashlib
from itertools import pairwise

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from safetensors.torch import load_file

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs
from rlhf_stages.experiment import resolve_checkpoint

from helpers import read_metrics, run_stage

SHORT = ["--max_steps=4", "--save_interval=2", "--eval_interval=2", "--log_interval=1"]
SAMPLING = "--max_new_tokens=4"
PPO = [
    "--rollout_size=8", "--rollout_mini_batch_size=4", "--mini_batch_size=4", "--micro_batch_size=2", "--ppo_epochs=1",
    "--actor_learning_rate=1e-3", "--critic_learning_rate=1e-3", "--eval_iters=1", "--epochs=2", SAMPLING,
]  # fmt: skip
LEARN = ["--learning_rate=1e-3", "--lr_warmup_steps=0"]
LOSS = {"sft": "train/loss", "rm": "train/loss", "dpo": "train/loss", "ppo": "train/critic_loss"}
OPTIMIZERS = {"ppo": ("actor_optimizer", "critic_optimizer")}


def go(tiny_run, folder, stage, *more):
    """A short run of a stage; returns the experiment."""
    flags = {
        "sft": [f"--model_name={tiny_run.model}", *LEARN, SAMPLING],
        "rm": [f"--sft_experiment_dir={tiny_run.sft}", *LEARN],
        "dpo": [f"--sft_experiment_dir={tiny_run.sft}", *LEARN, SAMPLING],
        "ppo": [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}", *PPO],
    }[stage]
    return run_stage(stage, folder, tiny_run.data, *SHORT, *flags, *more)


def resume_state(experiment, name, step=4):
    return torch.load(experiment / "checkpoints" / f"step-{step:06}" / "resume" / f"{name}.pt", weights_only=True)


def is_fp32(experiment, stage):
    """The weights and all that the optimizers remember of them."""
    weights = load_file(resolve_checkpoint(experiment) / "model.safetensors").values()
    moments = [
        value
        for name in OPTIMIZERS.get(stage, ("optimizer",))
        for state in resume_state(experiment, name)["state"].values()
        for value in state.values()
    ]
    assert len(moments) > 10
    return {tensor.dtype for tensor in [*weights, *moments]} == {torch.float32}


def digests(experiment):
    """{file: digest} of all that a second run of the same seed writes again."""
    return {
        str(path.relative_to(experiment)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in experiment.rglob("*")
        if path.is_file() and path.parent.name != "logs" and path.name not in ("timing.csv", "args.json")
    }


@pytest.mark.parametrize("stage", ["sft", *(pytest.param(s, marks=pytest.mark.slow) for s in ("rm", "dpo", "ppo"))])
def test_bf16_trains_fp32_weights(tiny_run, tmp_path, stage):
    runs = {p: go(tiny_run, tmp_path / p, stage, f"--precision={p}") for p in ("bf16-mixed", "32-true")}
    step = 2 if stage == "dpo" else 1  # DPO begins at ln 2 in any precision
    losses = {p: read_metrics(run)[LOSS[stage]][step] for p, run in runs.items()}
    assert losses["bf16-mixed"] != losses["32-true"]  # it computes in bf16 indeed: eight bits of precision
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.2 if stage == "ppo" else 0.03)
    assert is_fp32(runs["bf16-mixed"], stage)
    assert not (runs["bf16-mixed"] / "skipped.jsonl").exists()


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"^--precision=16-mixed needs a GPU; .*--precision=bf16-mixed"):
        loop.start_fabric(FabricArgs(accelerator="cpu", devices="1", precision="16-mixed"), seed=1)


@pytest.fixture
def with_loss_scale(monkeypatch):
    """Runs on the CPU with the loss scale of 16-mixed; returns the scale that each update left behind.

    The scale starts where gradients overflow, so that the first step of a run is left out.
    """
    scales = []
    step = loop.update

    def start(args, seed):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2, backoff_factor=2.0**-20)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
        fabric.seed_everything(seed, verbose=False)
        return fabric

    def stepping(fabric, *rest, **more):
        done = step(fabric, *rest, **more)
        scales.append((fabric.strategy.precision.scaler.get_scale(), done.fault))
        return done

    monkeypatch.setattr(loop, "start_fabric", start)
    monkeypatch.setattr(loop, "update", stepping)
    return scales


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_run_finds_its_loss_scale_and_resumes_with_it(tiny_run, tmp_path, with_loss_scale, stage):
    experiment = go(tiny_run, tmp_path, stage)
    scales = [scale for scale, _ in with_loss_scale]
    assert scales[0] < 2.0**30  # an overflow ...
    assert any(later > earlier for earlier, later in pairwise(scales))  # ... and growth
    assert {fault for _, fault in with_loss_scale} == {None}  # neither is a fault
    assert not (experiment / "skipped.jsonl").exists()
    assert is_fp32(experiment, stage)
    assert resume_state(experiment, "precision")["scale"] == scales[-1]
    assert resume_state(experiment, "precision", step=2)["scale"] != 2.0**30
    undisturbed = digests(experiment)
    with_loss_scale.clear()
    assert go(tiny_run, tmp_path, stage, "--resume=2") == experiment
    assert [scale for scale, _ in with_loss_scale] == scales[len(scales) // 2 :]
    assert digests(experiment) == undisturbed


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo"])
def test_mixed_precision_on_a_gpu(tiny_run, tmp_path, stage, precision):
    flags = ["--accelerator=cuda", f"--precision={precision}", "--deterministic"]
    experiment = go(tiny_run, tmp_path, stage, *flags)
    assert is_fp32(experiment, stage)
    assert not (experiment / "skipped.jsonl").exists()
    undisturbed = digests(experiment)
    go(tiny_run, tmp_path, stage, *flags, "--resume=2")
    assert digests(experiment) == undisturbed
