#!/usr/bin/env python3
"""Record what the peers compute on tiny models, as golden files for tests/test_parity.py.

    PYTHONPATH=<TRL 1.16.0> python benchmarks/record_parity.py models sft rm dpo
    PYTHONPATH=<TRL 1.12.0> python benchmarks/record_parity.py ppo

Peers: Hugging Face's `model(labels=)` for SFT, TRL 1.16.0's RewardTrainer and DPOTrainer, and `trl.experimental.ppo` of
TRL 1.12.0, the last release that has it. Nothing of rlhf_stages is imported. `models` makes new weights; leave it out
to record on those that are stored.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch import Tensor

from parity_cases import (
    CLIP,
    GOLDEN,
    KINDS,
    PAD,
    STEPS,
    finetune_data,
    gradient_norms,
    load,
    optimizer_and_schedule,
    preference_data,
    steps,
    versions,
    word_tokenizer,
    write_golden,
    write_models,
)

DPO_BETA = 0.1
SMOOTHING = 0.1
CENTERING = 0.1


def record_sft(kind: str) -> dict[str, Any]:
    """Loss, gradient and five AdamW steps of `model(input_ids, attention_mask, labels)`, prompt and padding at -100."""
    data = finetune_data()
    texts = [row["prompt"] + row["response"] for row in data]
    size = max(map(len, texts))
    ids = torch.tensor([text + [PAD] * (size - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (size - len(text)) for text in texts])
    labels = ids.masked_fill(mask == 0, -100)
    for row, labelled in zip(data, labels, strict=True):
        labelled[: len(row["prompt"])] = -100
    model = load(kind, "causal").train()

    def loss_of() -> Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    return {"versions": versions(), "data": data, "response": measure(model, loss_of)}


def measure(model: Any, loss_of: Any) -> dict[str, Any]:
    """One batch's loss and gradient, then the trajectory."""
    loss = loss_of()
    loss.backward()
    first = {"loss": loss.item(), "gradient": gradient_norms(model)}
    model.zero_grad()
    trajectory = list(steps(model, loss_of))
    return {**first, "trajectory": {key: [step[key] for step in trajectory] for key in trajectory[0]}}


def trainer_arguments(batch: int, accumulate: int = 1) -> dict[str, Any]:
    """Flags that TRL's trainers share: fp32 on the CPU, every batch the whole data."""
    return {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate, "max_steps": STEPS,
        "max_grad_norm": CLIP, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def measure_batch(trainer: Any, rows: list[dict[str, Any]], accumulate: int = 1) -> dict[str, Any]:
    """One batch's loss and gradient by a TRL trainer's collator and `compute_loss`."""
    model, size = trainer.model.train(), len(rows) // accumulate
    parts = []
    for start in range(0, len(rows), size):
        loss = trainer.compute_loss(model, trainer.data_collator(rows[start : start + size])) / accumulate
        loss.backward()
        parts.append(loss.item())
    measured = {"loss": sum(parts), "gradient": gradient_norms(model)}
    model.zero_grad()
    return measured


def measure_training(trainer: Any, accumulate: int = 1) -> dict[str, Any]:
    """The trajectory of a TRL trainer's `train`."""
    losses, compute_loss = [], trainer.compute_loss

    def listen(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        losses.append(result.item())
        return result

    trainer.compute_loss = listen
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    trajectory = {
        "loss": [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)],
        "grad_norm": [float(entry["grad_norm"]) for entry in logs],
        "lr": [entry["learning_rate"] for entry in logs],
    }
    assert all(len(values) == STEPS for values in trajectory.values()), trajectory
    return trajectory


def record_rm(kind: str) -> dict[str, Any]:
    """RewardTrainer: plain, with margins, with centering, with both."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    data = preference_data()
    content: dict[str, Any] = {"versions": versions("trl"), "data": data, "center_rewards_coefficient": CENTERING}
    for name in ("plain", "margin", "center", "margin_center"):
        rows = [
            {"chosen_ids": row["prompt"] + row["chosen"], "rejected_ids": row["prompt"] + row["rejected"]}
            | ({"margin": row["margin"]} if "margin" in name else {})
            for row in data
        ]
        model = load(kind, "reward")
        trainer = RewardTrainer(
            model=model,
            args=RewardConfig(
                **trainer_arguments(len(rows)), center_rewards_coefficient=CENTERING if "center" in name else None
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
            optimizers=optimizer_and_schedule(model),
        )
        content[name] = {**measure_batch(trainer, rows), "trajectory": measure_training(trainer)}
    return content


def record_dpo(kind: str) -> dict[str, Any]:
    """DPOTrainer: plain, with label smoothing, without a reference.

    The loss and gradient of one batch are against another model, the trajectory is against the model as it started.

    TRL 1.16 has dropped the last two from its `sigmoid` loss. Its `aot` loss still has the smoothing, and is the same
    formula where a batch is one pair, since it sorts within the batch; the batches are accumulated here. A reference
    whose log-probabilities are all 0 is none.
    """
    data = preference_data()
    content: dict[str, Any] = {"versions": versions("trl"), "data": data}
    content |= {"beta": DPO_BETA, "label_smoothing": SMOOTHING}
    for name in ("plain", "smoothing", "reference_free"):
        rows = [{f"{key}_ids": row[key] for key in ("prompt", "chosen", "rejected")} for row in data]
        if name == "reference_free":
            rows = [{**row, "ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0} for row in rows]
        accumulate = len(rows) if name == "smoothing" else 1
        batch = measure_batch(dpo_trainer(kind, name, rows, accumulate, "reference"), rows, accumulate)
        trajectory = measure_training(dpo_trainer(kind, name, rows, accumulate, "causal"), accumulate)
        content[name] = {**batch, "trajectory": trajectory}
    return content


def dpo_trainer(kind: str, name: str, rows: list[dict[str, Any]], accumulate: int, reference: str) -> Any:
    """TRL's DPOTrainer on rows of ids."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        """Takes ids instead of texts, and their columns where the reference is to be computed ahead."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, dataset: Any, *_: Any) -> Any:
            return dataset

    model = load(kind, "causal")
    return Tokenized(
        model=model,
        ref_model=load(kind, reference),
        args=DPOConfig(
            **trainer_arguments(len(rows) // accumulate, accumulate),
            beta=DPO_BETA,
            loss_type="aot" if name == "smoothing" else "sigmoid",
            label_smoothing=SMOOTHING if name == "smoothing" else 0.0,
            precompute_ref_log_probs=name == "reference_free",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=word_tokenizer(),
        optimizers=optimizer_and_schedule(model),
    )


def main() -> None:
    """Record the stages named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["models", "sft", "rm", "dpo", "ppo"])
    parser.add_argument("--out", type=Path, default=GOLDEN, help="folder of the golden files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for stage in args.stages:
        for kind in KINDS:
            if stage == "models":
                write_models(kind, args.out)
            elif stage == "ppo":
                from parity_ppo import record_ppo

                write_golden(args.out / f"ppo-{kind}.json", record_ppo(kind))
            else:
                recorder = {"sft": record_sft, "rm": record_rm, "dpo": record_dpo}[stage]
                write_golden(args.out / f"{stage}-{kind}.json", recorder(kind))


if __name__ == "__main__":
    main()
