#!/usr/bin/env python3
"""Stage 2: a reward model from the preference shards of a data folder, started from an SFT experiment or a model."""

import math
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
    from rlhf_stages.functional.losses import REWARD_LOSSES, centering_loss, score_at
    from rlhf_stages.functional.metrics import order_accuracy, pair_statistics
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.models.loading import load_scalar, parameter_summary, prepare_training
    from rlhf_stages.models.scalar import store_reward_scale
    from rlhf_stages.models.start import starting_point
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, validation_batches
    from rlhf_stages.tracking import Averages, Tracker, distribution, peak_memory

    # 1. Where to start, and the data
    start, parents = starting_point(model_args.model_name, sft=args.sft_experiment_dir)
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(str(start), model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, str(start))
    tokenizer.chat_template = info.chat_template or tokenizer.chat_template
    kind = {"responses": 2, "vocab_size": len(tokenizer), "rated": args.use_margin}  # ranked lists of 2 or more
    train = open_shard(info.path / "preference_train.pt", **kind)
    validation = loop.open_validation(info.path, "preference_validation.pt", **kind)
    collate = partial(collate_preference, pad_token_id=tokenizer.pad_token_id, use_margin=args.use_margin)

    # 2. Model, optimizer, schedule
    fabric = loop.start_fabric(fabric_args, args.seed)
    by_token = args.reward_loss != "last_token"
    model = load_scalar(start, tokenizer, model_args, trained_head=False, token_scores=by_token)
    model = prepare_training(model, model_args)
    fabric.print(parameter_summary(model))
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, args.rate, plan.total_steps)

    # 3. Experiment folder
    groups = {"train_args": args, "model_args": model_args, "fabric_args": fabric_args}
    experiment = loop.open_experiment(fabric, args, info, "rm", groups, [train, validation], parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    parts, averages = {"optimizer": optimizer, "schedule": schedule}, Averages(fabric, lenient=True)
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)
    progress = keeper.progress

    # 4. Loss: mean over all pairs of the lists in all micro-batches and devices of a step
    def count(batch: PreferenceBatch) -> torch.Tensor:
        return torch.tensor(len(batch.better), device=fabric.device)

    def loss_and_scores(batch: PreferenceBatch, prefix: str, into: Averages) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of the pairs, and the scores (S,) of the texts."""
        scores = model(batch.input_ids, batch.attention_mask)  # (S, T): all texts of the lists in one forward
        better, worse, lengths = batch.better, batch.worse, batch.lengths
        loss, pairs = REWARD_LOSSES[args.reward_loss](
            scores[better], scores[worse], batch.starts, lengths[better], lengths[worse], batch.margins
        )
        ends = score_at(scores, lengths)
        if args.center_rewards_coeff:
            loss = loss + args.center_rewards_coeff * centering_loss(ends[better], ends[worse])[0]
        ends = ends.detach()
        statistics = pair_statistics(ends[better], ends[worse])
        in_order, lists = order_accuracy(ends[better], ends[worse], batch.lists)
        accuracy = {f"{prefix}/loss": loss.detach() / pairs, f"{prefix}/acc": statistics.pop("acc")}
        group = "info" if prefix == "train" else prefix
        into.update({**accuracy, **{f"{group}/{name}": value for name, value in statistics.items()}}, weight=pairs)
        into.update({f"{prefix}/order_acc": in_order}, weight=lists)
        return loss, ends

    def loss_sum(batch: PreferenceBatch) -> torch.Tensor:
        return loss_and_scores(batch, "train", averages)[0]

    @torch.no_grad()
    def validate(step: int) -> dict[str, float]:
        model.eval()
        validated, ends = Averages(fabric), [torch.empty(0, device=fabric.device)]
        batches = validation_batches(
            validation, args.validation_batch_size, collate, fabric, args.eval_iters, args.micro_batch_tokens
        )
        for batch in batches:
            ends.append(loss_and_scores(batch, "val", validated)[1])
        metrics = validated.compute()
        if validation is not None:
            metrics |= distribution("val/reward", torch.cat(ends), fabric)
        tracker.log(metrics, step)
        return metrics

    # 5. Train
    started = time.perf_counter()
    for step, batches, records in plan.steps(train, collate, progress.step):
        model.train()
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val)
        rate = schedule.get_last_lr()[0]
        schedule.step()

        # 6. Log, validate, save
        keeper.note(step, update, records)
        averages.update({"info/grad_norm": update.norm, "info/padding_percentage": loop.padding(batches)})
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            numbers = {"info/time": seconds, "info/lr": rate} | peak_memory(fabric.device)
            tracker.log(averages.compute() | numbers, step)
        if keeper.evaluates(step):
            progress.metrics = validate(step)
            store_reward_scale(model, progress.metrics.get("val/reward_mean"), progress.metrics.get("val/reward_std"))
        keeper.end_step(step, quality=progress.metrics.get("val/acc", math.nan))

    # 7. Done
    sft = args.sft_experiment_dir or "<sft-dir>"
    next_command = f"python scripts/rlhf_ppo.py --data_dir={args.data_dir} --sft_experiment_dir={sft}"
    summary = {"steps": progress.step, **progress.metrics}
    return keeper.finish(summary, f"{next_command} --rm_experiment_dir={experiment.dir}")


if __name__ == "__main__":
    run(main)
