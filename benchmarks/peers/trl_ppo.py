"""Peer measurement: TRL's last PPO trainer (1.12.0, experimental) on a fixed synthetic workload.

Random-init model of a named geometry, bf16 autocast, no EOS so that every
response has exactly `response` tokens. Prints one JSON line: seconds per PPO iteration (median), samples/s,
peak GiB.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainerCallback,
)
from workload import make_config as geometry
from workload import word_tokenizer

p = argparse.ArgumentParser()
p.add_argument("--geometry", default="opt-350m")
p.add_argument("--prompt", type=int, default=128)
p.add_argument("--response", type=int, default=128)
p.add_argument("--rollout", type=int, default=64)
p.add_argument("--micro", type=int, default=16)
p.add_argument("--ppo_epochs", type=int, default=1)
p.add_argument("--iters", type=int, default=6)
p.add_argument("--out", default=tempfile.mkdtemp())
a = p.parse_args()

from trl.experimental.ppo import PPOConfig, PPOTrainer

cfg = geometry(a.geometry)
tok = word_tokenizer(cfg.vocab_size)
cfg.pad_token_id, cfg.eos_token_id, cfg.bos_token_id = tok.pad_token_id, tok.eos_token_id, tok.bos_token_id
torch.manual_seed(0)
policy = AutoModelForCausalLM.from_config(cfg)
ref = AutoModelForCausalLM.from_config(cfg).to(torch.bfloat16)
cfg1 = type(cfg)(**{**cfg.to_dict(), "num_labels": 1})
value = AutoModelForSequenceClassification.from_config(cfg1)
reward = AutoModelForSequenceClassification.from_config(cfg1).to(torch.bfloat16)
g = torch.Generator().manual_seed(1)
n = a.rollout * a.iters
ds = Dataset.from_dict({"input_ids": torch.randint(5, cfg.vocab_size, (n, a.prompt), generator=g).tolist()})
times = []


class T(TrainerCallback):
    def on_step_end(self, args, state, control, **k):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())


args = PPOConfig(
    output_dir=a.out,
    per_device_train_batch_size=a.micro,
    gradient_accumulation_steps=a.rollout // a.micro,
    num_mini_batches=1,
    num_ppo_epochs=a.ppo_epochs,
    total_episodes=n,
    response_length=a.response,
    stop_token_id=None,
    temperature=1.0,
    local_rollout_forward_batch_size=64,
    num_sample_generations=0,
    gradient_checkpointing=False,
    bf16=torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    learning_rate=1e-6,
)
t0 = time.perf_counter()
tr = PPOTrainer(
    args=args,
    processing_class=tok,
    model=policy,
    ref_model=ref,
    reward_model=reward,
    value_model=value,
    train_dataset=ds,
    eval_dataset=ds.select(range(4)),
    callbacks=[T()],
)
if torch.cuda.is_available():
    torch.cuda.reset_peak_memory_stats()
times.append(time.perf_counter())
tr.train()
d = [b - x for x, b in zip(times, times[1:])]
med = statistics.median(d[2:] or d)
print(
    json.dumps(
        {
            "peer": "trl-1.12.0-ppo",
            **{k: v for k, v in vars(a).items() if k != "out"},
            "step_s": [round(x, 3) for x in d],
            "median_s": round(med, 3),
            "samples_per_s": round(a.rollout / med, 2),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    )
)
