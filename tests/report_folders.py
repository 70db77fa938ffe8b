"""Experiment folders made by hand for the tests of the reports: what a run leaves, without a run."""

import csv
import hashlib
import json
import math
import random
from pathlib import Path

GROUPS = {"model_args": {"model_name": "m"}, "gen_args": {"max_new_tokens": 40}, "fabric_args": {"devices": "auto"}}
SFT_DIGEST = hashlib.sha256(hashlib.sha256(b"weights of sft").digest()).hexdigest()


def write_table(path, rows):
    """A CSV file as `loggers.CsvFiles` writes it, from rows of numbers by name."""
    columns = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([[row.get(name, "") for name in columns] for row in rows])


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def write_checkpoint(folder, step, weights=b"weights"):
    """A checkpoint with a manifest, and weights that are none."""
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    files = {"config.json": b"{}", "model.safetensors": weights}
    for name, content in files.items():
        (checkpoint / name).write_bytes(content)
    sums = {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": sums}))
    return checkpoint


def write_run(folder, stage, train_args=None, parents=None, rewards=None, finished=True):
    """An experiment folder without numbers."""
    folder = Path(folder)
    (folder / "checkpoints").mkdir(parents=True)
    args = {"stage": stage, "train_args": {"max_steps": 100, "log_interval": 1, **(train_args or {})}, **GROUPS}
    args |= {"parents": parents or {}, "rewards": rewards or {}, "shards": {"a_train.pt": "ab" * 32}}
    args |= {"versions": {"torch": "2.0"}, "data_args": {"dataset": folder.parent.parent.name}}
    (folder / "args.json").write_text(json.dumps(args))
    if finished:
        (folder / "summary.json").write_text('{"steps": 100}')
    return folder


def write_sft(folder, steps=100):
    """A finished SFT run."""
    folder = write_run(folder, "sft", {"learning_rate": 3e-3, "use_targets": True, "eval_interval": 25})
    rows = [{"step": s, "train/loss": 4 * math.exp(-s / 30) + 0.3, "info/lr": 3e-3} for s in range(1, steps + 1)]
    rows += [{"step": s, "val/loss": 4 * math.exp(-s / 30) + 0.4} for s in range(0, steps + 1, 25)]
    write_table(folder / "metrics.csv", sorted(rows, key=lambda row: row["step"]))
    clock = [{"step": s, "info/elapsed_seconds": 0.5 * s, "info/time": 0.5} for s in range(1, steps + 1)]
    write_table(folder / "timing.csv", [{**row, "info/tokens_per_seconds": 4000.0} for row in clock])
    write_checkpoint(folder, steps, b"weights of sft")
    for name in ("latest", "best"):
        (folder / name).write_text(f"step-{steps:06d}\n")
    return folder


def ppo_row(step, steps, rng):
    """A step of a run that is over-optimised: gold is highest in the middle."""
    progress = step / steps
    return {
        "step": step,
        "train/reward_mean": 3 * progress + rng.gauss(0, 0.05),
        "reward/rm_mean": 3 * progress,
        "reward/gold_mean": 0.5 + 1.6 * progress * (1 - progress) + rng.gauss(0, 0.005),
        "train/kl_sequence": 16 * progress**2,
        "train/response_length": 20 + 5 * progress,
        "train/cut_off_percentage": 1.0,
        "train/empty_percentage": 0.0,
        "train/actor_loss": rng.gauss(0, 0.01),
        "train/critic_loss": 0.5 * math.exp(-3 * progress),
        "health/entropy": 2 - progress,
        "health/distinct_2": 0.5 - 0.1 * progress,
        "health/duplicate_percentage": 1.0,
        "health/kl_error": 0.1,
        **{f"health/score_p{p}": 0.1 for p in ("05", "50", "95")},
        **{f"debug/{n}_{s}": 0.123456789 for n in ("advantages", "returns") for s in ("mean", "std", "min", "max")},
        "info/clip_fraction": 0.1,
        "info/approx_kl": 0.01,
        "info/explained_variance": 0.5 * progress + 0.1,
        "info/kl_coeff": 0.3,
        "info/lr": 5e-4,
        "info/actor_grad_norm": 1.0,
        "info/critic_grad_norm": 2.0,
    }


def write_ppo(folder, steps=100, sft=None, prompt="Question: why?", response="Because.", finished=True, seed=0):
    """A PPO run of which every step was logged."""
    rng = random.Random(seed)
    parents = {}
    if sft is not None:
        checkpoint = sft / "checkpoints" / "step-000100"
        parents = {"sft": {"path": str(checkpoint), "sha256": SFT_DIGEST}}
    rewards = {
        "rm": {"kind": "reward_model", "weights": [[0, 1.0]]},
        "gold": {"kind": "corpus.py:gold", "weights": [[0, 0.0]]},
    }
    arguments = {"init_kl_coeff": 0.05, "rollout_size": 64, "ppo_epochs": 2}
    folder = write_run(folder, "ppo", arguments, parents, rewards, finished)
    rows = [ppo_row(step, steps, rng) for step in range(1, steps + 1)]
    rows += [
        {"step": s, "val/reward_mean": 3 * s / steps, "val/kl_sequence": 16 * (s / steps) ** 2} for s in (0, steps)
    ]
    write_table(folder / "metrics.csv", sorted(rows, key=lambda row: row["step"]))
    times = {"info/generation_time": 1.0, "info/rollout_time": 1.5, "info/ppo_time": 2.0}
    clock = [{"step": s, "info/elapsed_seconds": 4.0 * s, **times} for s in range(1, steps + 1)]
    write_table(folder / "timing.csv", clock)
    text = {"prompt": prompt, "response": response}
    samples = [{"step": s, "name": "rollout_sample", **text, "score": 0.1 * s, "kl": 0.2} for s in range(1, steps + 1)]
    samples += [{"step": s, "name": "example_sample", **text} for s in (0, steps)]
    write_lines(folder / "samples.jsonl", samples)
    write_checkpoint(folder, steps)
    (folder / "latest").write_text(f"step-{steps:06d}\n")
    return folder


def write_evaluation(path, prompt="Question: why?"):
    """What evaluate.py writes about two policies."""
    reply = {"prompt": prompt, "tokens": 3, "ended": True}
    replies = {
        "sft": [{**reply, "text": f"old {i}", "kl": 0.0, "reward": 0.1, "gold": 0.5} for i in range(9)],
        "ppo": [{**reply, "text": f"new {i}", "kl": 2.0, "reward": 0.9, "gold": 0.1 * i} for i in range(9)],
    }
    summary = {n: {"gold score": 0.5, "KL to the reference (nats)": k} for n, k in (("sft", 0.0), ("ppo", 2.0))}
    whole = {name: {"distinct-2": 0.25} for name in summary}
    share = {"longer wins": {"value": 0.4, "low": 0.3, "high": 0.5}, "rm": {"value": 0.9, "low": 0.8, "high": 1.0}}
    accuracy = {"test": {"all pairs": {"n": 1200, "share": share}}}
    args = {"args": {"split": "test", "seed": 42}, "generation": {"temperature": 0.7}}
    path.write_text(
        json.dumps({**args, "replies": replies, "summary": summary, "whole": whole, "reward_accuracy": accuracy})
    )
    return path
