#!/usr/bin/env python3
"""A classifier of texts (intent, sentiment, ...) from labelled texts, started from a causal model or an encoder."""

import math
import time
from pathlib import Path

from rlhf_stages.args import ClassifierArgs, FabricArgs, ModelArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Train, validate, test and save; returns the experiment folder."""
    args, model_args, fabric_args = parse(ClassifierArgs, ModelArgs, FabricArgs, argv=argv, description=__doc__)

    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import LabelledBatch, collate_labelled
    from rlhf_stages.data.labelled import LabelledTexts, read_labelled
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.evaluation.classification import LabelMetrics, class_table, majority_accuracy
    from rlhf_stages.functional.losses import balanced_weights, classification_loss
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.models.classifier import max_tokens, new_classifier
    from rlhf_stages.models.loading import parameter_summary, prepare_training
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, check_validation, validation_batches
    from rlhf_stages.tracking import Averages, Tracker, peak_memory

    # 1. Where to start, and the texts
    start = model_args.model_name
    if start is None:
        raise ValueError("--model_name is required: the causal model or encoder to make a classifier of")
    data = read_labelled(args)
    tokenizer = load_tokenizer(start, model_args.trust_remote_code)

    # 2. Model, optimizer, schedule; the checkpoint's tokenizer knows how long a text may be
    fabric = loop.start_fabric(fabric_args, args.seed)
    fabric.print(data.summary())
    model = new_classifier(start, tokenizer, model_args, data.labels)
    tokenizer.model_max_length = min(args.max_length, max_tokens(model, tokenizer))
    tokenizer.truncation_side = "left"
    train, validation, test = (
        data.encode(split, tokenizer, tokenizer.model_max_length) for split in ("train", "validation", "test")
    )
    width = loop.few_widths(args, train)
    collate = partial(collate_labelled, pad_token_id=tokenizer.pad_token_id, width=width)
    model = prepare_training(model, model_args)
    fabric.print(parameter_summary(model))
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, args.rate, plan.total_steps)

    # 3. Experiment folder
    groups = {"train_args": args, "model_args": model_args, "fabric_args": fabric_args}
    for texts, limit in ((validation, args.eval_iters), (test, None)):
        check_validation(texts, args.validation_batch_size, fabric, limit)
    experiment = loop.open_experiment(fabric, args, data, "classifier", groups, [train, validation, test])
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    parts, averages = {"optimizer": optimizer, "schedule": schedule}, Averages(fabric, lenient=True)
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)
    progress = keeper.progress

    # 4. Loss: mean over all texts in all micro-batches and devices of a step, each with the weight of its label
    counts = train.label_counts
    weights = (balanced_weights(counts) if args.balance else torch.ones(len(counts))).to(fabric.device)

    def count(batch: LabelledBatch) -> torch.Tensor:
        return weights[batch.labels].sum()

    def loss_sum(batch: LabelledBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of the texts; and their logits (B, L)."""
        logits = model(batch.input_ids, batch.attention_mask)
        return classification_loss(logits, batch.labels, weights)[0], {"logits": logits}

    @torch.no_grad()
    def evaluate(
        texts: LabelledTexts | None, prefix: str, limit: int | None
    ) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Loss, accuracy and macro-F1; and the numbers of each label."""
        if texts is None:
            return {}, {}
        model.eval()
        means, right = Averages(fabric), LabelMetrics(data.labels, fabric.device)
        batches = validation_batches(texts, args.validation_batch_size, collate, fabric, limit, args.micro_batch_tokens)
        for batch in batches:
            loss, said = loss_sum(batch)
            means.update({f"{prefix}/loss": loss / count(batch)}, weight=count(batch))
            right.update(said["logits"], batch.labels)
        metrics, classes = right.compute(prefix)
        return means.compute() | metrics, classes

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
            is_right = said["logits"].argmax(1) == batch.labels
            averages.update({"train/acc": is_right.float().mean()}, weight=len(is_right))
        averages.update({"info/grad_norm": update.norm, "info/padding_percentage": loop.padding(batches)})
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            numbers = {"info/time": seconds, "info/lr": rate} | peak_memory(fabric.device)
            tracker.log(averages.compute() | numbers, step)
        if keeper.evaluates(step):
            progress.metrics, _ = evaluate(validation, "val", args.eval_iters)
            tracker.log(progress.metrics, step)
        keeper.end_step(step, quality=progress.metrics.get("val/acc", math.nan))

    # 7. Test and done
    summary = {"steps": progress.step, **progress.metrics}
    if test is not None:
        metrics, classes = evaluate(test, "test", None)
        majority = majority_accuracy(counts, test.label_counts)
        summary |= {**metrics, "test/majority_acc": majority, "test/labels": classes}
        tracker.message(class_table(classes))
    reward = f"--reward label=1,type=classifier,model={experiment.dir},label=<{'|'.join(data.labels[:5])}>"
    start = f"python scripts/rlhf_ppo.py --data_dir={args.data_dir or '<data-dir>'} --sft_experiment_dir=<sft-dir>"
    return keeper.finish(summary, f"{start} {reward}")


if __name__ == "__main__":
    run(main)
