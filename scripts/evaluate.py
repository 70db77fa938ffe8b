#!/usr/bin/env python3
"""Compare policies on held-out prompts: gold score, reward, KL, length, diversity, and replies side by side.

--suite=dialogue compares their replies with the data's own: ROUGE, METEOR, BLEU, intent, perplexity, with intervals.
"""

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
    from rlhf_stages.evaluation import dialogue
    from rlhf_stages.evaluation.bootstrap import resample, with_intervals
    from rlhf_stages.evaluation.gold import load_score
    from rlhf_stages.evaluation.policies import Reply, policy_replies, reward_accuracy, summarize, with_probabilities
    from rlhf_stages.evaluation.table import comparison_table, interval_table, settings_line, side_by_side
    from rlhf_stages.experiment import parent_checkpoint, resolve_checkpoint, stage_name
    from rlhf_stages.files import write_json, write_text
    from rlhf_stages.models.classifier import TextClassifier
    from rlhf_stages.models.loading import load_causal, load_scalar

    # 1. Tokenizer, scorers, prompts
    info = read_data_info(args.data_dir)
    gold_score = load_score(args.gold_score) if args.gold_score else None
    checkpoints = [resolve_checkpoint(path) for path in args.experiment_dirs]
    model_args, reward_model = ModelArgs(disable_dropout=True), None
    if fabric_args.strategy not in ("auto", "ddp"):
        raise ValueError(f"--strategy={fabric_args.strategy} is for training; evaluate.py takes auto or ddp")
    fabric = loop.start_fabric(fabric_args, args.seed)
    if args.rm_experiment_dir:
        rm_checkpoint, _ = parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")
        tokenizer = load_tokenizer(str(rm_checkpoint))
        info.check_tokenizer(tokenizer, str(rm_checkpoint))
        reward_model = loop.freeze(fabric, load_scalar(rm_checkpoint, tokenizer, model_args, trained_head=True))
    results: dict[str, Any] = {"args": asdict(args), "generation": asdict(generation)}
    replies: dict[str, list[Reply]] = {}
    nll: dict[str, tuple[list[float], list[int]]] = {}
    is_dialogue, classifier = args.suite == "dialogue", None
    if is_dialogue and generation.num_return_sequences > 1:
        raise ValueError("--suite=dialogue compares one reply to each prompt: leave --num_return_sequences out")
    if args.intent_classifier or args.classifier:
        classifier = TextClassifier.load(args.intent_classifier or args.classifier, fabric.device)

    # 2. Replies of every policy to the same prompts, from the same seed
    for checkpoint in checkpoints:
        tokenizer = load_tokenizer(str(checkpoint))
        info.check_tokenizer(tokenizer, str(checkpoint))
        model = loop.freeze(fabric, load_causal(checkpoint, tokenizer, model_args))
        if not replies:
            reference = model
            prompts = f"finetune_{args.split}.pt" if is_dialogue else loop.prompt_shard_name(info.path, args.split)
            shard = open_shard(info.path / prompts, responses=int(is_dialogue), vocab_size=len(tokenizer))
            records = [shard[i] for i in range(min(args.num_prompts, len(shard)))]
        seed_everything(args.seed, verbose=False)
        name = stage_name(checkpoint, taken=replies)
        replies[name] = policy_replies(
            model, reference, records, tokenizer, generation, fabric, args.mini_batch_size, reward_model, gold_score
        )
        if args.classifier:
            replies[name] = with_probabilities(replies[name], classifier, args.classifier_label)
        if is_dialogue:
            nll[name] = dialogue.response_nll(model, records, tokenizer, fabric, args.mini_batch_size)

    # 3. Table, samples, reward model, JSON
    if replies:
        title = f"{info.dataset}: {len(records)} held-out prompts ({args.split} split)"
        results["replies"] = {name: [asdict(reply) for reply in column] for name, column in replies.items()}
        if is_dialogue:
            references = dialogue.references_of(records, tokenizer)
            facts = (references, records, classifier, args.intent_key)
            found = {name: dialogue.measures(replies[name], nll[name], *facts) for name in replies}
            found["human"] = dialogue.human_measures(*facts)
            weights = resample(len(records), args.bootstrap_samples, args.seed)
            columns = with_intervals({name: measures for name, (measures, _) in found.items()}, weights)
            whole = {name: numbers for name, (_, numbers) in found.items()}
            results |= {"summary": columns, "whole": whole}
            title += f"; {settings_line(generation, args, len(records))}"
            table = interval_table(columns, whole, markdown=False)
            if args.markdown:
                write_text(Path(args.markdown), [f"{title}\n\n", interval_table(columns, whole, markdown=True), "\n"])
        else:
            results["summary"] = {name: summarize(column) for name, column in replies.items()}
            table = comparison_table(results["summary"])
        print(f"{title}\n\n{table}\n\n{side_by_side(replies, args.num_samples)}\n")
    preference = info.path / f"preference_{args.split}.pt"
    if reward_model is not None and preference.is_file():
        pairs = open_shard(preference, responses=2, vocab_size=len(tokenizer))
        accuracy = reward_accuracy(reward_model, pairs, tokenizer, fabric, args.mini_batch_size)
        results["reward_model"] = accuracy
        print(
            "reward model: accuracy {accuracy:.3f} on {pairs} held-out pairs, {order_accuracy:.3f} of {lists} lists in"
            " order (the longer text is the better one in {longer_wins:.3f})".format(**accuracy)
        )
    if args.output:
        write_json(Path(args.output), results)
        print(f"written to {args.output}")
    return results


if __name__ == "__main__":
    run(main)
