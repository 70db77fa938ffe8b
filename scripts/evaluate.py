#!/usr/bin/env python3
"""Compare checkpoints on held-out data: perplexity, gold, reward, KL, diversity, replies, accuracy of reward models.

--suite=dialogue also compares replies with the data's own: ROUGE, METEOR, BLEU, intent. Intervals are of 95 %.
"""

from typing import Any

from rlhf_stages.args import EvaluateArgs, FabricArgs, GenerationArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Print the comparison; returns what --output holds."""
    args, generation, fabric_args = parse(EvaluateArgs, GenerationArgs, FabricArgs, argv=argv, description=__doc__)

    import warnings
    from dataclasses import asdict
    from itertools import chain
    from pathlib import Path

    from lightning.fabric import seed_everything

    from rlhf_stages import loop
    from rlhf_stages.args import ModelArgs
    from rlhf_stages.data.info import read_data_info
    from rlhf_stages.data.shards import Record
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.evaluation import dialogue, policies
    from rlhf_stages.evaluation.bootstrap import Measure, with_intervals
    from rlhf_stages.evaluation.checkpoints import checkpoints_of, is_reward_model, named, of_other_data
    from rlhf_stages.evaluation.document import document, side_by_side
    from rlhf_stages.evaluation.gold import load_score
    from rlhf_stages.evaluation.perplexity import perplexity, response_nll
    from rlhf_stages.evaluation.policies import Reply, policy_replies, with_probabilities
    from rlhf_stages.evaluation.records import first_records
    from rlhf_stages.evaluation.reward_accuracy import LONGER_WINS, SPLITS, Pairs, accuracy_rows, judged_pairs
    from rlhf_stages.experiment import parent_checkpoint, unique_name
    from rlhf_stages.files import write_json, write_text
    from rlhf_stages.models.forward import check_context
    from rlhf_stages.models.loading import load_causal, load_scalar
    from rlhf_stages.reporting.lineage import base_models
    from rlhf_stages.rewards.learned import Classifier, RewardContext

    # 1. What is compared: policies, the models that they began with, and reward models
    is_dialogue = args.suite == "dialogue"
    if is_dialogue and generation.num_return_sequences > 1:
        raise ValueError("--suite=dialogue compares one reply to each prompt: leave --num_return_sequences out")
    if fabric_args.strategy not in ("auto", "ddp"):
        raise ValueError(f"--strategy={fabric_args.strategy} is for training; evaluate.py takes auto or ddp")
    info = read_data_info(args.data_dir)
    gold_score = load_score(args.gold_score) if args.gold_score else None
    given, notes = checkpoints_of(args.experiment_dirs)
    scorers = [checkpoint for checkpoint in given if is_reward_model(checkpoint)]
    if args.rm_experiment_dir:
        scorers.insert(0, parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")[0])
    own = named([checkpoint for checkpoint in given if not is_reward_model(checkpoint)], taken=["human"])
    sources: dict[str, str] = {}
    for base in base_models(own.values()) if args.use_pretrained else ():
        sources[unique_name("base", taken={*sources, *own})] = base
    sources |= {name: str(checkpoint) for name, checkpoint in own.items()}
    judges = named(scorers, taken=[LONGER_WINS])
    reward_models = {name: str(checkpoint) for name, checkpoint in judges.items()}
    notes += of_other_data(own | judges, info.dataset)
    for note in notes:
        warnings.warn(note, stacklevel=1)
    tokenizers = {source: load_tokenizer(source) for source in (*sources.values(), *reward_models.values())}
    for source, tokenizer in tokenizers.items():
        info.check_tokenizer(tokenizer, source)

    # 2. What they are compared on
    def read(name: str, count: int, purpose: str, responses: int, is_required: bool = False) -> list[Record]:
        found, problems = first_records(
            info.path / name, count, purpose, responses=responses, vocab_size=len(tokenizer), is_required=is_required
        )
        notes.extend(problems)
        return found

    records, texts, references = [], [], []
    if sources:
        prompts = f"finetune_{args.split}.pt" if is_dialogue else loop.prompt_shard_name(info.path, args.split)
        records = read(prompts, args.num_prompts, "replies", responses=int(is_dialogue), is_required=True)
        texts = read(f"finetune_{args.split}.pt", args.num_prompts, "perplexity", responses=1)
        references = dialogue.references_of(records, tokenizer) if is_dialogue else []
    preferences = {
        split: read(f"preference_{split}.pt", args.num_pairs, f"accuracy on {split} pairs", responses=2)
        for split in (SPLITS if reward_models else ())
    }

    # 3. Models that judge, and the reference of the KL
    fabric, model_args = loop.start_fabric(fabric_args, args.seed), ModelArgs(disable_dropout=True)
    context = RewardContext(tokenizer, fabric.device, model_args)
    judge = intent = scorer = reference = None
    if args.classifier:
        judge = Classifier(context, args.classifier, label=args.classifier_label, text="whole")
    if args.intent_classifier:
        intent = Classifier(context, args.intent_classifier, label_key=args.intent_key, text="turn")

    longest = max(len(record.prompt) for record in records) + generation.max_new_tokens if records else 0
    with_responses = chain(texts, *preferences.values())
    longest = max([longest, *(len(r.prompt) + len(text) for r in with_responses for text in r.responses)])

    def load_policy(source: str) -> Any:
        check_context(model := load_causal(source, tokenizers[source], model_args), longest)
        return loop.freeze(fabric, model)

    def load_scorer(source: str) -> Any:
        check_context(model := load_scalar(source, tokenizers[source], model_args, trained_head=True), longest)
        return loop.freeze(fabric, model)

    if records:
        reference_name = next(iter(own))
        reference = load_policy(sources[reference_name])
    if reward_models:
        scorer_name = next(iter(reward_models))
        scorer = load_scorer(reward_models[scorer_name])

    # 4. Replies of every policy to the same prompts, from the same seed, and measures of them
    replies: dict[str, list[Reply]] = {}
    found: dict[str, tuple[dict[str, Measure], dict[str, float]]] = {}
    likelihoods: dict[str, dict[str, Measure]] = {}
    for name, source in sources.items() if records else ():
        model, tokenizer = reference if name == reference_name else load_policy(source), tokenizers[source]
        seed_everything(args.seed, verbose=False)
        replies[name] = policy_replies(
            model, reference, records, tokenizer, generation, fabric, args.mini_batch_size, scorer, gold_score
        )
        if judge:
            replies[name] = with_probabilities(replies[name], judge)
        if is_dialogue:
            found[name] = dialogue.measures(replies[name], references, records, intent)
        else:
            found[name] = policies.measures(replies[name], generation.num_return_sequences)
        likelihoods[name] = perplexity(response_nll(model, texts, tokenizer, fabric, args.mini_batch_size))
    if references:
        prompts_read = [reply.prompt for reply in replies[name]]
        found["human"] = dialogue.text_measures(prompts_read, references, records, intent)

    # 5. What every reward model says of the same pairs
    judged: dict[str, dict[str, Pairs]] = {split: {} for split, some in preferences.items() if some}
    for name, source in reward_models.items():
        model = scorer if name == scorer_name else load_scorer(source)
        for split, columns in judged.items():
            columns[name] = judged_pairs(model, preferences[split], tokenizers[source], fabric, args.mini_batch_size)

    # 6. All of it with intervals, as JSON, text and Markdown
    results: dict[str, Any] = {"dataset": info.dataset, "args": asdict(args), "generation": asdict(generation)}
    results |= {"checkpoints": sources | reward_models, "notes": notes}
    results |= {"prompts": len(records), "texts": len(texts)}
    if replies:
        results["replies"] = {name: [asdict(reply) for reply in column] for name, column in replies.items()}
        columns = with_intervals({n: m for n, (m, _) in found.items()}, args.bootstrap_samples, args.seed)
        likely = with_intervals(likelihoods, args.bootstrap_samples, args.seed)  # of other prompts, maybe
        results["summary"] = {name: likely.get(name, {}) | column for name, column in columns.items()}
        results |= {"whole": {name: numbers for name, (_, numbers) in found.items()}, "reference": reference_name}
    if judged:
        results["reward_accuracy"] = {split: accuracy_rows(columns) for split, columns in judged.items()}
    print(document(results, markdown=False))
    if replies:
        print(f"\n{side_by_side(replies, args.num_samples)}")
    if args.markdown:
        write_text(Path(args.markdown), [document(results, markdown=True), "\n"])
    if args.output:
        write_json(Path(args.output), results)
        print(f"\nwritten to {args.output}")
    return results


if __name__ == "__main__":
    run(main)
