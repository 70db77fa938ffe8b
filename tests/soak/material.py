"""What the kill points run: tiny models, toy data, short runs of every kind, and how two runs are compared."""

import json
import sys
from functools import partial
from pathlib import Path

from forks import ROOT, Child, Process

# saves at 2, 4, 6, 7, validations at 3, 6 and with each save, log lines at 3, 6, 7: never all at once
COMMON = ["--max_steps=7", "--save_interval=2", "--eval_interval=3", "--log_interval=3"]
LEARN = ["--learning_rate=1e-3", "--lr_warmup_steps=2", "--epochs=3", "--weight_decay=0.01", "--mini_batch_size=10",
         "--micro_batch_size=5"]  # fmt: skip
TALK = ["--max_new_tokens=5"]
PPO = [
    "--max_steps=5", "--rollout_size=8", "--rollout_mini_batch_size=5", "--mini_batch_size=6", "--micro_batch_size=3",
    "--epochs=3", "--eval_iters=1", "--ppo_epochs=2", "--normalize_values", "--adaptive_kl_coeff",
    "--actor_learning_rate=1e-3", "--actor_lr_schedule=cosine", *TALK,
]  # fmt: skip
CRITIC = ["--critic_learning_rate=1e-3", "--critic_lr_warmup_steps=2", "--critic_warmup_steps=1"]
LORA = ["--finetune_mode=lora", "--lora_rank=2", "--lora_alpha=8"]
NEWEST = ["--keep_last=1"]
SFT = ["--sft_experiment_dir=../parents/toy/tiny/sft"]
BOTH = [*SFT, "--rm_experiment_dir=../parents/toy/tiny/rm"]
MODEL = ["--model_name=../model"]
# kind: stage, flags, how many of 50 points
KINDS = {
    "ppo": ("ppo", [*BOTH, *PPO, *CRITIC], 10),
    "ppo-newest": ("ppo", [*BOTH, *PPO, *CRITIC, *NEWEST], 6),
    "ppo-shared": ("ppo", [*BOTH, *PPO, "--share_actor_critic", *NEWEST, "--keep_best=False"], 4),
    "ppo-lora": ("ppo", [*BOTH, *PPO, *CRITIC, *LORA, "--num_return_sequences=2"], 3),
    "sft": ("sft", [*MODEL, *LEARN, *TALK], 7),
    "sft-lora": ("sft", [*MODEL, *LEARN, *TALK, *LORA, "--lora_dropout=0.2", *NEWEST], 3),
    "rm": ("rm", [*SFT, *LEARN, "--keep_last=2"], 8),
    "dpo": ("dpo", [*SFT, *LEARN, *TALK, *NEWEST], 6),
    "dpo-lora": ("dpo", [*SFT, *LEARN, *TALK, *LORA], 3),
}
DEVICES = {
    "cpu": ["--accelerator=cpu", "--devices=1"],
    "cuda": ["--accelerator=cuda", "--devices=1", "--deterministic"],
}


def arguments(kind, device, *more):
    """Flags of a run, relative to a folder beside `data` and `model`."""
    stage, flags, _ = KINDS[kind]
    return stage, ["--data_dir=../toy/tiny", "--log_dir=.", *DEVICES[device], *COMMON, *flags, *more]


def stage_child(stage, flags, folder, log, before=()):
    """A stage's script in a forked child."""

    def call():
        from rlhf_stages.cli import run

        from helpers import load_script

        for prepare in before:
            prepare()
        run(partial(load_script(f"scripts/rlhf_{stage}.py").main, flags))

    return Child(call, folder, log)


def stage_process(stage, flags, folder, log):
    """The same in a Python of its own."""
    return Process([sys.executable, str(ROOT / "scripts" / f"rlhf_{stage}.py"), *flags], folder, log)


def make(work, device):
    """Data, a model with dropout, and the parents of the later stages; in children, since tokenizers start threads."""

    def write():
        from helpers import save_causal, write_toy_data

        write_toy_data(work / "toy" / "tiny")
        save_causal(work / "model", dropout=0.1)

    log = work / "made.log"
    expect(Child(write, work, log), log)
    (work / "parents").mkdir()
    short = ["--data_dir=../toy/tiny", "--log_dir=.", *DEVICES[device], "--max_steps=2", "--learning_rate=1e-3"]
    expect(stage_child("sft", [*short, *MODEL, *TALK], work / "parents", log), log)
    expect(stage_child("rm", [*short, *SFT], work / "parents", log), log)


def expect(child, log, code=0):
    """Wait for a child that has to end with a code."""
    found = child.wait()
    if found != code:
        raise RuntimeError(f"exit code {found} instead of {code}, see {log}:\n{Path(log).read_text()[-2000:]}")


def content(experiment):
    """All that a second run of the same seed writes again: {file: bytes}."""
    found = {
        str(path.relative_to(experiment)): path.read_bytes()
        for path in experiment.rglob("*")
        if path.is_file() and path.relative_to(experiment).parts[0] not in ("logs", "timing.csv")
    }
    if "args.json" in found:
        args = json.loads(found["args.json"])
        args["train_args"].pop("resume")
        found["args.json"] = json.dumps(args)
    return found


def differences(one, other, more=()):
    """Names of the files in which two experiments are not the same to the bit.

    Args:
        more: folders that the second one may have besides.
    """
    one, other = content(one), content(other)
    # where the undisturbed run saved too, the two have to be the same
    extra = tuple(f"{folder}/" for folder in more if f"{folder}/manifest.json" not in one)
    other = {name: what for name, what in other.items() if not name.startswith(extra)}
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
