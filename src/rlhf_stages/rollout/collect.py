"""A rollout: prompts, sampled responses, and what the models say about them.

Legend: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), T tokens of the longest text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_stages.data.collate import PromptBatch, Width
from rlhf_stages.functional.masking import left_aligned
from rlhf_stages.functional.tokens import token_statistics
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.forward import logits_at, unwrap
from rlhf_stages.rollout.generation import Responses, Sampler
from rlhf_stages.rollout.texts import Samples
from rlhf_stages.value_norm import ValueNorm


@dataclass(frozen=True)
class Rollout:
    """Responses of the actor with the numbers that training needs; every tensor has B rows.

    prompt_ids, prompt_mask (B, P); response_ids, response_mask, logprobs, ref_logprobs, entropies, values (B, R);
    part_scores (B, K) of each part of the reward as it gave them; scores (B,), their sum as `Rewards` makes it; token
    scores (B, R), which count beside it; ended (B,) bool; samples, the same as text, or nothing.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    entropies: Tensor
    values: Tensor
    scores: Tensor
    part_scores: Tensor
    token_scores: Tensor
    ended: Tensor
    samples: Samples = field(default_factory=Samples)

    @cached_property
    def texts(self) -> "Texts":
        """Prompts and responses as the models read them."""
        prompts = PromptBatch(self.prompt_ids, self.prompt_mask)
        return join(prompts, Responses(self.response_ids, self.response_mask, self.ended))

    @cached_property
    def lengths(self) -> list[list[int]]:
        """Tokens of the prompt and of the response of each row, on the host: asked for once, not for each update."""
        pairs: list[list[int]] = torch.stack([self.prompt_mask.sum(1), self.response_mask.sum(1)], dim=1).tolist()
        return pairs


@dataclass(frozen=True)
class Scores:
    """What rewards say: parts (B, K), a column per part; tokens (B, R), scores of single tokens; and what they read."""

    parts: Tensor
    tokens: Tensor
    samples: Samples = field(default_factory=Samples)


# prompts, each as often as it has responses; the responses; both as models read them
Scorer = Callable[[PromptBatch, Responses, "Texts"], Scores]


@dataclass(frozen=True)
class Texts:
    """Prompts with their responses, right-padded: ids, mask (B, T); places (B, R).

    `places[:, t]` is where response token t is predicted: at the token before it. It is where its logits and the value
    of the state before it stand. Off the response it is a place like any other.
    """

    ids: Tensor
    mask: Tensor
    places: Tensor


def join(prompts: PromptBatch, responses: Responses) -> Texts:
    """Left-padded prompts and right-padded responses to texts that are padded on the right only."""
    ids, mask = left_aligned(
        torch.cat([prompts.input_ids, responses.ids], dim=1),
        torch.cat([prompts.attention_mask, responses.mask], dim=1),
    )
    places = prompts.attention_mask.sum(1, keepdim=True) - 1 + torch.arange(responses.ids.shape[1], device=ids.device)
    return Texts(ids, mask, places.clamp(max=ids.shape[1] - 1))


@torch.no_grad()
def score_responses(
    prompts: PromptBatch,
    responses: Responses,
    *,
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module | None,
    scorer: Scorer,
    sampler: Sampler,
    value_norm: ValueNorm | None = None,
) -> Rollout:
    """Run the models over sampled responses.

    The log-probabilities are those of the training forward, not of the sampler, so that the ratio starts at 1. Place t
    of `values` is the value before token t was chosen. `scores` is the plain sum of the parts.

    Args:
        critic: None where the actor has a value head of its own, or where nothing needs values (then they are 0).
        value_norm: brings the critic's output to the scale of returns.
    """
    texts = join(prompts, responses)
    mask, ids = responses.mask, responses.ids
    said = policy_outputs(actor, texts, ids, sampler, entropies=True)
    values = said.values if critic is None else response_values(critic, texts)
    if values is None:
        values = torch.zeros_like(mask, dtype=torch.float32)
    elif value_norm is not None:
        values = value_norm.denormalize(values)
    ref_logprobs = policy_outputs(reference, texts, ids, sampler).logprobs
    scores = scorer(prompts, responses, texts)
    return Rollout(
        prompt_ids=prompts.input_ids,
        prompt_mask=prompts.attention_mask,
        response_ids=ids,
        response_mask=mask,
        logprobs=torch.where(mask, said.logprobs, 0),
        ref_logprobs=torch.where(mask, ref_logprobs, 0),
        entropies=torch.where(mask, cast(Tensor, said.entropies), 0),
        values=torch.where(mask, values, 0),
        scores=scores.parts.sum(1),
        part_scores=scores.parts,
        token_scores=scores.tokens,
        ended=responses.ended,
        samples=scores.samples,
    )


