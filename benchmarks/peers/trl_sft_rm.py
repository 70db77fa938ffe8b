"""TRL 1.16's SFTTrainer on full rows, or RewardTrainer, on the work of benchmarks/sft.py and rm.py; one JSON line."""

import argparse
import itertools
import json
import statistics
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from workload import CUDA, Clock, make_config, word_tokenizer


def main() -> None:
    """Train some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", choices=["sft", "rm"], required=True)
    parser.add_argument("--geometry", default="opt-350m")
    parser.add_argument("--compile", action="store_true")
    for name, value in {"tokens": 1024, "batch": 16, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    config = make_config(args.geometry)
    tokenizer = word_tokenizer(config.vocab_size)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def texts() -> list[list[int]]:
        count = args.batch * args.steps
        rows: list[list[int]] = torch.randint(5, config.vocab_size, (count, args.tokens), generator=generator).tolist()
        return rows

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": args.batch,
        "max_steps": args.steps,
        "gradient_checkpointing": False,
        "bf16": CUDA,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "learning_rate": 1e-5,
        "torch_compile": args.compile,
        "optim": "adamw_torch_fused" if CUDA else "adamw_torch",
        "max_length": args.tokens,
    }
    clock = Clock()
    trainer: Any
    if args.what == "sft":
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=SFTConfig(**common, packing=False),
            train_dataset=Dataset.from_dict({"input_ids": texts()}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    else:
        scalar = type(config)(**{**config.to_dict(), "num_labels": 1})
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_config(scalar),
            args=RewardConfig(**common),
            train_dataset=Dataset.from_dict({"chosen_ids": texts(), "rejected_ids": texts()}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    steps = [later - earlier for earlier, later in itertools.pairwise(clock.times)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    print(json.dumps({"median_s": statistics.median(steps[len(steps) // 3 :]), "peak_gib": peak}))


if __name__ == "__main__":
    main()
