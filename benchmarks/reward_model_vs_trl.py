#!/usr/bin/env python3
"""Held-out accuracy of our reward model beside that of TRL's RewardTrainer: same pairs, model, steps and seeds.

    python benchmarks/reward_model_vs_trl.py --data_dir data/helpful_harmless/smollm2-135m-instruct \\
        --model_name models/smollm2-135m-instruct --seeds 1 2 3 --jobs 2 --out results.jsonl

Ours is scripts/rlhf_rm.py with a YAML of flags. RewardTrainer is given the same token ids, batches, optimizer and
schedule; bf16 where there is a GPU. It draws its own order of the pairs and its own starting head (deviation
`initializer_range` of the model, 0.02 as a rule, where ours has (H + 1)^-0.5). Both final models are read by the same
code, in fp32. One JSON line per run goes to the screen and to --out; runs that are in --out already are not run again.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "helpful_harmless" / "rm.yaml"


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; --job is how the script calls itself for one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="folder with preference_train.pt and preference_test.pt")
    parser.add_argument("--model_name", required=True, help="causal model that every run starts from")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--peers", nargs="+", choices=sorted(JOBS), default=sorted(JOBS))
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--config", default=str(ROOT / "configs" / "helpful_harmless" / "rm.yaml"), help="flags of ours"
    )
    parser.add_argument("--max_steps", type=int, help="stop early")
    parser.add_argument("--split", default="test", help="pairs that the final models are compared on")
    parser.add_argument("--job", nargs=2, metavar=("PEER", "SEED"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def flags(args: argparse.Namespace, seed: int) -> list[str]:
    """Flags of scripts/rlhf_rm.py; what they resolve to is what TRL is given."""
    import torch

    stop = [f"--max_steps={args.max_steps}"] if args.max_steps else []
    precision = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    given = {"config": args.config, "data_dir": args.data_dir, "model_name": args.model_name, "seed": seed}
    return [*(f"--{name}={value}" for name, value in given.items()), f"--precision={precision}", "--devices=1", *stop]


def train_ours(args: argparse.Namespace, seed: int, folder: Path) -> tuple[Path, int, float]:
    """Our stage as a program of its own; its checkpoint, steps and seconds of training."""
    never = 10**9  # both still happen after the last step
    command = [sys.executable, str(ROOT / "scripts" / "rlhf_rm.py"), *flags(args, seed), f"--log_dir={folder}"]
    command += [f"--save_interval={never}", f"--eval_interval={never}", "--experiment_name=ours"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (experiment,) = folder.glob("*/ours/rm")
    with (experiment / "timing.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["info/time"]][-1]
    return experiment, int(last["step"]), float(last["info/elapsed_seconds"])


def train_trl(args: argparse.Namespace, seed: int, folder: Path) -> tuple[Path, int, float]:
    """RewardTrainer with what our flags mean; its model folder, steps and seconds of training."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl import RewardConfig, RewardTrainer

    from rlhf_stages.args import FabricArgs, ModelArgs, RMArgs
    from rlhf_stages.cli import parse
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.optim import make_optimizer, make_schedule

    ours, _, _ = parse(RMArgs, ModelArgs, FabricArgs, argv=flags(args, seed))
    tokenizer = load_tokenizer(args.model_name)
    records = open_shard(Path(args.data_dir) / "preference_train.pt", responses=2, vocab_size=len(tokenizer))
    pairs = [(r.sequence(i), r.sequence(j)) for r in records for j in range(len(r.responses)) for i in range(j)]
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name, num_labels=1, dtype=torch.float32, trust_remote_code=False
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    every = ours.epochs * -(-len(pairs) // ours.mini_batch_size)
    total = min(every, ours.max_steps or every)
    optimizer = make_optimizer(model, ours, ours.learning_rate)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=str(folder), per_device_train_batch_size=ours.micro_batch_size,
            gradient_accumulation_steps=ours.mini_batch_size // ours.micro_batch_size, num_train_epochs=ours.epochs,
            max_steps=ours.max_steps or -1, max_grad_norm=ours.gradient_clip_val, max_length=None, seed=seed,
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False,
            report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"chosen_ids": c.tolist(), "rejected_ids": r.tolist()} for c, r in pairs]),
        processing_class=tokenizer,
        optimizers=(optimizer, make_schedule(optimizer, ours.rate, total)),
    )  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    if trainer.state.global_step != total:
        raise RuntimeError(f"TRL made {trainer.state.global_step} steps, ours makes {total}")
    trainer.model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model", total, seconds


