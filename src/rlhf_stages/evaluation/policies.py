"""Policies compared on the same prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.collate import collate_prompts
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.bootstrap import Measure, mean_of
from rlhf_stages.functional.masking import masked_sum
from rlhf_stages.functional.tokens import token_statistics
from rlhf_stages.models.forward import logits_at
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.plan import to_device
from rlhf_stages.rollout.collect import join
from rlhf_stages.rollout.samples import sample
from rlhf_stages.rollout.texts import text_of
from rlhf_stages.text_metrics import distinct_n, repeats_a_token

GoldScore = Callable[[str, str], float]
# what a classifier says of each response, from prompts, responses and the metadata of their records
Judge = Callable[[Sequence[str], Sequence[str], Sequence[Mapping[str, Any]]], list[float]]


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
                token_statistics(logits_at(m, texts.ids, texts.mask, texts.places), responses.ids, Tensor.float)[0]
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


def with_probabilities(replies: Sequence[Reply], judge: Judge) -> list[Reply]:
    """The replies with what a classifier says of each."""
    found = judge([reply.prompt for reply in replies], [reply.text for reply in replies], [{}] * len(replies))
    return [replace(reply, probability=p) for reply, p in zip(replies, found, strict=True)]


def measures(replies: Sequence[Reply], each: int = 1) -> tuple[dict[str, Measure], dict[str, float]]:
    """What there is to say of a policy's replies, `each` to a prompt, without a reference: measures that can be
    resampled by prompt, and numbers of the whole set. Rewards, gold and probabilities only where they were given.
    """
    scores = {
        "gold score": [reply.gold for reply in replies],
        "reward-model score": [reply.reward for reply in replies],
        "classifier probability": [reply.probability for reply in replies],
    }
    found = {name: mean_of(given, each=each) for name, values in scores.items() if (given := _given(values))}
    texts = [reply.text for reply in replies]
    found["KL to the reference (nats)"] = mean_of([reply.kl for reply in replies], each=each)
    found["mean length (tokens)"] = mean_of([reply.tokens for reply in replies], each=each)
    shares = {
        "repeated token (%)": [reply.repeats for reply in replies],
        "empty replies (%)": [not text.strip() for text in texts],
        "cut-off replies (%)": [not reply.ended for reply in replies],
    }
    found |= {name: mean_of(values, scale=100, each=each) for name, values in shares.items()}
    return found, {f"distinct-{n}": distinct_n(texts, n) for n in (1, 2)}


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
