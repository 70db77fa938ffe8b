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
    from rlhf_stages.models.forward import check_texts
    from rlhf_stages.models.loading import load_scalar, parameter_summary, prepare_training
    from rlhf_stages.models.scalar import store_reward_scale
    from rlhf_stages.models.start import starting_point
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, check_validation, validation_batches
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
    padding = {"pad_token_id": tokenizer.pad_token_id, "width": loop.few_widths(args, train)}
    collate = partial(collate_preference, use_margin=args.use_margin, **padding)

    # 2. Model, optimizer, schedule
    fabric = loop.start_fabric(fabric_args, args.seed)
    by_token = args.reward_loss != "last_token"
    model = load_scalar(start, tokenizer, model_args, trained_head=False, token_scores=by_token)
    model = prepare_training(model, model_args)
    check_texts(model, train, validation)
    fabric.print(parameter_summary(model))
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, args.rate, plan.total_steps)

    # 3. Experiment folder
    groups = {"train_args": args, "model_args": model_args, "fabric_args": fabric_args}
    check_validation(validation, args.validation_batch_size, fabric, args.eval_iters)
    experiment = loop.open_experiment(fabric, args, info, "rm", groups, [train, validation], parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    parts, averages = {"optimizer": optimizer, "schedule": schedule}, Averages(fabric, lenient=True)
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)
    progress = keeper.progress

    # 4. Loss: mean over all pairs of the lists in all micro-batches and devices of a step
    def count(batch: PreferenceBatch) -> torch.Tensor:
        return torch.full((), len(batch.better), device=fabric.device)

    def loss_sum(batch: PreferenceBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of the pairs; and the scores (S,) of the texts."""
        scores = model(batch.input_ids, batch.attention_mask)  # (S, T): all texts of the lists in one forward
        better, worse, lengths = batch.better, batch.worse, batch.lengths
        # not scores[better]: its backward sorts, and index_select's adds
        sides = scores.index_select(0, better), scores.index_select(0, worse)
        loss, _ = REWARD_LOSSES[args.reward_loss](*sides, batch.starts, lengths[better], lengths[worse], batch.margins)
        ends = score_at(scores, lengths)
        if args.center_rewards_coeff:
            loss = loss + args.center_rewards_coeff * centering_loss(ends[better], ends[worse])[0]
        return loss, {"scores": ends}

    def note_order(batch: PreferenceBatch, ends: torch.Tensor, prefix: str, into: Averages) -> None:
        """How the scores of the texts order them."""
        scores = ends[batch.better], ends[batch.worse]
        statistics, (in_order, lists) = pair_statistics(*scores), order_accuracy(*scores, batch.lists)
        group = "info" if prefix == "train" else prefix
        named = {f"{prefix}/acc": statistics.pop("acc")} | {f"{group}/{name}": v for name, v in statistics.items()}
        into.update(named, weight=len(batch.better))
        into.update({f"{prefix}/order_acc": in_order}, weight=lists)

    @torch.no_grad()
    def validate(step: int) -> dict[str, float]:
        model.eval()
        validated, ends = Averages(fabric), [torch.empty(0, device=fabric.device)]
        batches = validation_batches(
            validation, args.validation_batch_size, collate, fabric, args.eval_iters, args.micro_batch_tokens
        )
        for batch in batches:
            loss, said = loss_sum(batch)
            validated.update({"val/loss": loss / len(batch.better)}, weight=len(batch.better))
            note_order(batch, said["scores"], "val", validated)
            ends.append(said["scores"])
        metrics = validated.compute()
        if validation is not None:
            metrics |= distribution("val/reward", torch.cat(ends), fabric)
        tracker.log(metrics, step)
        return metrics

    # 5. Train
    graphs = loop.make_graphs(fabric, args)
    started = time.perf_counter()
    for step, batches, records in plan.steps(train, collate, progress.step):
        model.train()
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val, graphs=graphs)
        rate = schedule.get_last_lr()[0]
        schedule.step()

        # 6. Log, validate, save
        keeper.note(step, update, records)
        averages.update({"train/loss": update.loss}, weight=update.count)
        for batch, said in zip(batches, update.outputs, strict=True):
            note_order(batch, said["scores"], "train", averages)
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
