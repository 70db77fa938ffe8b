"""Peer measurement: TRL SFTTrainer (packed rows) and RewardTrainer on fixed synthetic work; one JSON line per case."""

import argparse
import json
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from workload import make_config as geometry
from workload import word_tokenizer

p = argparse.ArgumentParser()
p.add_argument("--what", choices=["sft", "rm"], required=True)
p.add_argument("--geometry", default="opt-350m")
p.add_argument("--tokens", type=int, default=1024)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--steps", type=int, default=25)
p.add_argument("--compile", action="store_true")
a = p.parse_args()
cuda = torch.cuda.is_available()
cfg = geometry(a.geometry)
tok = word_tokenizer(cfg.vocab_size)
cfg.pad_token_id, cfg.eos_token_id, cfg.bos_token_id = tok.pad_token_id, tok.eos_token_id, tok.bos_token_id
torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
n = a.batch * a.steps
times = []


class T(TrainerCallback):
    def on_step_end(self, args, state, control, **k):
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())


common = dict(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=a.batch,
    max_steps=a.steps,
    gradient_checkpointing=False,
    bf16=cuda,
    report_to=[],
    save_strategy="no",
    logging_steps=1000,
    disable_tqdm=True,
    learning_rate=1e-5,
    torch_compile=a.compile,
    optim="adamw_torch_fused" if cuda else "adamw_torch",
    dataloader_num_workers=0,
)
rand = lambda m: torch.randint(5, cfg.vocab_size, (m, a.tokens), generator=g).tolist()
if a.what == "sft":
    from trl import SFTConfig, SFTTrainer

    ds = Dataset.from_dict({"input_ids": rand(n)})
    tr = SFTTrainer(
        model=AutoModelForCausalLM.from_config(cfg),
        args=SFTConfig(**common, max_length=a.tokens, packing=False),
        train_dataset=ds,
        processing_class=tok,
        callbacks=[T()],
    )
else:
    from trl import RewardConfig, RewardTrainer

    cfg1 = type(cfg)(**{**cfg.to_dict(), "num_labels": 1})
    ds = Dataset.from_dict({"chosen_ids": rand(n), "rejected_ids": rand(n)})
    tr = RewardTrainer(
        model=AutoModelForSequenceClassification.from_config(cfg1),
        args=RewardConfig(**common, max_length=a.tokens),
        train_dataset=ds,
        processing_class=tok,
        callbacks=[T()],
    )
if cuda:
    torch.cuda.reset_peak_memory_stats()
tr.train()
d = [y - x for x, y in zip(times, times[1:])]
med = statistics.median(d[5:] or d)
params = sum(q.numel() for q in tr.model.parameters())
toks = a.batch * a.tokens * (2 if a.what == "rm" else 1)
print(
    json.dumps(
        {
            "peer": f"trl-1.16.0-{a.what}",
            **vars(a),
            "median_s": round(med, 4),
            "tokens_per_s": round(toks / med),
            "items_per_s": round(a.batch / med, 1),
            "tflops": round(6 * params * toks / med / 1e12, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        }
    )
)
