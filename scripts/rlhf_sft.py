#!/usr/bin/env python3
"""Stage 1: supervised fine-tuning of a language model on the finetune shards of a data folder."""

import time
from pathlib import Path

from rlhf_stages.args import FabricArgs, GenerationArgs, ModelArgs, SFTArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Train, validate, sample and save; returns the experiment folder."""
    args, model_args, generation_args, fabric_args = parse(
        SFTArgs, ModelArgs, GenerationArgs, FabricArgs, argv=argv, description=__doc__
    )

    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import FinetuneBatch, collate_finetune
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.functional.losses import sft_loss
    from rlhf_stages.models.forward import text_logits, unwrap
    from rlhf_stages.models.loading import load_causal, parameter_summary, prepare_training
    from rlhf_stages.optim import make_optimizer, warmup_cosine
    from rlhf_stages.rollout.samples import load_example_prompt, log_example
    from rlhf_stages.tracking import Averages, Tracker

    # 1. Data: shards of token ids, and the tokenizer that made them
    if model_args.model_name is None:
        raise ValueError("--model_name is required: the model to fine-tune (hub id or folder)")
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(model_args.model_name, model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, model_args.model_name)
    tokenizer.chat_template = info.chat_template or tokenizer.chat_template
    train = open_shard(info.path / "finetune_train.pt", responses=1, vocab_size=len(tokenizer))
    validation = loop.open_validation(info.path, "finetune_validation.pt", responses=1, vocab_size=len(tokenizer))
    collate = partial(
        collate_finetune,
        pad_token_id=tokenizer.pad_token_id,
        ignore_index=info.ignore_index,
        use_targets=args.use_targets,
        mask_prompt=info.mask_prompt,
    )

    # 2. Model, optimizer, schedule
    fabric = loop.start_fabric(fabric_args, args.seed)
    model = prepare_training(load_causal(model_args.model_name, tokenizer, model_args), model_args)
    fabric.print(parameter_summary(model))
    optimizer = make_optimizer(model, args, args.learning_rate)
    model, optimizer = fabric.setup(model, optimizer)
    plan = loop.Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size)
    schedule = warmup_cosine(optimizer, args.learning_rate, args.lr_warmup_steps, plan.total_steps)

    # 3. Experiment folder; all that may be wrong with the input has been read before it is made
    example = load_example_prompt(info.path, fabric, len(tokenizer))
    groups = {"train_args": args, "model_args": model_args, "gen_args": generation_args, "fabric_args": fabric_args}
    experiment = loop.open_experiment(fabric, args, info, "sft", groups)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)

    # 4. Loss: mean over the tokens that count, of all micro-batches and devices of a step
    def count(batch: FinetuneBatch) -> torch.Tensor:
        return (batch.targets[:, 1:] != info.ignore_index).sum()

    def loss_sum(batch: FinetuneBatch, label_smoothing: float = args.label_smoothing) -> torch.Tensor:
        logits = text_logits(model, batch.input_ids, batch.attention_mask)
        return sft_loss(logits, batch.targets, info.ignore_index, label_smoothing)[0]

    @torch.no_grad()
    def validate(step: int) -> float:
        model.eval()
        averages = Averages(fabric)
        for batch in loop.validation_batches(validation, args.micro_batch_size, collate, fabric, args.eval_iters):
            tokens = count(batch)
            averages.update({"val/loss": loss_sum(batch, label_smoothing=0.0) / tokens.clamp(min=1)}, weight=tokens)
        metrics = averages.compute()
        tracker.log(metrics, step)
        log_example(unwrap(model), example, tokenizer, generation_args, fabric, tracker, step)
        return metrics.get("val/loss", float("nan"))

    # 5. Train
    first, best = validate(step=0), float("inf")
    averages, step, places, started = Averages(fabric), 0, 0, time.perf_counter()
    for micro_batches in plan.steps(train, collate):
        model.train()
        loss, counted = loop.accumulate(fabric, model, micro_batches, loss_sum, count)
        grad_norm = loop.optimizer_step(fabric, model, optimizer, args.gradient_clip_val)
        rate = schedule.get_last_lr()[0]
        schedule.step()
        step += 1

        # 6. Log, validate, save
        averages.update({"train/loss": loss}, weight=counted)
        averages.update({"info/grad_norm": grad_norm, "info/padding_percentage": loop.padding(micro_batches)})
        places += sum(batch.input_ids.numel() for batch in micro_batches) * fabric.world_size
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            metrics = {
                "info/tokens_per_seconds": places / seconds,
                "info/time": seconds,
                "info/lr": rate,
            }
            tracker.log({**averages.compute(), **metrics}, step)
            places = 0
        saving = loop.is_due(step, args.save_interval, plan.total_steps)
        if saving or loop.is_due(step, args.eval_interval, plan.total_steps):
            loss = validate(step)
        if saving:
            loop.save_checkpoint(fabric, experiment, step, model, tokenizer)
            if not loss > best:
                best = loss
                experiment.mark_best(step)

    # 7. Done
    tracker.close()
    summary = {"steps": step, "val/loss": loss, "val/loss_before": first, "val/loss_best": best}
    next_command = f"python scripts/rlhf_rm.py --data_dir={args.data_dir} --sft_experiment_dir={experiment.dir}"
    return loop.finish(fabric, experiment, summary, next_command)


if __name__ == "__main__":
    run(main)
