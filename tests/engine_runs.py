"""Run by test_engines.py and test_engines_gpu.py under torchrun, as a script: stages under a sharding strategy."""

import copy
import os
import shutil
import sys
from pathlib import Path

import torch

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs, TrainArgs
from rlhf_stages.engines import engine_of

from helpers import run_stage
from stage_losses import STAGES, three_steps

TWO = ["--devices=auto", "--mini_batch_size=2", "--micro_batch_size=1"]
SFT = [
    "--max_steps=3", "--learning_rate=1e-2", "--disable_dropout", "--log_interval=1", "--eval_interval=1",
    "--save_interval=1", "--max_new_tokens=4",
]  # fmt: skip
RM = ["--max_steps=2", "--learning_rate=1e-2", "--disable_dropout", "--log_interval=1", "--loss_type=per_sample"]
PPO = [
    "--max_steps=2", "--rollout_size=8", "--rollout_mini_batch_size=5", "--max_new_tokens=6", "--log_interval=1",
    "--actor_learning_rate=1e-2", "--eval_iters=2", "--save_interval=1", "--normalize_values", "--optimizer_eps=1e-3",
]  # fmt: skip
CRITIC = "--critic_learning_rate=1e-2"

BATCHES = TrainArgs(mini_batch_size=2, micro_batch_size=1)
STEPS = ("sft", "rm", "actor", "critic", "dpo")


def stages(folder, strategy, accelerator):
    """SFT, RM and PPO into `folder/strategy`, and the same again from copies that were cut back."""
    name = Path(strategy).stem
    flags = [*TWO, f"--strategy={strategy}", f"--accelerator={accelerator}"]
    data, runs, again = folder / "toy" / "tiny", folder / name, folder / f"{name}-again"
    model = f"--model_name={folder / 'model'}"
    run_stage("sft", runs, data, model, *flags, *SFT)
    parent = f"--sft_experiment_dir={folder / 'parents' / 'toy' / 'tiny' / 'sft'}"
    rm_parent = f"--rm_experiment_dir={folder / 'parents' / 'toy' / 'tiny' / 'rm'}"
    run_stage("rm", runs, data, parent, *flags, *RM)
    run_stage("ppo", runs, data, parent, rm_parent, *flags, *PPO, CRITIC)
    shared = [parent, rm_parent, "--share_actor_critic", "--experiment_name=shared"]
    run_stage("ppo", runs, data, *shared, *flags, *PPO, "--max_steps=1")
    slots = [parent, rm_parent, "--generator=slots", "--experiment_name=slots", CRITIC]
    run_stage("ppo", runs, data, *slots, *flags, *PPO, "--max_steps=1")
    lora = ["--finetune_mode=lora", "--lora_rank=4", "--lora_alpha=16", "--experiment_name=lora"]
    run_stage("dpo", runs, data, parent, *flags, *lora, "--max_steps=2", "--learning_rate=1e-2", "--max_new_tokens=4")
    if strategy != "ddp":
        fabric = loop.start_fabric(FabricArgs(accelerator=accelerator, strategy=strategy), seed=1)
        if fabric.is_global_zero:
            shutil.copytree(runs, again)
        fabric.barrier()
        run_stage("sft", again, data, model, *flags, *SFT, "--resume=2")
        run_stage("ppo", again, data, parent, rm_parent, *flags, *PPO, CRITIC, "--resume=1")


def make_losses(folder):
    """Models and samples of each loss; before the processes know of each other, since then only the first one saves."""
    return {stage: STAGES[stage](folder / f"{stage}-{os.environ['RANK']}") for stage in STEPS}


def steps(folder, strategy, accelerator, losses):
    """Three optimizer steps of each loss over fixed samples, and two that are not finite."""
    fabric = loop.start_fabric(FabricArgs(accelerator=accelerator, strategy=strategy), seed=42)
    found = {stage: three_steps(fabric, losses[stage], [3, 2, 1, 2]) for stage in STEPS}
    found["spoiled"] = spoiled(fabric, losses["sft"])
    torch.save(found, folder / f"{Path(strategy).stem}-steps-{fabric.global_rank}.pt")
    assert engine_of(fabric).divides_optimizer == (strategy != "ddp")


def spoiled(fabric, stage):
    """Faults of two steps, one with a loss that is not finite and one with such gradients, and what they changed."""
    engine = engine_of(fabric)
    model, optimizer, _ = engine.set_up(
        fabric, copy.deepcopy(stage.model), BATCHES, lambda module: torch.optim.Adam(module.parameters(), lr=0.1)
    )
    before, faults = engine.whole(fabric, model, everywhere=True), []
    for factor, loss in ((1.0, torch.nan), (torch.inf, 0.5)):
        (batch,) = stage.batches([8])
        with engine.accumulating(fabric, model, last=True):
            fabric.backward(stage.loss_sum(model, batch) * factor, model=model)
        faults.append(engine.step(fabric, model, optimizer, torch.tensor(loss, device=fabric.device), 1.0)[1])
    after = engine.whole(fabric, model, everywhere=True)
    return faults, [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]


def deepspeed_on_cpu():
    """Fabric lets DeepSpeed run on GPUs only, while it has a CPU accelerator too."""
    from lightning.fabric.strategies import DDPStrategy, deepspeed

    deepspeed.DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment
    deepspeed.DeepSpeedStrategy.root_device = torch.device("cpu", 0)
    deepspeed._validate_device_index_selection = lambda devices: None


if __name__ == "__main__":
    given, accelerator, *strategies = sys.argv[1:]
    if accelerator == "cpu" and any(strategy not in ("ddp", "fsdp") for strategy in strategies):
        deepspeed_on_cpu()
    losses = make_losses(Path(given))
    for strategy in strategies:
        stages(Path(given), strategy, accelerator)
        steps(Path(given), strategy, accelerator, losses)
