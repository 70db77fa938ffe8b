#!/usr/bin/env python3
"""Stage 1: supervised fine-tuning of a language model on the finetune shards of a data folder."""

import math
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
    from rlhf_stages.data.collate import FinetuneBatch, PackedBatch, collate_finetune, collate_packed
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.packing import PackedShard, row_length
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.functional.tokens import sft_loss
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.models.forward import check_context, check_packing, check_texts, packed_logits, text_logits, unwrap
    from rlhf_stages.models.loading import load_causal, parameter_summary, prepare_training
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, check_validation, validation_batches
    from rlhf_stages.rollout.samples import load_example_prompt, log_example, sample
    from rlhf_stages.tracking import Averages, Tracker, peak_memory

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
    texts = (train, validation)
    if args.packing:
        length = row_length(args.packing_length, info, train)
        train, validation = (shard and PackedShard(shard, length, args.seed) for shard in (train, validation))
        collate = partial(collate_packed, length=length, **collate.keywords)
    else:
        collate = partial(collate, width=loop.few_widths(args, train))

    # 2. Model, optimizer, schedule
    fabric = loop.start_fabric(fabric_args, args.seed)
    model = prepare_training(load_causal(model_args.model_name, tokenizer, model_args), model_args)
    check_texts(model, *texts)
    if args.packing:
        check_packing(model)
    fabric.print(parameter_summary(model))
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, args.rate, plan.total_steps)

    # 3. Experiment folder; all that may be wrong with the input has been read before it is made
    example = load_example_prompt(info.path, fabric, len(tokenizer))
    check_context(model, example.input_ids.shape[1] + generation_args.max_new_tokens)
    groups = {"train_args": args, "model_args": model_args, "gen_args": generation_args, "fabric_args": fabric_args}
    check_validation(validation, args.validation_batch_size, fabric, args.eval_iters)
    experiment = loop.open_experiment(fabric, args, info, "sft", groups, [train, validation])
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    parts, averages = {"optimizer": optimizer, "schedule": schedule}, Averages(fabric, lenient=True)
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)
    progress = keeper.progress

    # 4. Loss: mean over the tokens that count, of all micro-batches and devices of a step
    def count(batch: FinetuneBatch) -> torch.Tensor:
        return (batch.targets[:, 1:] != info.ignore_index).sum()

    def loss_sum(batch: FinetuneBatch, label_smoothing: float = args.label_smoothing) -> torch.Tensor:
        if isinstance(batch, PackedBatch):
            logits = packed_logits(model, batch.input_ids, batch.position_ids)
        else:
            logits = text_logits(model, batch.input_ids, batch.attention_mask)
        return sft_loss(logits, batch.targets, info.ignore_index, label_smoothing, fused=model_args.compile)[0]

    @torch.no_grad()
    def validate(step: int) -> dict[str, float]:
        model.eval()
        validated = Averages(fabric)
        batches = validation_batches(
            validation, args.validation_batch_size, collate, fabric, args.eval_iters, args.micro_batch_tokens
        )
        for batch in batches:
            tokens = count(batch)
            validated.update({"val/loss": loss_sum(batch, label_smoothing=0.0) / tokens.clamp(min=1)}, weight=tokens)
        metrics = validated.compute()
        tracker.log(metrics, step)
        with loop.gathered(fabric, model):
            sampled = partial(sample, unwrap(model), tokenizer=tokenizer, args=generation_args, fabric=fabric)
            log_example(sampled, example, tokenizer, fabric, tracker, step)
        return metrics

    # 5. Train
    graphs = loop.make_graphs(fabric, args)
    if progress.step == 0:
        progress.first = validate(step=0)
    places, started = 0, time.perf_counter()
    for step, batches, records in plan.steps(train, collate, progress.step):
        model.train()
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val, graphs=graphs)
        rate = schedule.get_last_lr()[0]
        schedule.step()

        # 6. Log, validate, save
        keeper.note(step, update, records)
        averages.update({"train/loss": update.loss}, weight=update.count)
        averages.update({"info/grad_norm": update.norm, "info/padding_percentage": loop.padding(batches)})
        places += sum(batch.input_ids.numel() for batch in batches) * fabric.world_size
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            metrics = {
                "info/tokens_per_seconds": places / seconds,
                "info/time": seconds,
                **peak_memory(fabric.device),
                "info/lr": rate,
            }
            tracker.log({**averages.compute(), **metrics}, step)
            places = 0
        if keeper.evaluates(step):
            progress.metrics = validate(step)
        keeper.end_step(step, quality=-progress.metrics.get("val/loss", math.nan))

    # 7. Done
    loss, first = (metrics.get("val/loss", math.nan) for metrics in (progress.metrics, progress.first))
    summary = {"steps": progress.step, "val/loss": loss, "val/loss_before": first, "val/loss_best": -progress.best}
    has_preferences = (info.path / "preference_train.pt").is_file()
    script, reward = ("rlhf_rm.py", "") if has_preferences else ("rlhf_ppo.py", " --reward=...")
    parents = f"--data_dir={args.data_dir} --sft_experiment_dir={experiment.dir}"
    return keeper.finish(summary, f"python scripts/{script} {parents}{reward}")


if __name__ == "__main__":
    run(main)
