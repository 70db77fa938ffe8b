"""Policies compared on the same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.collate import collate_preference, collate_prompts
from rlhf_stages.data.shards import Record, Shard
from rlhf_stages.functional.losses import score_at
from rlhf_stages.functional.masking import masked_sum
from rlhf_stages.functional.metrics import order_accuracy
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.classifier import TextClassifier
from rlhf_stages.models.forward import logits_at
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.plan import to_device
from rlhf_stages.rollout.collect import join
from rlhf_stages.rollout.samples import sample
from rlhf_stages.rollout.texts import text_of
from rlhf_stages.text_metrics import distinct_n, repeats_a_token

GoldScore = Callable[[str, str], float]


@dataclass(frozen=True)
class Reply:
    """One response to a held-out prompt; `reward`, `gold` and `probability` are None where nothing gives them.

    `repeats` says that one token makes up half of it or more; `probability` is that of a label, of prompt and response.
    """

    prompt: str
    text: str
    tokens: int
    ended: bool
    kl: float
    reward: float | None
    gold: float | None
    repeats: bool = False
    probability: float | None = None


@torch.no_grad()
def policy_replies(
    model: Any,
    reference: Any,
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationArgs,
    fabric: Fabric,
    batch_size: int,
    reward_model: Any = None,
    gold_score: GoldScore | None = None,
) -> list[Reply]:
    """Sample `num_return_sequences` responses of `model` per prompt.

    KL is the log-probability of a response under `model` less that under the reference, in nats.
    """
    replies = []
    for start in range(0, len(records), batch_size):
        prompts = collate_prompts(records[start : start + batch_size], pad_token_id=int(tokenizer.pad_token_id))
        prompts = to_device(prompts, fabric.device)
        responses = sample(model, prompts, tokenizer, generation, fabric)
        prompts = prompts.repeat(generation.num_return_sequences)
        texts = join(prompts, responses)
        with fabric.autocast():
            policy, ref = (
                gather_logprobs(logits_at(m, texts.ids, texts.mask, texts.places), responses.ids)
                for m in (model, reference)
            )
            rewards = None
            if reward_model is not None:
                rewards = end_scores(reward_model, texts.ids, texts.mask).tolist()
        kls = masked_sum(policy - ref, responses.mask, dim=1).tolist()
        for row in range(len(texts.ids)):
            prompt = text_of(tokenizer, prompts.input_ids[row], prompts.attention_mask[row])
            text = text_of(tokenizer, responses.ids[row], responses.mask[row])
            tokens = responses.ids[row][responses.mask[row]].tolist()
            ended = bool(responses.ended[row])
            replies.append(
                Reply(
                    prompt=prompt,
                    text=text,
                    tokens=len(tokens),
                    ended=ended,
                    kl=kls[row],
                    reward=None if rewards is None else rewards[row],
                    gold=None if gold_score is None else gold_score(prompt, text),
                    repeats=repeats_a_token(tokens[:-1] if ended else tokens),
                )
            )
    return replies


def with_probabilities(replies: Sequence[Reply], classifier: TextClassifier, label: str) -> list[Reply]:
    """The replies with the probability that each, behind its prompt, is of a kind.

    Raises:
        ValueError: the classifier does not know the label.
    """
    if label not in classifier.labels:
        raise ValueError(f"--classifier knows no label {label!r}, but {', '.join(classifier.labels)}")
    found = classifier.probabilities([reply.prompt + reply.text for reply in replies])[
        :, classifier.labels.index(label)
    ]
    return [replace(reply, probability=p) for reply, p in zip(replies, found.tolist(), strict=True)]


def summarize(replies: Sequence[Reply]) -> dict[str, float]:
    """Means over the replies; rewards, gold and probabilities only where they were given."""
    count = len(replies)
    summary = {}
    if replies[0].gold is not None:
        summary["gold score"] = sum(r.gold or 0.0 for r in replies) / count
    if replies[0].reward is not None:
        summary["reward-model score"] = sum(r.reward or 0.0 for r in replies) / count
    if replies[0].probability is not None:
        summary["classifier probability"] = sum(r.probability or 0.0 for r in replies) / count
    return summary | {
        "KL to the reference (nats)": sum(r.kl for r in replies) / count,
        "mean length (tokens)": sum(r.tokens for r in replies) / count,
        "distinct-2": distinct_n([r.text for r in replies], 2),
        "repeated token (%)": 100 * sum(r.repeats for r in replies) / count,
        "empty replies (%)": 100 * sum(not r.text.strip() for r in replies) / count,
        "cut-off replies (%)": 100 * sum(not r.ended for r in replies) / count,
    }


@torch.no_grad()
def reward_accuracy(
    reward_model: Any, shard: Shard, tokenizer: PreTrainedTokenizerBase, fabric: Fabric, batch_size: int
) -> dict[str, float]:
    """Of the pairs of a preference shard: how many, the share whose better text scores higher, and the share whose
    better text is the longer one, which is what a reward model that only counts tokens would reach; of its lists: how
    many, and the share whose scores stand in exact order.
    """
    right = longer = pairs = 0
    in_order = 0.0
    for start in range(0, len(shard), batch_size):
        records = [shard[i] for i in range(start, min(start + batch_size, len(shard)))]
        batch = collate_preference(records, pad_token_id=int(tokenizer.pad_token_id))
        with fabric.autocast():
            scores = reward_model(batch.input_ids.to(fabric.device), batch.attention_mask.to(fabric.device)).cpu()
        ends = score_at(scores, batch.lengths)
        right += int((ends[batch.better] > ends[batch.worse]).sum())
        longer += int((batch.lengths[batch.better] > batch.lengths[batch.worse]).sum())
        pairs += len(batch.better)
        share, lists = order_accuracy(ends[batch.better], ends[batch.worse], batch.lists)
        in_order += float(share * lists)
    return {
        "pairs": pairs,
        "accuracy": right / pairs,
        "longer_wins": longer / pairs,
        "lists": len(shard),
        "order_accuracy": in_order / len(shard),
    }
