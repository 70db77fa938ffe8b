#!/usr/bin/env python3
"""A stage of your own: an SFT model learns the best of n replies of its own, chosen by a reward model.

    python examples/best_of_n.py --data_dir=data/helpdesk/helpdesk-tiny --experiment_name=best_of_8 \\
        --sft_experiment_dir=experiments/helpdesk/helpdesk-tiny/sft --num_return_sequences=8 \\
        --rm_experiment_dir=experiments/helpdesk/helpdesk-tiny/rm

It reads two experiment folders and writes one of stage sft, from which every other stage can go on.
"""

from dataclasses import dataclass
from pathlib import Path

from simple_parsing import field

from rlhf_stages.args import FabricArgs, GenerationArgs, ModelArgs, TrainArgs
from rlhf_stages.cli import parse, run


@dataclass(frozen=True, kw_only=True)
class BestOfNArgs(TrainArgs):
    """Best of n. Nothing is validated: the last checkpoint is the best."""

    sft_experiment_dir: str  # SFT experiment whose model samples, and learns
    rm_experiment_dir: str  # RM experiment that chooses
    num_prompts: int = 512  # Prompts that are answered, at most
    learning_rate: float = 1e-5  # Peak learning rate; falls along a cosine
    eval_interval: int = field(default=100, cmd=False)  # No flag, as there is no validation
    eval_iters: int | None = field(default=None, cmd=False)  # No flag either


def main(argv: list[str] | None = None) -> Path:
    """Sample, choose, train, save; returns the experiment folder."""
    groups = (BestOfNArgs, ModelArgs, GenerationArgs, FabricArgs)
    args, model_args, sampling, fabric_args = parse(*groups, argv=argv, description=__doc__)

    from functools import partial

    import torch

    from rlhf_stages import loop
    from rlhf_stages.data.collate import FinetuneBatch, collate_finetune, collate_prompts
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import Shard, ShardWriter
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.experiment import parent_checkpoint
    from rlhf_stages.functional.tokens import sft_loss
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.models.forward import text_logits
    from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training
    from rlhf_stages.models.scalar import end_scores
    from rlhf_stages.models.start import starting_point
    from rlhf_stages.optim import set_up
    from rlhf_stages.plan import Plan, to_device
    from rlhf_stages.rollout.collect import join
    from rlhf_stages.rollout.samples import sample
    from rlhf_stages.tracking import Averages, Tracker

    # 1. The two experiments, and the prompts
    start, parents = starting_point(model_args.model_name, sft=args.sft_experiment_dir)
    parents["rm"], _ = parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")
    info = read_data_info(args.data_dir)
    for parent in parents.values():
        tokenizer = load_tokenizer(str(parent), model_args.trust_remote_code)
        info.check_tokenizer(tokenizer, str(parent))
    prompts, _ = loop.open_prompts(info.path, len(tokenizer))
    pad, n = int(tokenizer.pad_token_id), sampling.num_return_sequences

    # 2. Models
    fabric = loop.start_fabric(fabric_args, args.seed)
    if fabric.world_size > 1 or args.cuda_graphs or n < 2:
        raise ValueError("this takes --num_return_sequences of 2 or more, one device, and no --cuda_graphs")
    model = prepare_training(load_causal(start, tokenizer, model_args), model_args).to(fabric.device)
    judge = loop.freeze(fabric, load_scalar(parents["rm"], tokenizer, ModelArgs(), trained_head=True))

    # 3. The best of n replies to each prompt are the data; a run that is resumed samples the same ones again
    best, scores = ShardWriter(), []
    for first in range(0, min(args.num_prompts, len(prompts)), args.mini_batch_size):
        records = [prompts[i] for i in range(first, min(first + args.mini_batch_size, args.num_prompts, len(prompts)))]
        batch = to_device(collate_prompts(records, pad_token_id=pad), fabric.device)
        replies = sample(model, batch, tokenizer, sampling, fabric)
        texts = join(batch.repeat(n), replies)
        with torch.no_grad(), fabric.autocast():
            scores.append(end_scores(judge, texts.ids, texts.mask).view(-1, n))
        for k, record in enumerate(records):
            row = k * n + int(scores[-1][k].argmax())
            ids, cut = replies.ids[row][replies.mask[row]].tolist(), not replies.ended[row]
            best.add(record.prompt.tolist(), [[*ids, tokenizer.eos_token_id] if cut else ids], [cut])
    train = Shard(best.columns(), None, Path("best_of_n.pt"), responses=1)
    found = torch.cat(scores)
    summary = {"score_mean": found.mean().item(), "score_best": found.amax(1).mean().item()}

    # 4. Optimizer, schedule, experiment folder
    plan = Plan(fabric, args, len(train), mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=train.sizes)
    model, optimizer, schedule = set_up(fabric, model, args, (args.learning_rate, "cosine", 0), plan.total_steps)
    groups = {"train_args": args, "model_args": model_args, "gen_args": sampling, "fabric_args": fabric_args}
    experiment = loop.open_experiment(fabric, args, info, "sft", groups, [prompts, train], parents)
    tracker, averages = Tracker(experiment, fabric, plan.total_steps, groups), Averages(fabric, lenient=True)
    parts = {"optimizer": optimizer, "schedule": schedule}
    keeper = Keeper(fabric, args, experiment, tracker, tokenizer, plan.total_steps, {"": model}, parts, averages)

    # 5. Train: mean loss over the tokens of the replies, those of all micro-batches of a step together
    def count(batch: FinetuneBatch) -> torch.Tensor:
        return (batch.targets[:, 1:] != -1).sum()

    def loss_sum(batch: FinetuneBatch) -> torch.Tensor:
        return sft_loss(text_logits(model, batch.input_ids, batch.attention_mask), batch.targets, -1)[0]

    collate = partial(collate_finetune, pad_token_id=pad, ignore_index=-1, use_targets=True, mask_prompt=True)
    for step, batches, records in plan.steps(train, collate, keeper.progress.step):
        model.train()
        update = loop.update(fabric, model, optimizer, batches, loss_sum, count, args.gradient_clip_val)
        schedule.step()
        keeper.note(step, update, records)
        averages.update({"train/loss": update.loss}, weight=update.count)
        tracker.advance()
        if loop.is_due(step, args.log_interval, plan.total_steps):
            tracker.log(averages.compute(), step)
        keeper.end_step(step)
    return keeper.finish({"steps": keeper.progress.step} | summary, f"python scripts/chat.py {experiment.dir}")


if __name__ == "__main__":
    run(main)
