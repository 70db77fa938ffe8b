#!/usr/bin/env python3
"""Stages 2 and 3 in one: DPO on the preference shards of a data folder, without a reward model and without rollouts."""

import math
import time
from collections.abc import Mapping
from pathlib import Path

from rlhf_stages.args import DPOArgs, FabricArgs, GenerationArgs, ModelArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Train, validate, sample and save; returns the experiment folder."""
    args, model_args, generation_args, fabric_args = parse(
        DPOArgs, ModelArgs, GenerationArgs, FabricArgs, argv=argv, description=__doc__
    )

    from dataclasses import replace
    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import PreferenceBatch, collate_preference
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.functional.dpo import dpo_loss, implicit_rewards
    from rlhf_stages.functional.metrics import pair_statistics
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.models.forward import check_context, check_texts, sequence_logprobs, unwrap
    from rlhf_stages.models.frozen import load_reference
    from rlhf_stages.models.loading import load_causal, parameter_summary, prepare_training
    from rlhf_stages.models.start import starting_point
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, check_validation, validation_batches
    from rlhf_stages.rollout.samples import load_example_prompt, log_example, sample
    from rlhf_stages.tracking import Averages, Tracker, peak_memory

    # 1. Where to start, and the data
    start, parents = starting_point(model_args.model_name, sft=args.sft_experiment_dir)
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(str(start), model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, str(start))
    tokenizer.chat_template = info.chat_template or tokenizer.chat_template
    train = open_shard(info.path / "preference_train.pt", responses=2, vocab_size=len(tokenizer))
    validation = loop.open_validation(info.path, "preference_validation.pt", responses=2, vocab_size=len(tokenizer))
    width = loop.few_widths(args, train)
    collate = partial(collate_preference, pad_token_id=tokenizer.pad_token_id, width=width)

    # 2. Policy and reference. Dropout is off in both: with it the implicit rewards would start at noise instead of 0.
    # With LoRA the reference is the policy without its adapters, and no second model is loaded
    fabric = loop.start_fabric(fabric_args, args.seed)
    model_args = replace(model_args, disable_dropout=True)
    model = prepare_training(load_causal(start, tokenizer, model_args), model_args)
    check_texts(model, train, validation)
    fabric.print(parameter_summary(model))
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, args.rate, plan.total_steps)
    reference = None
    if not args.reference_free:
        freeze = partial(loop.freeze, fabric, args=args)
        reference = load_reference(model, start, tokenizer, args, model_args, freeze)

    # 3. Experiment folder; all that may be wrong with the input has been read before it is made
    example = load_example_prompt(info.path, fabric, len(tokenizer))
    check_context(model, example.input_ids.shape[1] + generation_args.max_new_tokens)
    groups = {"train_args": args, "model_args": model_args, "gen_args": generation_args, "fabric_args": fabric_args}
    check_validation(validation, args.validation_batch_size, fabric, args.eval_iters)
    experiment = loop.open_experiment(fabric, args, info, "dpo", groups, [train, validation], parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    parts, averages = {"optimizer": optimizer, "schedule": schedule}, Averages(fabric, lenient=True)
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)
    progress = keeper.progress

    # 4. Log-probability of every text of a batch, (S,): chosen and rejected in one forward
    def text_logprobs(of: torch.nn.Module, batch: PreferenceBatch) -> torch.Tensor:
        starts, size = batch.prompt_lengths, batch.response_mask.shape[1]
        if not args.use_masked_targets:
            starts, size = torch.zeros_like(starts), batch.input_ids.shape[1]
        return sequence_logprobs(of, batch.input_ids, batch.attention_mask, starts, batch.response_ends, size)

    @torch.no_grad()
    def ref_text_logprobs(batch: PreferenceBatch) -> torch.Tensor:
        if reference is None:
            return torch.zeros(len(batch.input_ids), device=fabric.device)
        with fabric.autocast():
            return text_logprobs(reference, batch)

    # 5. Loss: mean over the pairs of all micro-batches and devices of a step
    def count(batch: PreferenceBatch) -> torch.Tensor:
        return torch.full((), len(batch.better), device=fabric.device)

    def loss_sum(
        batch: PreferenceBatch, label_smoothing: float = args.label_smoothing
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of the pairs; and the log-probabilities (S,) of the texts."""
        better, worse = batch.better, batch.worse
        ref_logprobs = ref_text_logprobs(batch)
        logprobs = text_logprobs(model, batch)
        # not logprobs[better]: its backward sorts, and index_select's adds
        sides = [of.index_select(0, side) for of in (logprobs, ref_logprobs) for side in (better, worse)]
        loss, _ = dpo_loss(*sides, args.beta, label_smoothing)
        return loss, {"logprobs": logprobs, "ref_logprobs": ref_logprobs}

    def note_rewards(batch: PreferenceBatch, said: Mapping[str, torch.Tensor], prefix: str, into: Averages) -> None:
        """What the policy prefers to the reference."""
        better, worse, logprobs = batch.better, batch.worse, said["logprobs"]
        rewards = implicit_rewards(logprobs, said["ref_logprobs"], args.beta)
        statistics = pair_statistics(rewards[better], rewards[worse])
        named = {f"{prefix}/acc": statistics.pop("acc")}
        statistics["choosen_logprobs"] = logprobs[better].mean()
        statistics["rejected_logprobs"] = logprobs[worse].mean()
        group = "info" if prefix == "train" else prefix
        into.update(named | {f"{group}/{name}": value for name, value in statistics.items()}, weight=len(better))

    @torch.no_grad()
    def validate(step: int) -> dict[str, float]:
        model.eval()
        validated = Averages(fabric)
        batches = validation_batches(
            validation, args.validation_batch_size, collate, fabric, args.eval_iters, args.micro_batch_tokens
        )
        for batch in batches:
            loss, said = loss_sum(batch, label_smoothing=0.0)
            validated.update({"val/loss": loss / len(batch.better)}, weight=len(batch.better))
            note_rewards(batch, said, "val", validated)
        metrics = validated.compute()
        tracker.log(metrics, step)
        with loop.gathered(fabric, model):
            sampled = partial(sample, unwrap(model), tokenizer=tokenizer, args=generation_args, fabric=fabric)
            log_example(sampled, example, tokenizer, fabric, tracker, step)
        return metrics

    # 6. Train
    graphs = loop.make_graphs(fabric, args)
    if progress.step == 0:
        progress.first = validate(step=0)
    started = time.perf_counter()
    for step, batches, records in plan.steps(train, collate, progress.step):
        model.train()
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val, graphs=graphs)
        rate = schedule.get_last_lr()[0]
        schedule.step()

        # 7. Log, validate, save
        keeper.note(step, update, records)
        averages.update({"train/loss": update.loss}, weight=update.count)
        for batch, said in zip(batches, update.outputs, strict=True):
            note_rewards(batch, said, "train", averages)
        averages.update({"info/grad_norm": update.norm, "info/padding_percentage": loop.padding(batches)})
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            seconds, started = time.perf_counter() - started, time.perf_counter()
            numbers = {"info/time": seconds, "info/lr": rate} | peak_memory(fabric.device)
            tracker.log(averages.compute() | numbers, step)
        if keeper.evaluates(step):
            progress.metrics = validate(step)
        # the loss and not the accuracy, which knows only the sign of a margin: DPO overfits by its size
        keeper.end_step(step, quality=-progress.metrics.get("val/loss", math.nan))

    # 8. Done
    return keeper.finish({"steps": progress.step, **progress.metrics}, f"python scripts/chat.py {experiment.dir}")


if __name__ == "__main__":
    run(main)
