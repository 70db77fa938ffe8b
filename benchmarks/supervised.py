"""What benchmarks/sft.py and benchmarks/rm.py share: ours and TRL's trainer on the same random texts and card."""

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
PEAK = 9.89e14  # dense bf16 FLOP/s of an H100 by its data sheet, which MFU is the share of


def run_ours(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our script in a process of its own; medians over its log lines, the first third left out."""
    from workload import make_config, write_data, write_models

    write_models(folder, args.geometry, "sft", device=args.device)
    prompt = 1 if kind == "sft" else args.tokens // 2
    stage = "finetune" if kind == "sft" else "preference"
    count = args.batch * args.steps * args.devices
    write_data(folder / "data", make_config(args.geometry).vocab_size, stage, count, prompt, args.tokens - prompt)
    start = folder / "sft" / "checkpoints" / "step-000001"
    command = [
        *(sys.executable, str(ROOT / "scripts" / f"rlhf_{kind}.py"), f"--data_dir={folder / 'data'}"),
        *(f"--log_dir={folder / 'runs'}", f"--model_name={start}", f"--mini_batch_size={args.batch}"),
        *(f"--micro_batch_size={args.micro or args.batch}", "--save_interval=1000000", "--eval_interval=1000000"),
        *("--log_interval=5", "--loggers=csv", f"--precision={args.precision}", f"--devices={args.devices}"),
        *args.flags,
    ]
    with (folder / "ours.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    with (folder / "runs" / "random" / "data" / kind / "timing.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("info/time")]
    rows = rows[len(rows) // 3 :]
    seconds = statistics.median(float(row["info/time"]) for row in rows) / 5
    peak = max((float(row.get("info/peak_memory_gib") or 0) for row in rows), default=0.0)
    return {"seconds": seconds, "peak_gib": peak, "items_per_s": args.batch * args.devices / seconds}


def run_peer(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """TRL in a process of its own."""
    path = os.pathsep.join(filter(None, (args.peer_path, str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "trl_sft_rm.py"), "--what", kind]
    command += ["--geometry", args.geometry, "--tokens", str(args.tokens), "--batch", str(args.batch)]
    command += ["--steps", str(args.steps)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": found["median_s"], "peak_gib": found["peak_gib"], "items_per_s": args.batch / found["median_s"]}


def run(kind: str, description: str, tokens: int, argv: list[str] | None) -> dict[str, Any]:
    """Run both, print the comparison."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="opt-350m")
    parser.add_argument("--peer", choices=["trl", "none"], default="none")
    parser.add_argument("--peer_path", default="", help="folder with the peer's packages")
    for name, value in {"tokens": tokens, "batch": 16, "micro": 0, "steps": 30, "devices": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--device", default="cpu", help="where the random weights are drawn")
    parser.add_argument("--folder", help="where the runs are kept; a temporary folder by default")
    parser.add_argument("flags", nargs="*", help=f"further flags of rlhf_{kind}.py, after --")
    args = parser.parse_args(argv)

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from transformers import AutoModelForCausalLM
    from workload import make_config

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        try:
            found: dict[str, Any] = {"ours": run_ours(kind, args, folder)}
        except subprocess.CalledProcessError:
            raise SystemExit((folder / "ours.log").read_text(errors="replace")[-3000:]) from None
    if args.peer == "trl":
        found["trl"] = run_peer(kind, args)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(make_config(args.geometry)).parameters())
    print(f"{'':8}{'s':>8}{'items/s':>10}{'tokens/s':>11}{'MFU':>8}{'peak GiB':>10}")
    for name, r in found.items():
        r["tokens_per_s"] = r["items_per_s"] * args.tokens * (2 if kind == "rm" else 1)
        r["mfu"] = 6 * parameters * r["tokens_per_s"] / (args.devices if name == "ours" else 1) / PEAK
        numbers = f"{r['items_per_s']:10.1f}{r['tokens_per_s']:11,.0f}{r['mfu']:8.1%}{r['peak_gib'] or 0:10.1f}"
        print(f"{name:8}{r['seconds']:8.3f}{numbers}")
    result: dict[str, Any] = {"what": kind, "geometry": args.geometry, **found}
    if "trl" in found:
        result["ratio"] = found["ours"]["tokens_per_s"] / found["trl"]["tokens_per_s"]
        print(f"ours is {result['ratio']:.2f} times as fast")
    print(json.dumps(result))
    return result
