"""Run by test_processes.py as a script: stages and single steps on several gloo processes, under DDP and FSDP2."""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs
from rlhf_stages.rollout.generation import Responses
from rlhf_stages.rollout.generators import HuggingFaceGenerator

from helpers import right_padded, run_stage
from stage_losses import STAGES, three_steps

STEPS = {"ddp": tuple(STAGES), "fsdp": ("sft", "rm", "actor", "critic")}
SAMPLES = 8  # of a step, over all processes
COMMON = ["--max_steps=3", "--log_interval=1", "--eval_interval=3", "--seed=1"]
LEARNING = [*COMMON, "--learning_rate=1e-2", "--disable_dropout"]
FLAGS = {
    "sft": [*LEARNING, "--max_new_tokens=2"],
    "rm": [*LEARNING, "--loss_type=per_sample"],
    "dpo": [*LEARNING, "--max_new_tokens=2"],
    "classifier": [*LEARNING, "--label_kind=act"],
    "ppo": [
        *COMMON, "--actor_learning_rate=1e-2", "--critic_learning_rate=1e-2", "--optimizer_eps=1e-3", "--ppo_epochs=2",
        "--entropy_coeff=0.01", "--normalize_rewards", "--normalize_values", "--adaptive_kl_coeff", "--kl_horizon=16",
        "--rollout_mini_batch_size=1", "--max_new_tokens=6", "--self_check=False",
    ],
}  # fmt: skip
# records to validate on: all of them; or three, fewer than processes, which a model in pieces cannot do
EVERY, FEW = ["--eval_iters=1000"], ["--eval_iters=3"]
LIMIT = {"ddp": FEW, "fsdp": EVERY}


def answers(generator, batches, logprobs=False):
    """In place of the sampler: 1 to 6 tokens that hang on the prompt alone, and not on a process's random numbers."""
    return [answers_to(batch) for batch in batches]


def answers_to(batch):
    rows, ended = [], []
    for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        total = int((ids[mask] * torch.arange(1, int(mask.sum()) + 1)).sum())
        length = 1 + total % 6
        ended.append(length < 6)
        rows.append([5 + (total + 7 * place) % 85 for place in range(length - ended[-1])] + [2] * ended[-1])
    return Responses(*right_padded(rows, 3), torch.tensor(ended))


def stages(folder, runs, processes, *flags, names=("sft", "rm", "ppo")):
    """Stages into `folder/runs`, each from the runs of one process; the error of each, if there was one."""
    per_device = [f"--mini_batch_size={SAMPLES // processes}", "--micro_batch_size=1", f"--devices={processes}"]
    data, start = folder / "toy" / "tiny", folder / "one" / "toy" / "tiny"
    sft, rm = f"--sft_experiment_dir={start / 'sft'}", f"--rm_experiment_dir={start / 'rm'}"
    model, rollout = f"--model_name={folder / 'model'}", f"--rollout_size={SAMPLES // processes}"
    given = {"sft": [model], "rm": [sft], "ppo": [sft, rm, rollout], "dpo": [sft], "classifier": [model]}
    errors = {}
    for stage in names:
        try:
            run_stage(stage, folder / runs, data, *given[stage], *per_device, *FLAGS[stage], *flags)
        except ValueError as error:
            errors[stage] = str(error)
    return errors


def work(folder, processes):
    """What each of the processes does."""
    HuggingFaceGenerator.__call__ = answers
    losses = {name: STAGES[name](folder / f"{name}-{processes}-{os.environ['RANK']}") for name in STAGES}
    found = {}
    for strategy in ("ddp", "fsdp"):
        assert stages(folder, f"{strategy}{processes}", processes, f"--strategy={strategy}", *LIMIT[strategy]) == {}
        fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices=str(processes), strategy=strategy), seed=42)
        # of different sizes, where there are fewer processes than samples
        sizes = [3, 2, 1, 2] if processes == 4 else [1] * SAMPLES
        found[strategy] = {name: three_steps(fabric, losses[name], sizes) for name in STEPS[strategy]}
    found["errors"] = stages(folder, f"refused{processes}", processes, "--strategy=fsdp", *FEW, names=FLAGS)
    torch.save(found, folder / f"{processes}-{fabric.global_rank}.pt")


def main(folder, processes):
    """Leave the runs and `<processes>-<rank>.pt` in a folder; the processes are started as `torchrun` does."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, start_method="spawn", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(config, work)(folder, processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
