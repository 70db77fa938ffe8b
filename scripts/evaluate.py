#!/usr/bin/env python3
"""Compare policies on held-out prompts: gold score, reward, KL, length, diversity, and replies side by side."""

from typing import Any

from rlhf_stages.args import EvaluateArgs, FabricArgs, GenerationArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Print the comparison; returns what --output holds."""
    args, generation, fabric_args = parse(EvaluateArgs, GenerationArgs, FabricArgs, argv=argv, description=__doc__)

    from dataclasses import asdict
    from pathlib import Path

    from lightning.fabric import seed_everything

    from rlhf_stages import loop
    from rlhf_stages.args import ModelArgs
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import open_shard
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.evaluation.gold import load_score
    from rlhf_stages.evaluation.policies import Reply, policy_replies, reward_accuracy, summarize
    from rlhf_stages.evaluation.table import comparison_table, side_by_side
    from rlhf_stages.experiment import parent_checkpoint, resolve_checkpoint, stage_name
    from rlhf_stages.files import write_json
    from rlhf_stages.models.loading import load_causal, load_scalar

    # 1. Tokenizer, scorers, prompts
    info = read_data_info(args.data_dir)
    gold_score = load_score(args.gold_score) if args.gold_score else None
    checkpoints = [resolve_checkpoint(path) for path in args.experiment_dirs]
    model_args, reward_model = ModelArgs(disable_dropout=True), None
    fabric = loop.start_fabric(fabric_args, args.seed)
    if args.rm_experiment_dir:
        rm_checkpoint, _ = parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")
        tokenizer = load_tokenizer(str(rm_checkpoint))
        info.check_tokenizer(tokenizer, str(rm_checkpoint))
        reward_model = loop.freeze(fabric, load_scalar(rm_checkpoint, tokenizer, model_args, trained_head=True))
    results: dict[str, Any] = {"args": asdict(args), "generation": asdict(generation)}
    replies: dict[str, list[Reply]] = {}

    # 2. Replies of every policy to the same prompts, from the same seed
    for checkpoint in checkpoints:
        tokenizer = load_tokenizer(str(checkpoint))
        info.check_tokenizer(tokenizer, str(checkpoint))
        model = loop.freeze(fabric, load_causal(checkpoint, tokenizer, model_args))
        if not replies:
            reference = model
            shard = open_shard(info.path / loop.prompt_shard_name(info.path, args.split), vocab_size=len(tokenizer))
            records = [shard[i] for i in range(min(args.num_prompts, len(shard)))]
        seed_everything(args.seed, verbose=False)
        replies[stage_name(checkpoint, taken=replies)] = policy_replies(
            model, reference, records, tokenizer, generation, fabric, args.mini_batch_size, reward_model, gold_score
        )

    # 3. Table, samples, reward model, JSON
    if replies:
        results["summary"] = {name: summarize(column) for name, column in replies.items()}
        results["replies"] = {name: [asdict(reply) for reply in column] for name, column in replies.items()}
        print(f"{info.dataset}: {len(records)} held-out prompts ({args.split} split)\n")
        print(f"{comparison_table(results['summary'])}\n")
        print(f"{side_by_side(replies, args.num_samples)}\n")
    preference = info.path / f"preference_{args.split}.pt"
    if reward_model is not None and preference.is_file():
        pairs = open_shard(preference, responses=2, vocab_size=len(tokenizer))
        accuracy = reward_accuracy(reward_model, pairs, tokenizer, fabric, args.mini_batch_size)
        results["reward_model"] = accuracy
        print(
            "reward model: accuracy {accuracy:.3f} on {pairs} held-out pairs"
            " (the longer text is the better one in {longer_wins:.3f})".format(**accuracy)
        )
    if args.output:
        write_json(Path(args.output), results)
        print(f"written to {args.output}")
    return results


if __name__ == "__main__":
    run(main)
