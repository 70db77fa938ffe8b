"""TRL's last PPO trainer (1.12.0, `trl.experimental.ppo`) on the work of benchmarks/ppo.py; prints one JSON line.

Random weights, bf16 autocast, reference and reward model in bf16, no stop token: every response has its full length.
"""

import argparse
import itertools
import json
import statistics
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer
from workload import CUDA, Clock, make_config, word_tokenizer


def main() -> None:
    """Train some iterations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", default="opt-350m")
    for name, value in {"prompt": 128, "response": 128, "rollout": 64, "micro": 16, "iters": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    config = make_config(args.geometry)
    tokenizer = word_tokenizer(config.vocab_size)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    scalar = type(config)(**{**config.to_dict(), "num_labels": 1})
    torch.manual_seed(0)
    policy, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    value, reward = (AutoModelForSequenceClassification.from_config(scalar) for _ in range(2))
    count = args.rollout * args.iters
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, config.vocab_size, (count, args.prompt), generator=generator)
    data, clock = Dataset.from_dict({"input_ids": prompts.tolist()}), Clock()
    settings = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.micro,
        gradient_accumulation_steps=args.rollout // args.micro,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=count,
        response_length=args.response,
        stop_token_id=None,
        temperature=1.0,
        local_rollout_forward_batch_size=64,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=CUDA,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=1e-6,
    )
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference.to(torch.bfloat16),
        reward_model=reward.to(torch.bfloat16),
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        callbacks=[clock],
    )
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    clock.now()
    trainer.train()
    steps = [later - earlier for earlier, later in itertools.pairwise(clock.times)]
    median = statistics.median(steps[2:] or steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    print(json.dumps({"median_s": median, "samples_per_s": args.rollout / median, "peak_gib": peak, "steps_s": steps}))


if __name__ == "__main__":
    main()
