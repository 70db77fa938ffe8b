#!/usr/bin/env python3
"""One PPO iteration, ours and TRL's, on the same work and the same card.

    python benchmarks/ppo.py --geometry opt-350m --peer trl

Random weights, random prompts, and no stop token, so that every response has its full length. Ours is
`scripts/rlhf_ppo.py` as it is, with its logging; the peer is TRL 1.12.0's PPOTrainer, the last one. Both do one
optimizer step of all samples per network. Prints a table and one JSON line: seconds of an iteration (median of those
after the first two), samples/s, peak memory, and for each phase of ours the share of what the hardware allows.
`--peer_path` names a folder with the peer's packages.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# of an H100: bytes/s that a copy reaches, and bf16 FLOP/s that a step of training is held to (the half of the peak)
BANDWIDTH, COMPUTE, TRAINING = 3.0e12, 7.9e14, 4.0e14


def run_ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our script in a process of its own; medians over its steps."""
    from workload import make_config, write_data, write_models

    write_models(folder, args.geometry, "sft", "rm", device=args.device)
    prompts = args.rollout * args.steps * args.devices
    write_data(folder / "data", make_config(args.geometry).vocab_size, "prompt", prompts, args.prompt, args.response)
    command = [
        *(sys.executable, str(ROOT / "scripts" / "rlhf_ppo.py"), f"--data_dir={folder / 'data'}"),
        *(f"--log_dir={folder / 'runs'}", f"--sft_experiment_dir={folder / 'sft'}"),
        *(f"--rm_experiment_dir={folder / 'rm'}", f"--rollout_size={args.rollout}"),
        *(f"--rollout_mini_batch_size={args.rollout}", f"--mini_batch_size={args.rollout}"),
        *(f"--micro_batch_size={args.micro}", f"--max_new_tokens={args.response}", f"--min_new_tokens={args.response}"),
        *("--ppo_epochs=1", "--save_interval=1000000", "--eval_interval=1000000", "--log_interval=1", "--loggers=csv"),
        *(f"--precision={args.precision}", f"--devices={args.devices}", "--overwrite", *args.flags),
    ]
    with (folder / "ours.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    experiment = folder / "runs" / "random" / "data" / "ppo"
    with (experiment / "timing.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("info/ppo_time")]
    rows = rows[2:] or rows

    def median(name: str) -> float:
        return statistics.median(float(row[f"info/{name}"] or 0) for row in rows)

    generation, rollout, update = median("generation_time"), median("rollout_time"), median("ppo_time")
    seconds = rollout + update
    lines = (folder / "ours.log").read_text(errors="replace").splitlines()
    return {
        "seconds": seconds,
        "samples_per_s": args.rollout * args.devices / seconds,
        "phases": {"decode": generation, "score": rollout - generation, "train": update},
        "peak_gib": max((float(row.get("info/peak_memory_gib") or 0) for row in rows), default=0.0),
        "generator": next(
            (line for line in lines if line.startswith("rollouts: ")), "rollouts: Hugging Face's generate"
        ),
    }


def run_peer(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """TRL in a process of its own."""
    path = os.pathsep.join(filter(None, (args.peer_path, str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "trl_ppo.py"), "--geometry", args.geometry]
    command += ["--prompt", str(args.prompt), "--response", str(args.response)]
    command += ["--rollout", str(args.rollout), "--micro", str(args.peer_micro), "--iters", str(args.steps)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": found["median_s"], "samples_per_s": found["samples_per_s"], "peak_gib": found["peak_gib"]}


def limits(args: argparse.Namespace) -> dict[str, float]:
    """Seconds that each phase takes at least: bytes over bandwidth for decoding, operations over their rate else."""
    import torch
    from transformers import AutoModelForCausalLM
    from workload import make_config

    config = make_config(args.geometry)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    tokens = args.rollout * (args.prompt + args.response)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = config.hidden_size // config.num_attention_heads
    cached = args.rollout * (args.prompt + args.response / 2) * 2 * config.num_hidden_layers * heads * size * 2
    return {
        "decode": args.response * (2 * parameters + cached) / BANDWIDTH,
        "score": 4 * 2 * parameters * tokens / COMPUTE,
        "train": 2 * 6 * parameters * tokens / TRAINING,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="opt-350m")
    parser.add_argument("--peer", choices=["trl", "none"], default="none")
    parser.add_argument("--peer_path", default="")
    parser.add_argument("--peer_micro", type=int, default=16)
    for name, value in {"prompt": 128, "response": 128, "rollout": 64, "micro": 16, "steps": 6, "devices": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--device", default="cpu", help="where the random weights are drawn")
    parser.add_argument("--folder", help="where the runs are kept; a temporary folder by default")
    parser.add_argument("flags", nargs="*", help="further flags of rlhf_ppo.py, after --")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        try:
            result: dict[str, Any] = {"geometry": args.geometry, "ours": run_ours(args, folder)}
        except subprocess.CalledProcessError:
            raise SystemExit((folder / "ours.log").read_text(errors="replace")[-3000:]) from None
        if args.peer == "trl":
            result["trl"] = run_peer(args, folder)
    ours, floor = result["ours"], limits(args)
    result["limit"] = {**floor, "samples_per_s": args.rollout / sum(floor.values())}
    result["of_limit"] = {name: floor[name] / seconds for name, seconds in ours["phases"].items()}
    result["of_limit"]["all"] = sum(floor.values()) / ours["seconds"]
    print(f"{'':8}{'s':>8}{'samples/s':>11}{'peak GiB':>10}")
    for name in ("ours", "trl"):
        if name in result:
            r = result[name]
            print(f"{name:8}{r['seconds']:8.3f}{r['samples_per_s']:11.1f}{r['peak_gib'] or 0:10.1f}")
    if "trl" in result:
        result["ratio"] = ours["samples_per_s"] / result["trl"]["samples_per_s"]
        result["memory_ratio"] = ours["peak_gib"] / result["trl"]["peak_gib"] if result["trl"]["peak_gib"] else None
        print(f"ours is {result['ratio']:.2f} times as fast")
    for name, seconds in ours["phases"].items():
        print(f"{name:8}{seconds:8.3f} s, {result['of_limit'][name]:6.1%} of what the hardware allows")
    print(ours["generator"])
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
