#!/usr/bin/env python3
"""Stage 3: PPO. The actor of an SFT experiment learns to please a reward model, or any other rewards."""

import math
from pathlib import Path
from typing import Any

from rlhf_stages.args import FabricArgs, ModelArgs, PPOArgs, RolloutArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Roll out, score, update, save; returns the experiment folder."""
    args, model_args, rollout_args, fabric_args = parse(
        PPOArgs, ModelArgs, RolloutArgs, FabricArgs, argv=argv, description=__doc__
    )

    from dataclasses import replace
    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import PromptBatch, Width, collate_prompts
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.experiment import parent_checkpoint
    from rlhf_stages.functional.masking import moments
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.kl_control import make_kl_control
    from rlhf_stages.models.actor_critic import policy_of
    from rlhf_stages.models.frozen import load_reference
    from rlhf_stages.models.loading import parameter_summary
    from rlhf_stages.models.sharing import shared_backbone
    from rlhf_stages.models.start import check_model_name, start_actor, start_critic
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, check_validation, update_windows, validation_batches
    from rlhf_stages.plugins import load_plugins
    from rlhf_stages.rewards.run import plugin_metrics, rewards_of_run
    from rlhf_stages.rollout.collect import Fit, Rollout, not_finite, policy_outputs, response_values, score_batches
    from rlhf_stages.rollout.experience import Experience, kl_moved, make_experience, policy_objective, value_objective
    from rlhf_stages.rollout.generation import make_sampler
    from rlhf_stages.rollout.generators import make_generator
    from rlhf_stages.rollout.health import health_metrics
    from rlhf_stages.rollout.monitor import HealthMonitor
    from rlhf_stages.rollout.samples import load_example_prompt, log_example, log_rollout_sample
    from rlhf_stages.rollout.self_check import self_check
    from rlhf_stages.rollout.statistics import experience_metrics, rollout_metrics
    from rlhf_stages.tracking import Averages, Stopwatch, Tracker, peak_memory
    from rlhf_stages.value_norm import ValueNorm

    # 1. Parents, and the prompts
    load_plugins(args.plugins)
    sft_checkpoint, sft_args = parent_checkpoint(args.sft_experiment_dir, stage="sft", flag="--sft_experiment_dir")
    check_model_name(model_args.model_name, sft_args, "--sft_experiment_dir")
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(str(sft_checkpoint), model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, str(sft_checkpoint))
    shard, validation = loop.open_prompts(info.path, vocab_size=len(tokenizer))
    collate = partial(collate_prompts, pad_token_id=tokenizer.pad_token_id)
    sampler, group_size = make_sampler(rollout_args, tokenizer, model_args.compile), rollout_args.num_return_sequences
    batch_size = args.rollout_mini_batch_size

    # 2. Four models. Dropout is off in all: with it the ratio of new to old would start at noise instead of 1
    fabric = loop.start_fabric(fabric_args, args.seed)
    args.check_rollout(group_size, fabric.world_size)
    example = load_example_prompt(info.path, fabric, len(tokenizer))
    longest = max(loop.longest_prompt(shard, validation), example.input_ids.shape[1]) + rollout_args.max_new_tokens
    plan = Plan(fabric, args, len(shard), mini=args.rollout_size, micro=batch_size)
    model_args = replace(model_args, disable_dropout=True)
    actor = start_actor(sft_checkpoint, tokenizer, args, model_args, longest)
    backbone = shared_backbone(args, model_args, fabric_args, policy_of(actor), sft_checkpoint)
    rewards, scale, rm_checkpoint = rewards_of_run(args, model_args, tokenizer, fabric, longest, backbone)
    fabric.print(f"actor: {parameter_summary(actor)}")
    actor, actor_optimizer, actor_schedule = set_up(fabric, actor, args, args.actor_rate, plan.total_steps)
    freeze = partial(loop.freeze, fabric, args=args)
    reference = load_reference(actor, sft_checkpoint, tokenizer, args, model_args, freeze)
    critic = critic_optimizer = critic_schedule = None
    if args.critic == "separate":
        critic = start_critic(sft_checkpoint, rm_checkpoint, tokenizer, args, model_args, longest, backbone)
        fabric.print(f"critic: {parameter_summary(critic)}")
        critic, critic_optimizer, critic_schedule = set_up(fabric, critic, args, args.critic_rate, plan.total_steps)
    generator = make_generator(actor, rollout_args, sampler, tokenizer, fabric, (batch_size, longest))
    kl_control = make_kl_control(args.kl_control, args.init_kl_coeff, args.target_kl_coeff, args.kl_horizon)
    value_norm = ValueNorm() if args.normalize_values else None
    graphs, watch = loop.make_graphs(fabric, args), Stopwatch(fabric.device)
    fit = graphs and Fit(args.micro_batch_size, Width(longest), Width(rollout_args.max_new_tokens))

    # 3. Experiment folder; all that may be wrong with the input has been read before it is made
    groups = {"train_args": args, "model_args": model_args, "gen_args": rollout_args, "fabric_args": fabric_args}
    parents, everything = {"sft": sft_checkpoint, **rewards.parents}, groups | {"rewards": rewards.settings}
    check_validation(validation, batch_size, fabric, args.eval_iters)
    experiment = loop.open_experiment(fabric, args, info, "ppo", everything, [shard, validation], parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)
    models, averages, health = {"": actor, "critic": critic}, Averages(fabric, lenient=True), HealthMonitor()
    parts = {"actor_optimizer": actor_optimizer, "actor_schedule": actor_schedule, "kl_control": kl_control}
    parts |= {"critic_optimizer": critic_optimizer, "critic_schedule": critic_schedule}
    parts |= {"value_norm": value_norm, "health": health, "rewards": rewards}
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, models, parts, averages)
    progress = keeper.progress

    # 4. Rollout: sample from the actor, then let all models and rewards read the result
    @loop.gathered(fabric, actor)  # once, not for each token
    def roll_out(batches: list[PromptBatch], step: float) -> Rollout:
        readers = {"actor": actor, "reference": reference, "critic": critic, "scorer": rewards.scorer(tokenizer, step)}
        with watch("generation"):
            responses = generator(batches)
        with fabric.autocast():
            return score_batches(batches, responses, **readers, sampler=sampler, value_norm=value_norm)

    # 5. Losses: means over the response tokens of all micro-batches and devices of a step
    def count(batch: Experience) -> torch.Tensor:
        return batch.rollout.response_mask.sum()

    def actor_loss_sum(batch: Experience) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids, want_entropies = batch.rollout.response_ids, args.entropy_coeff > 0
        logprobs, entropies, values = policy_outputs(actor, batch.rollout.texts, ids, sampler, want_entropies)
        loss, statistics = policy_objective(batch, logprobs, entropies, args)
        if values is not None:
            loss = loss + args.vf_coeff * value_objective(batch, values, args)
        return loss, statistics

    def critic_loss_sum(batch: Experience) -> torch.Tensor:
        return value_objective(batch, response_values(critic, batch.rollout.texts), args)

    @torch.no_grad()
    @loop.gathered(fabric, actor)
    def validate(step: int) -> dict[str, float]:
        validated = Averages(fabric)
        for prompts in validation_batches(validation, batch_size, collate, fabric, args.eval_iters):
            rollout = rewards.yardstick(roll_out([prompts], math.inf))
            validated.update(rollout_metrics(rollout, "val") | rewards.means(rollout), weight=len(rollout.scores))
        tracker.log(metrics := validated.compute(), step)
        log_example(lambda prompts: generator([prompts])[0], example, tokenizer, fabric, tracker, step)
        return metrics

    # 6. What is learned from a rollout: updates over its mini-batches, then the KL coefficient and the scale of values
    def improve(name: str, model: Any, optimizer: Any, batches: list[Experience], loss_sum: Any) -> loop.Update:
        weight = args.vf_coeff if name == "critic" else 1.0
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val, weight, graphs)
        for batch, statistics in zip(batches, update.outputs, strict=True):
            averages.update({f"info/{name}": value for name, value in statistics.items()}, weight=count(batch))
        averages.update({f"train/{name}_loss": update.loss, f"info/{name}_grad_norm": update.norm}, weight=update.count)
        return update

    def learn(step: int, rollout: Rollout, prompt_of_row: list[int]) -> dict[str, float]:
        global_sum = partial(loop.global_sum, fabric)
        experience = make_experience(rollout, args, kl_control.coeff, group_size, global_sum, scale)
        learned = experience.normalized(value_norm)
        for model in filter(None, (actor, critic)):
            model.train()
        too_far = False
        for window in update_windows(fabric, [sum(pair) for pair in rollout.lengths], args, step - 1):
            batches = [learned.select(rows, fit) for rows in window]
            prompts = [[prompt_of_row[row] for row in rows] for rows in window]
            if step > args.critic_warmup_steps:
                keeper.note(step, update := improve("actor", actor, actor_optimizer, batches, actor_loss_sum), prompts)
                too_far = 0 < args.early_stop_kl < kl_moved(update.outputs, batches, global_sum)
            if critic is not None:
                keeper.note(step, improve("critic", critic, critic_optimizer, batches, critic_loss_sum), prompts)
            if too_far:
                break
        of_rollout = rollout_metrics(rollout, "train") | health_metrics(rollout, fabric) | plugin_metrics(rollout)
        averages.update(of_rollout, weight=len(rollout.scores))
        metrics = averages.compute() | experience_metrics(experience, fabric, critic=args.critic != "none")
        metrics |= rewards.metrics(rollout, fabric, step)
        metrics |= {"info/kl_coeff": kl_control.coeff, "info/lr": actor_schedule.get_last_lr()[0]}
        kl_control.update(metrics[args.kl_metric], len(rollout.scores) * fabric.world_size)
        if value_norm is not None:
            value_norm.update(loop.global_sum(fabric, moments(experience.returns, rollout.response_mask)))
        return metrics

    # 7. Train: one step is one rollout and its updates
    if progress.step == 0:
        progress.first = validate(step=0)
    for step, prompt_batches, records in plan.steps(shard, collate, progress.step):
        if step == 1 and args.self_check:
            some = prompt_batches[0].first(args.micro_batch_size)
            checked = self_check(actor, reference, some, generator, sampler, fabric)
            tracker.message("self-check\n" + "\n".join(f"  {agreement}" for agreement in checked))
        watch.lap()  # what a validation took is not part of a step
        with watch("rollout"):
            rollout = roll_out(prompt_batches, step)
        prompt_of_row = [record for batch in records for record in batch for _ in range(group_size)]
        fault, rows = not_finite(rollout)
        if loop.anywhere(fabric, fault is not None):
            keeper.skip(step, fault, [prompt_of_row[row] for row in rows])
        else:
            rewards.observe(rollout, partial(loop.global_sum, fabric))
            rollout = rewards.combine(rollout, step)
            with watch("ppo"):
                metrics = learn(step, rollout, prompt_of_row)
            metrics |= watch.lap() | peak_memory(fabric.device)
            for warning in health.check(metrics, step):
                tracker.message(f"warning: {warning}")
            if loop.is_due(step, args.log_interval, plan.total_steps):
                tracker.log(metrics, step)
                log_rollout_sample(rollout, tokenizer, tracker, step)

        # 8. Next rates, validate, save
        for schedule in filter(None, (actor_schedule, critic_schedule)):
            schedule.step()
        tracker.advance()
        if keeper.evaluates(step):
            progress.metrics = validate(step)
        keeper.end_step(step, quality=progress.metrics.get("val/reward_mean", math.nan))

    # 9. Done
    reward, first = (metrics.get("val/reward_mean", math.nan) for metrics in (progress.metrics, progress.first))
    summary = {"val/reward_mean": reward, "val/reward_mean_before": first, "val/reward_mean_best": progress.best}
    return keeper.finish({"steps": progress.step, **summary}, f"python scripts/chat.py {experiment.dir}")


if __name__ == "__main__":
    run(main)
