#!/usr/bin/env python3
"""Stage 2: a reward model from the preference shards of a data folder, started from an SFT experiment or a model."""

import time
from pathlib import Path

from rlhf_stages.args import FabricArgs, ModelArgs, RMArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Train, validate and save; returns the experiment folder."""
    args, model_args, fabric_args = parse(RMArgs, ModelArgs, FabricArgs, argv=argv, description=__doc__)

    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import PreferenceBatch, collate_preference
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.functional.losses import REWARD_LOSSES, score_at
    from rlhf_stages.functional.metrics import pair_statistics
    from rlhf_stages.models.loading import load_scalar, parameter_summary, prepare_training
    from rlhf_stages.models.start import starting_point
    from rlhf_stages.optim import make_optimizer, warmup_cosine
    from rlhf_stages.tracking import Averages, Tracker

    # 1. Where to start, and the data
    start, parents = starting_point(model_args.model_name, sft=args.sft_experiment_dir)
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(str(start), model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, str(start))
    tokenizer.chat_template = info.chat_template or tokenizer.chat_template
    train = open_shard(info.path / "preference_train.pt", responses=2, vocab_size=len(tokenizer))
    validation = loop.open_validation(info.path, "preference_validation.pt", responses=2, vocab_size=len(tokenizer))
    collate = partial(collate_preference, pad_token_id=tokenizer.pad_token_id)

    # 2. Model, optimizer, schedule
    fabric = loop.start_fabric(fabric_args, args.seed)
    model = prepare_training(load_scalar(start, tokenizer, model_args, trained_head=False), model_args)
    fabric.print(parameter_summary(model))
    optimizer = make_optimizer(model, args, args.learning_rate)
    model, optimizer = fabric.setup(model, optimizer)
    plan = loop.Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size)
    schedule = warmup_cosine(optimizer, args.learning_rate, args.lr_warmup_steps, plan.total_steps)

    # 3. Experiment folder
    groups = {"train_args": args, "model_args": model_args, "fabric_args": fabric_args}
    experiment = loop.open_experiment(fabric, args, info, "rm", groups, parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)

    # 4. Loss: mean over the pairs of all micro-batches and devices of a step
    averages = Averages(fabric)

    def count(batch: PreferenceBatch) -> torch.Tensor:
        return torch.tensor(len(batch.better), device=fabric.device)

    def loss_sum(batch: PreferenceBatch, prefix: str = "train", into: Averages = averages) -> torch.Tensor:
        scores = model(batch.input_ids, batch.attention_mask)  # (S, T): chosen and rejected in one forward
        better, worse = batch.better, batch.worse
        loss, pairs = REWARD_LOSSES[args.reward_loss](
            scores[better], scores[worse], batch.starts, batch.lengths[better], batch.lengths[worse]
        )
        ends = score_at(scores.detach(), batch.lengths)
        statistics = pair_statistics(ends[better], ends[worse])
        accuracy = {f"{prefix}/loss": loss.detach() / pairs, f"{prefix}/acc": statistics.pop("acc")}
        group = "info" if prefix == "train" else prefix
        into.update({**accuracy, **{f"{group}/{name}": value for name, value in statistics.items()}}, weight=pairs)
        return loss

    @torch.no_grad()
    def validate(step: int) -> dict[str, float]:
        model.eval()
        validated = Averages(fabric)
        for batch in loop.validation_batches(validation, args.micro_batch_size, collate, fabric, args.eval_iters):
            loss_sum(batch, "val", validated)
        metrics = validated.compute()
        tracker.log(metrics, step)
        return metrics

    # 5. Train
    best, step, started = float("-inf"), 0, time.perf_counter()
    for micro_batches in plan.steps(train, collate):
        model.train()
        loop.accumulate(fabric, model, micro_batches, loss_sum, count)
        grad_norm = loop.optimizer_step(fabric, model, optimizer, args.gradient_clip_val)
        rate = schedule.get_last_lr()[0]
        schedule.step()
        step += 1

        # 6. Log, validate, save
        averages.update({"info/grad_norm": grad_norm, "info/padding_percentage": loop.padding(micro_batches)})
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            tracker.log({**averages.compute(), "info/time": seconds, "info/lr": rate}, step)
        saving = loop.is_due(step, args.save_interval, plan.total_steps)
        if saving or loop.is_due(step, args.eval_interval, plan.total_steps):
            metrics = validate(step)
        if saving:
            loop.save_checkpoint(fabric, experiment, step, model, tokenizer)
            if not metrics.get("val/acc", best) < best:
                best = metrics.get("val/acc", best)
                experiment.mark_best(step)

    # 7. Done
    tracker.close()
    sft = args.sft_experiment_dir or "<sft-dir>"
    next_command = f"python scripts/rlhf_ppo.py --data_dir={args.data_dir} --sft_experiment_dir={sft}"
    summary = {"steps": step, **metrics}
    return loop.finish(fabric, experiment, summary, f"{next_command} --rm_experiment_dir={experiment.dir}")


if __name__ == "__main__":
    run(main)