JOBS = {"ours": train_ours, "trl": train_trl}


def held_out(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Accuracy and mean loss over the pairs of the split, the score read at the last token of a text."""
    import torch
    import torch.nn.functional as F

    from rlhf_stages.args import ModelArgs
    from rlhf_stages.data.collate import collate_preference
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.experiment import resolve_checkpoint
    from rlhf_stages.models.loading import load_scalar
    from rlhf_stages.models.scalar import end_scores

    checkpoint, device = resolve_checkpoint(folder), "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(str(checkpoint))
    model = load_scalar(checkpoint, tokenizer, ModelArgs(disable_dropout=True), trained_head=True).eval().to(device)
    shard = open_shard(Path(args.data_dir) / f"preference_{args.split}.pt", responses=2, vocab_size=len(tokenizer))
    leads = []
    with torch.no_grad():
        for start in range(0, len(shard), 16):
            records = [shard[i] for i in range(start, min(start + 16, len(shard)))]
            batch = collate_preference(records, pad_token_id=tokenizer.pad_token_id)
            scores = end_scores(model, batch.input_ids.to(device), batch.attention_mask.to(device)).cpu()
            leads.append(scores[batch.better] - scores[batch.worse])
    lead = torch.cat(leads)
    accuracy, loss = (lead > 0).double().mean(), -F.logsigmoid(lead).double().mean()
    return {"accuracy": accuracy.item(), "loss": loss.item(), "pairs": len(lead)}


def run_job(args: argparse.Namespace, peer: str, seed: int) -> None:
    """Train one and measure it; the result is the last line on stdout."""
    import torch

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, steps, seconds = JOBS[peer](args, seed, Path(folder))
        result = held_out(args, checkpoint)
    packages = ["torch", "transformers", *(["trl"] if peer == "trl" else [])]
    line = {"peer": peer, "seed": seed, **result, "steps": steps, "seconds": round(seconds, 1)}
    line |= {"wall_seconds": round(time.perf_counter() - started, 1), "split": args.split}
    line["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({**line, "versions": {name: version(name) for name in packages}}))


def start_job(args: argparse.Namespace, peer: str, seed: int) -> bool:
    """Run one in a process of its own and note its result; whether it went well."""
    command = [sys.executable, __file__, *sys.argv[1:], "--job", peer, str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"{peer} with seed {seed} failed:\n{result.stderr[-4000:]}", file=sys.stderr, flush=True)
        return False
    line = result.stdout.strip().splitlines()[-1]
    with args.out.open("a") as file:  # one write of one line: jobs do not mix theirs
        file.write(line + "\n")
    print(line, flush=True)
    return True


def main() -> None:
    """All runs that --out lacks, then the mean accuracy of each peer."""
    args = read_arguments()
    if args.job:
        return run_job(args, args.job[0], int(args.job[1]))
    lines = args.out.read_text().splitlines() if args.out.is_file() else []
    done = {(line["peer"], line["seed"]) for line in map(json.loads, lines)}
    todo = [(peer, seed) for seed in args.seeds for peer in args.peers if (peer, seed) not in done]
    with ThreadPoolExecutor(args.jobs) as pool:
        fine = list(pool.map(lambda job: start_job(args, *job), todo))
    results: list[dict[str, Any]] = [json.loads(line) for line in args.out.read_text().splitlines()]
    for peer in args.peers:
        values = [line["accuracy"] for line in results if line["peer"] == peer and line["seed"] in args.seeds]
        if values:
            print(json.dumps({"peer": peer, "mean_accuracy": sum(values) / len(values), "runs": len(values)}))
    if not all(fine):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
