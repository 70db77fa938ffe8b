#!/usr/bin/env python3
"""Stage 3: PPO. The actor of an SFT experiment learns to please the reward model of an RM experiment."""

import time
from pathlib import Path

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
    from rlhf_stages.data.collate import PromptBatch, collate_prompts
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.experiment import parent_checkpoint
    from rlhf_stages.functional.losses import policy_loss, value_loss
    from rlhf_stages.functional.metrics import explained_variance, policy_statistics
    from rlhf_stages.kl_control import AdaptiveKL, FixedKL
    from rlhf_stages.models.forward import unwrap
    from rlhf_stages.models.loading import load_causal, load_scalar, parameter_summary, prepare_training
    from rlhf_stages.models.start import check_model_name
    from rlhf_stages.optim import make_optimizer
    from rlhf_stages.rollout.collect import (
        Experience,
        Rollout,
        check_finite,
        concatenate,
        make_experience,
        response_logprobs,
        response_values,
        score_responses,
    )
    from rlhf_stages.rollout.samples import load_example_prompt, log_example, log_rollout_sample, sample
    from rlhf_stages.rollout.statistics import rollout_metrics
    from rlhf_stages.tracking import Averages, Tracker, distribution

    # 1. Parents, and the prompts
    sft_checkpoint, sft_args = parent_checkpoint(args.sft_experiment_dir, stage="sft", flag="--sft_experiment_dir")
    rm_checkpoint, _ = parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")
    check_model_name(model_args.model_name, sft_args, "--sft_experiment_dir")
    info = read_data_info(args.data_dir)
    tokenizer = load_tokenizer(str(sft_checkpoint), model_args.trust_remote_code)
    info.check_tokenizer(tokenizer, str(sft_checkpoint))
    info.check_tokenizer(load_tokenizer(str(rm_checkpoint), model_args.trust_remote_code), str(rm_checkpoint))
    shard = open_shard(info.path / loop.prompt_shard_name(info.path, "train"), vocab_size=len(tokenizer))
    validation = loop.open_validation(
        info.path, loop.prompt_shard_name(info.path, "validation"), responses=0, vocab_size=len(tokenizer)
    )
    collate = partial(collate_prompts, pad_token_id=tokenizer.pad_token_id)

    # 2. Four models. Dropout is off in all: with it the ratio of new to old would start at noise instead of 1
    fabric = loop.start_fabric(fabric_args, args.seed)
    model_args = replace(model_args, disable_dropout=True)
    actor = prepare_training(load_causal(sft_checkpoint, tokenizer, model_args), model_args)
    critic = prepare_training(load_scalar(rm_checkpoint, tokenizer, model_args, trained_head=True), model_args)
    reference = loop.freeze(fabric, load_causal(sft_checkpoint, tokenizer, model_args))
    reward_model = loop.freeze(fabric, load_scalar(rm_checkpoint, tokenizer, model_args, trained_head=True))
    fabric.print(f"actor: {parameter_summary(actor)}\ncritic: {parameter_summary(critic)}")
    actor_optimizer = make_optimizer(actor, args, args.actor_learning_rate)
    critic_optimizer = make_optimizer(critic, args, args.critic_learning_rate)
    actor, actor_optimizer = fabric.setup(actor, actor_optimizer)
    critic, critic_optimizer = fabric.setup(critic, critic_optimizer)
    if args.adaptive_kl_coeff:
        kl_control = AdaptiveKL(args.init_kl_coeff, target=args.target_kl_coeff, horizon=args.kl_horizon)
    else:
        kl_control = FixedKL(args.init_kl_coeff)

    # 3. Experiment folder; all that may be wrong with the input has been read before it is made
    example = load_example_prompt(info.path, fabric)
    plan = loop.Plan(fabric, args, len(shard), mini=args.rollout_size, micro=args.rollout_mini_batch_size)
    groups = {"train_args": args, "model_args": model_args, "gen_args": rollout_args, "fabric_args": fabric_args}
    parents = {"sft": sft_checkpoint, "rm": rm_checkpoint}
    experiment = loop.open_experiment(fabric, args, info, "ppo", groups, parents)
    tracker = Tracker(experiment, fabric, plan.total_steps, groups)

    # 4. Rollout: sample from the actor, then let all four models read the result
    def roll_out(prompts: PromptBatch) -> Rollout:
        responses = sample(unwrap(actor), prompts, tokenizer, rollout_args, fabric)
        with fabric.autocast():
            return score_responses(
                prompts.repeat(rollout_args.num_return_sequences),
                responses,
                actor=actor,
                reference=reference,
                critic=critic,
                reward_model=reward_model,
                temperature=rollout_args.temperature,
            )

    # 5. Losses: means over the response tokens of all micro-batches and devices of a step
    def count(batch: Experience) -> torch.Tensor:
        return batch.rollout.response_mask.sum()

    def policy_loss_sum(batch: Experience) -> torch.Tensor:
        r = batch.rollout
        logprobs = response_logprobs(actor, r.texts, r.response_ids, rollout_args.temperature)
        statistics = policy_statistics(logprobs.detach(), r.logprobs, r.response_mask, args.clip_coeff)
        averages.update({f"info/{name}": value for name, value in statistics.items()}, weight=count(batch))
        return policy_loss(logprobs, r.logprobs, batch.advantages, r.response_mask, args.clip_coeff)[0]

    def value_loss_sum(batch: Experience) -> torch.Tensor:
        r = batch.rollout
        values = response_values(critic, r.texts)
        return value_loss(values, r.values, batch.returns, r.response_mask, args.clip_coeff)[0]

    @torch.no_grad()
    def validate(step: int) -> float:
        averages = Averages(fabric)
        for prompts in loop.validation_batches(
            validation, args.rollout_mini_batch_size, collate, fabric, args.eval_iters
        ):
            rollout = roll_out(prompts)
            averages.update(rollout_metrics(rollout, "val"), weight=len(rollout.scores))
        metrics = averages.compute()
        tracker.log(metrics, step)
        log_example(unwrap(actor), example, tokenizer, rollout_args, fabric, tracker, step)
        return metrics.get("val/reward_mean", float("nan"))

    # 6. Train: one step is one rollout and its updates
    first, best = validate(step=0), float("-inf")
    averages, step = Averages(fabric), 0
    for prompt_batches in plan.steps(shard, collate):
        started = time.perf_counter()
        rollout = concatenate([roll_out(prompts) for prompts in prompt_batches])
        check_finite(rollout)
        experience = make_experience(rollout, args, kl_control.coeff, partial(loop.global_sum, fabric))
        rollout_time = time.perf_counter() - started

        started = time.perf_counter()
        actor.train()
        critic.train()
        for epoch in range(args.ppo_epochs):
            for window in loop.epoch_windows(
                len(rollout.scores),
                mini=args.mini_batch_size,
                micro=args.micro_batch_size,
                seed=args.seed,
                epoch=step * args.ppo_epochs + epoch,
            ):
                batches = [experience.select(torch.tensor(rows, device=fabric.device)) for rows in window]
                actor_loss, tokens = loop.accumulate(fabric, actor, batches, policy_loss_sum, count)
                critic_loss, _ = loop.accumulate(fabric, critic, batches, value_loss_sum, count, weight=args.vf_coeff)
                norms = {
                    "info/actor_grad_norm": loop.optimizer_step(
                        fabric, actor, actor_optimizer, args.gradient_clip_val, "actor's"
                    ),
                    "info/critic_grad_norm": loop.optimizer_step(
                        fabric, critic, critic_optimizer, args.gradient_clip_val, "critic's"
                    ),
                }
                averages.update({"train/actor_loss": actor_loss, "train/critic_loss": critic_loss}, weight=tokens)
                averages.update(norms)
        step += 1

        # 7. Steer, log, validate, save
        averages.update(rollout_metrics(rollout, "train"), weight=len(rollout.scores))
        metrics = averages.compute()
        metrics |= {"info/ppo_time": time.perf_counter() - started, "info/rollout_time": rollout_time}
        metrics |= {"info/kl_coeff": kl_control.coeff}
        kl_control.update(metrics["train/kl_div_mean"], len(rollout.scores) * fabric.world_size)
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            mask = rollout.response_mask
            metrics |= {"info/explained_variance": float(explained_variance(rollout.values, experience.returns, mask))}
            metrics |= distribution("debug/reward_scores", rollout.scores, fabric)
            metrics |= distribution("debug/advantages", experience.advantages[mask], fabric)
            metrics |= distribution("debug/returns", experience.returns[mask], fabric)
            tracker.log(metrics, step)
            log_rollout_sample(rollout, tokenizer, tracker, step)
        saving = loop.is_due(step, args.save_interval, plan.total_steps)
        if saving or loop.is_due(step, args.eval_interval, plan.total_steps):
            reward = validate(step)
        if saving:
            loop.save_checkpoint(fabric, experiment, step, actor, tokenizer)
            if not reward < best:
                best = reward
                experiment.mark_best(step)

    # 8. Done
    tracker.close()
    summary = {"steps": step, "val/reward_mean": reward, "val/reward_mean_before": first, "val/reward_mean_best": best}
    return loop.finish(fabric, experiment, summary, f"python scripts/chat.py {experiment.dir}")


if __name__ == "__main__":
    run(main)
