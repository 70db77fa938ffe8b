"""Run by test_loop.py as a script: all stages on two gloo processes, and what each process held of them."""

import copy
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs
from rlhf_stages.keeper import Keeper
from rlhf_stages.models.actor_critic import policy_of
from rlhf_stages.rewards import learned
from rlhf_stages.rollout import experience as rollout_experience

from helpers import run_stage
from stage_losses import STAGES, three_steps

# with --mini_batch_size=4 --micro_batch_size=4 on one process the steps see the same samples
TWO = ["--devices=2", "--strategy=ddp", "--mini_batch_size=2", "--micro_batch_size=1"]
SFT = [
    "--max_steps=3",
    "--learning_rate=1e-2",
    "--disable_dropout",
    "--log_interval=2",
    "--eval_interval=2",
    "--save_interval=1",
]
RM = [*SFT, "--loss_type=per_sample"]
DPO = [
    "--max_steps=3", "--learning_rate=1e-2", "--log_interval=1", "--eval_interval=2", "--max_new_tokens=4",
]  # fmt: skip
DPO_LORA = [*DPO, "--finetune_mode=lora", "--lora_rank=4", "--lora_alpha=16", "--experiment_name=lora"]
PPO = [
    "--max_steps=2", "--rollout_size=8", "--rollout_mini_batch_size=5", "--max_new_tokens=6", "--log_interval=1",
    "--actor_learning_rate=1e-2", "--critic_learning_rate=1e-2", "--eval_iters=1", "--save_interval=1",
    "--normalize_values",
]  # fmt: skip


TOKENS = [  # and one process then sees as many micro-batches as the other
    "--devices=2", "--strategy=ddp", "--mini_batch_size=2", "--micro_batch_tokens=60", "--experiment_name=tokens",
]  # fmt: skip


def uneven_step(fabric, stage):
    """Loss and gradient norm of a step in which this process has three micro-batches or one; and the reductions."""
    model = copy.deepcopy(stage.model)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reductions = []

    def counting(group, bucket):
        reductions.append(bucket.index())
        return allreduce_hook(group, bucket)

    model._forward_module.register_comm_hook(None, counting)
    batches = list(stage.batches([1, 2, 1, 4]))
    mine = batches[:3] if fabric.global_rank == 0 else batches[3:]
    update = loop.update(fabric, model, optimizer, mine, partial(stage.loss_sum, model), stage.count, 1.0)
    return update.loss, update.norm, reductions


def main(folder):
    """Run SFT, RM, PPO and DPO; leave `rank<r>.pt` with each process's models and experience."""
    # before the processes know of each other: transformers saves on the first one only
    rank = os.environ.get("LOCAL_RANK", "0")
    stages = {name: stage(folder / f"{name}{rank}") for name, stage in STAGES.items()}
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="2", strategy="ddp"), seed=42)
    held = {"models": [], "experience": []}
    end_step, make = Keeper.end_step, rollout_experience.make_experience

    def ending(keeper, step, quality):
        if step == keeper._total_steps:
            model = policy_of(keeper._models[""])
            held["models"].append({name: weight.clone() for name, weight in model.state_dict().items()})
        end_step(keeper, step, quality)

    def making(*args):
        experience = make(*args)
        held["experience"].append({**vars(experience.rollout), **vars(experience), "rollout": None})
        return experience

    Keeper.end_step, rollout_experience.make_experience = ending, making
    data, model, runs = folder / "toy" / "tiny", folder / "model", folder / "two"
    sft = run_stage("sft", runs, data, f"--model_name={model}", *TWO, *SFT, "--max_new_tokens=4")
    rm = run_stage("rm", runs, data, f"--sft_experiment_dir={sft}", *TWO, *RM)
    run_stage("ppo", runs, data, f"--sft_experiment_dir={sft}", f"--rm_experiment_dir={rm}", *TWO, *PPO)
    for flags in (DPO, DPO_LORA):
        run_stage("dpo", runs, data, f"--sft_experiment_dir={sft}", *TWO, *flags)
    # the same again from a copy that was cut back
    again = folder / "again"
    if fabric.is_global_zero:
        shutil.copytree(runs, again)
    fabric.barrier()
    run_stage("sft", again, data, f"--model_name={model}", *TWO, *SFT, "--max_new_tokens=4", "--resume=2")
    parents = [f"--sft_experiment_dir={sft}", f"--rm_experiment_dir={rm}"]
    run_stage("ppo", again, data, *parents, *TWO, *PPO, "--resume=1")
    # rewards that are not finite, at the first step of the second process only
    end_scores, calls = learned.end_scores, []

    def spoiled(*args):
        calls.append(1)
        scores = end_scores(*args)
        return scores * torch.nan if rank == "1" and len(calls) == 1 else scores

    learned.end_scores = spoiled
    run_stage("ppo", folder / "spoiled", data, *parents, *TWO, *PPO)
    learned.end_scores = end_scores
    held["steps"] = {name: three_steps(fabric, stage, [3, 2, 1, 2]) for name, stage in stages.items()}
    held["uneven"] = {name: uneven_step(fabric, stage) for name, stage in stages.items()}
    run_stage("sft", runs, data, f"--model_name={model}", *TOKENS, *SFT, "--max_new_tokens=4")
    run_stage("ppo", runs, data, *parents, *TOKENS, *PPO)
    try:
        run_stage("rm", runs, data, f"--sft_experiment_dir={sft}", *TWO, *RM)
    except ValueError as error:
        held["existing"] = str(error)
    torch.save(held, folder / f"rank{fabric.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
