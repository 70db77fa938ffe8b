#!/usr/bin/env python3
"""The embedded pipeline in a loop for a bounded time, with faults, each run compared with an undisturbed one.

SFT, reward model, PPO and DPO on generated data of the help desk; every run meets one to three random faults, is
resumed until it ends, and has to be the undisturbed run to the bit.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import disk
import faults
import forks
import material
from faults import FAULTS, Broken, Run
from forks import ROOT, Child, Hung

DISK_SIZE = 128 * 2**20
PREPARE = ["--num_dialogues=240", "--num_test_dialogues=10", "--destination_dir=data", "--tokenizer_name=model",
           "--num_workers=1"]  # fmt: skip
MODEL = ["--destination_dir=model", "--num_dialogues=200", "--vocab_size=400", "--hidden_size=32", "--num_heads=2"]
COMMON = ["--data_dir=../data", "--experiment_name=tiny", "--log_dir=runs", "--accelerator=cpu", "--devices=1",
          "--eval_iters=2", "--max_new_tokens=8", "--max_time=5h"]  # fmt: skip
SFT = ["--sft_experiment_dir=runs/helpdesk/tiny/sft"]
SMALL = ["--mini_batch_size=8", "--micro_batch_size=4"]
STAGES = {
    "sft": ["--model_name=../model", *SMALL, "--max_steps=10", "--save_interval=3", "--eval_interval=5",
            "--log_interval=2", "--lr_warmup_steps=3"],
    "rm": [*SFT, *SMALL, "--max_steps=10", "--save_interval=3", "--eval_interval=5", "--log_interval=2",
           "--lr_warmup_steps=3", "--keep_last=2"],
    "ppo": [*SFT, "--rm_experiment_dir=runs/helpdesk/tiny/rm", "--rollout_size=8", "--rollout_mini_batch_size=5",
            "--mini_batch_size=6", "--micro_batch_size=3", "--max_steps=7", "--save_interval=3", "--eval_interval=2",
            "--log_interval=2", "--normalize_values", "--adaptive_kl_coeff", "--keep_last=2"],
    "dpo": [*SFT, *SMALL, "--max_steps=8", "--save_interval=3", "--eval_interval=4", "--log_interval=3",
            "--lr_warmup_steps=2", "--keep_last=1", "--keep_best=False"],
}  # fmt: skip


def main():
    """Rounds of the pipeline until the time is over; 1 if anything was not as it has to be."""
    args = parse()
    started = time.monotonic()
    no_disk = disk.private_mounts()
    forks.load()
    work = Path(tempfile.mkdtemp(prefix="soak-", dir=args.dir))
    prepare(work)
    undisturbed = {stage: undisturbed_run(work, stage) for stage in STAGES}
    print(f"undisturbed runs made, {time.monotonic() - started:.0f} s")
    if no_disk:
        print(f"disk full: skipped, {no_disk}")
    rng, injected, compared, bad, number = random.Random(args.seed), Counter(), Counter(), [], 0
    names = [name for name in FAULTS if not (name == "disk full" and no_disk)]
    while number < args.rounds if args.rounds else time.monotonic() - started < args.seconds:
        number += 1
        left = partial(lambda end: time.monotonic() < end, started + args.seconds)
        one_round(work, number, undisturbed, names, not no_disk, rng, left, injected, compared, bad)
    print(f"rounds {number}, {time.monotonic() - started:.0f} s, seed {args.seed}")
    print(f"faults injected {injected.total()} ({', '.join(f'{name} {n}' for name, n in sorted(injected.items()))})")
    print(f"runs compared {compared.total()} ({', '.join(f'{name} {n}' for name, n in compared.items())})")
    print(f"differences {len(bad)}")
    if bad:
        print(f"kept {work}")
    else:
        shutil.rmtree(work)
    return 1 if bad or not compared else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="no run is begun after so long")
    parser.add_argument("--rounds", type=int, help="so many rounds instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="where to make the working folder")
    return parser.parse_args()


def prepare(work):
    """Model and data of the help desk, small."""
    script(work, "make_model", MODEL)
    for stage in ("finetune", "preference", "prompt"):
        script(work, "prepare_data", [f"--config={ROOT}/configs/helpdesk/prepare.yaml", f"--stage={stage}", *PREPARE])


def script(work, name, flags):
    """A script that reads sys.argv, in a child."""

    def call():
        from rlhf_stages.cli import run

        from helpers import load_script

        sys.argv[1:] = flags
        run(load_script(f"data_prep/helpdesk/{name}.py").main)

    log = work / f"{name}.log"
    material.expect(Child(call, work, log), log)


def flags_of(stage):
    common = [flag for flag in COMMON if stage != "rm" or "new_tokens" not in flag]
    return [f"--config={ROOT}/configs/helpdesk/{stage}.yaml", *common, *STAGES[stage]]


def undisturbed_run(work, stage):
    """Its experiment, seconds and size."""
    folder, log = work / "undisturbed", work / f"undisturbed-{stage}.log"
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    material.expect(material.stage_child(stage, flags_of(stage), folder, log), log)
    seconds, experiment = time.monotonic() - started, folder / "runs" / "helpdesk" / "tiny" / stage
    return experiment, seconds, sum(path.stat().st_size for path in experiment.rglob("*") if path.is_file())


def one_round(work, number, undisturbed, names, has_disk, rng, left, injected, compared, bad):
    """The pipeline once, every stage with faults."""
    folder = work / f"round-{number}"
    (folder / "runs").mkdir(parents=True)
    if has_disk:
        disk.mount(folder / "runs", DISK_SIZE)
    for stage in STAGES:
        if not left():
            break
        experiment, seconds, size = undisturbed[stage]
        run = Run(stage, flags_of(stage), folder, folder / f"{stage}.log", seconds, size, has_disk)
        met = []
        try:
            for name in rng.choices(names, k=rng.choice((1, 2, 2, 3))):
                met.append(name)
                injected[name] += 1
                FAULTS[name](run, rng)
            run.end(run.start(), 0)
            extra = [f"checkpoints/step-{step:06d}" for step in run.stopped_at]
            found = material.differences(experiment, run.experiment, extra)
            compared[stage] += 1
            if found:
                raise Broken(f"differs in {found}")
        except (Broken, Hung) as problem:
            bad.append((stage, " + ".join(met), problem))
            print(f"{stage}, {' + '.join(met)}: {problem}", flush=True)
            if run.experiment.is_dir():
                faults.copy_for_later(run, work / f"bad-{number}-{stage}")
            break  # the later stages start from this one
    if has_disk:
        disk.unmount(folder / "runs")
    if not bad:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