def score_batches(batches: Sequence[PromptBatch], responses: Sequence[Responses], **models: Any) -> Rollout:
    """`score_responses` for batches of prompts, which have one or more responses each, as one rollout."""
    pairs = zip(batches, responses, strict=True)
    return concatenate(
        [score_responses(prompts.repeat(len(r.ids) // len(prompts.input_ids)), r, **models) for prompts, r in pairs]
    )


class PolicyOutputs(NamedTuple):
    """Of each response token, (B, R) fp32: log-probability and entropy under the sampled distribution, in nats, and the
    value of the state before it; what was not asked for, or the model does not have, is None.
    """

    logprobs: Tensor
    entropies: Tensor | None
    values: Tensor | None


def policy_outputs(
    model: nn.Module, texts: Texts, ids: Tensor, sampler: Sampler, entropies: bool = False
) -> PolicyOutputs:
    """What a policy says of the responses `ids` (B, R) of texts. What stands off the response means nothing."""
    values = None
    if isinstance(unwrap(model), ActorCritic):
        logits, values = model(texts.ids, texts.mask, texts.places)
    else:
        logits = logits_at(model, texts.ids, texts.mask, texts.places)
    return PolicyOutputs(*token_statistics(logits, ids, sampler.logits, entropies, sampler.fused), values)


def response_values(critic: nn.Module, texts: Texts) -> Tensor:
    """Value of the state before each response token, (B, R); what stands off the response means nothing."""
    values: Tensor = critic(texts.ids, texts.mask)
    return values.gather(1, texts.places)


def not_finite(rollout: Rollout) -> tuple[str | None, list[int]]:
    """What holds a NaN or an infinity, in words, and in which rows; None and no rows if nothing does."""
    sources = {
        "logprobs": "log-probabilities of the actor",
        "ref_logprobs": "log-probabilities of the reference",
        "values": "values of the critic",
        "part_scores": "scores of the reward model",
    }
    for name, source in sources.items():
        bad = ~torch.isfinite(getattr(rollout, name))
        if bad.any():
            rows: list[int] = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
            return f"the {source} are not finite for {len(rows)} of {len(bad)} responses", rows
    return None, []


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of all rows: prompts padded on the left and responses on the right to the longest."""
    prompt = max(r.prompt_ids.shape[1] for r in rollouts)
    response = max(r.response_ids.shape[1] for r in rollouts)

    def joined(name: str) -> Any:
        parts = [getattr(r, name) for r in rollouts]
        if name == "samples":
            return sum(parts, start=Samples())
        if parts[0].dim() == 1 or name == "part_scores":
            return torch.cat(parts)
        if name.startswith("prompt"):
            return torch.cat([F.pad(part, (prompt - part.shape[1], 0)) for part in parts])
        return torch.cat([F.pad(part, (0, response - part.shape[1])) for part in parts])

    return Rollout(**{f.name: joined(f.name) for f in dataclasses.fields(Rollout)})


class Fit(NamedTuple):
    """Few shapes for many micro-batches: always so many `rows`, and few widths of texts and responses; the rest is
    padding.
    """

    rows: int
    text: Width
    response: Width

    def fill(self, rows: Sequence[int]) -> list[int]:
        """As many as there are to be; the first stands for padding."""
        return [*rows, *[rows[0]] * (self.rows - len(rows))]


def select_rows(rollout: Rollout, rows: Sequence[int], fit: Fit | None = None) -> Rollout:
    """Some rows of a rollout, without their samples, and the columns that are padding in all of them cut away.

    With a `fit` rows of padding follow, and the prompts are left out: an update reads the texts. The host does not wait
    for the device.
    """
    lengths = [rollout.lengths[row] for row in rows]
    prompt, response = max(p for p, _ in lengths), max(1, *(r for _, r in lengths))
    longest = max(p + r for p, r in lengths)
    filled = rows if fit is None else fit.fill(rows)
    if fit is not None:
        prompt, response, longest = 0, fit.response.of(response), fit.text.of(longest)
    index = torch.tensor(filled).to(rollout.scores.device, non_blocking=True)

    def cut(name: str) -> Any:
        if name == "samples":
            return Samples()
        value = getattr(rollout, name)
        if value.dim() == 1 or name == "part_scores":
            return value[index]
        return value[index][:, value.shape[1] - prompt :] if name.startswith("prompt") else take(value, index, response)

    chosen = Rollout(**{f.name: cut(f.name) for f in dataclasses.fields(Rollout)})
    whole = rollout.texts
    places = take(whole.places, index, response).clamp(max=longest - 1)
    texts = Texts(take(whole.ids, index, longest), take(whole.mask, index, longest), places)
    if len(filled) > len(rows):
        for mask in (chosen.response_mask, texts.mask):
            mask[len(rows) :] = False
    vars(chosen).update(lengths=lengths, texts=texts)  # known already, so not to be made again
    return chosen


def take(value: Tensor, index: Tensor, size: int) -> Tensor:
    """A copy of some rows of (B, N), with so many columns: the first, and zeros behind where there are fewer."""
    rows = value[index][:, :size]
    return rows if rows.shape[1] == size else F.pad(rows, (0, size - rows.shape[1]))
