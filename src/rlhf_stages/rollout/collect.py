"""A rollout: prompts, sampled responses, and what the four models say about them.

Legend: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), T tokens of the longest text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_stages.args import PPOArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.advantages import gae, kl_estimate, token_rewards
from rlhf_stages.functional.losses import gather_logprobs
from rlhf_stages.functional.masking import left_aligned, moments, whiten
from rlhf_stages.models.forward import logits_at
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.rollout.generation import Responses


@dataclass(frozen=True)
class Rollout:
    """Responses of the actor with the numbers that training needs; every tensor has B rows.

    prompt_ids, prompt_mask (B, P); response_ids, response_mask, logprobs, ref_logprobs, values (B, R);
    scores (B,) of the reward model as it gave them; ended (B,) bool.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    scores: Tensor
    ended: Tensor

    @cached_property
    def texts(self) -> "Texts":
        """Prompts and responses as the models read them."""
        prompts = PromptBatch(self.prompt_ids, self.prompt_mask)
        return join(prompts, Responses(self.response_ids, self.response_mask, self.ended))


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


@dataclass(frozen=True)
class Experience:
    """A rollout with its advantages and returns, (B, R), and the rewards they come from: what the update sees."""

    rollout: Rollout
    rewards: Tensor
    advantages: Tensor
    returns: Tensor

    def select(self, rows: Tensor) -> "Experience":
        """Some rows, with the columns that are padding in all of them cut away."""
        chosen = select_rows(self.rollout, rows)
        size = chosen.response_ids.shape[1]
        return Experience(chosen, *(t[rows][:, :size] for t in (self.rewards, self.advantages, self.returns)))


@torch.no_grad()
def score_responses(
    prompts: PromptBatch,
    responses: Responses,
    *,
    actor: nn.Module,
    reference: nn.Module,
    critic: nn.Module,
    reward_model: nn.Module,
    temperature: float,
) -> Rollout:
    """Run the four models over sampled responses.

    The log-probabilities are those of the training forward, not of the sampler, so that the ratio starts at 1. Place t
    of `values` is the value before token t was chosen; the score is read at the last token of the text.
    """
    texts = join(prompts, responses)
    logprobs, ref_logprobs = (
        torch.where(responses.mask, response_logprobs(model, texts, responses.ids, temperature), 0)
        for model in (actor, reference)
    )
    values = response_values(critic, texts)
    return Rollout(
        prompt_ids=prompts.input_ids,
        prompt_mask=prompts.attention_mask,
        response_ids=responses.ids,
        response_mask=responses.mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=torch.where(responses.mask, values, 0),
        scores=end_scores(reward_model, texts.ids, texts.mask),
        ended=responses.ended,
    )


def response_logprobs(model: nn.Module, texts: Texts, response_ids: Tensor, temperature: float) -> Tensor:
    """Log-probability of each response token, (B, R) fp32, in nats; what stands off the response means nothing."""
    return gather_logprobs(logits_at(model, texts.ids, texts.mask, texts.places), response_ids, temperature)


def response_values(critic: nn.Module, texts: Texts) -> Tensor:
    """Value of the state before each response token, (B, R); what stands off the response means nothing."""
    values: Tensor = critic(texts.ids, texts.mask)
    return values.gather(1, texts.places)


def check_finite(rollout: Rollout) -> None:
    """Refuse a rollout with a NaN or an infinity, and say which model it came from.

    Raises:
        FloatingPointError: there is one.
    """
    sources = {
        "logprobs": "log-probabilities of the actor",
        "ref_logprobs": "log-probabilities of the reference",
        "values": "values of the critic",
        "scores": "scores of the reward model",
    }
    for name, source in sources.items():
        bad = ~torch.isfinite(getattr(rollout, name))
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()
            raise FloatingPointError(
                f"the {source} are not finite for {len(rows)} of {len(bad)} responses (rows {rows[:8]} of the rollout);"
                " lower the learning rate, or use --precision=bf16-mixed rather than 16-mixed"
            )


def make_experience(
    rollout: Rollout, args: PPOArgs, kl_coeff: float, global_sum: Callable[[Tensor], Tensor] = lambda total: total
) -> Experience:
    """Scores to advantages: penalty for a missing EOS, clip, scale, KL, GAE, whiten.

    Args:
        global_sum: adds a tensor up over all devices; scaling and whitening are over the global rollout.
    """
    mask = rollout.response_mask
    scores = torch.where(rollout.ended, rollout.scores, rollout.scores - args.missing_eos_penalty)
    if args.clip_rewards:
        scores = scores.clamp(-args.reward_clip_value, args.reward_clip_value)
    if args.normalize_rewards:
        every = torch.ones_like(scores, dtype=torch.bool)
        scores = whiten(scores, every, global_sum(moments(scores, every)), shift_mean=False)
    kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, mask)
    rewards = token_rewards(scores, kl, mask, kl_coeff)
    advantages, returns = gae(rewards, rollout.values, mask, args.gae_gamma, args.gae_lambd)
    if args.normalize_advantages:
        advantages = whiten(advantages, mask, global_sum(moments(advantages, mask)), shift_mean=True)
    return Experience(rollout, rewards, advantages, returns)


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of all rows: prompts padded on the left and responses on the right to the longest."""
    prompt = max(r.prompt_ids.shape[1] for r in rollouts)
    response = max(r.response_ids.shape[1] for r in rollouts)

    def joined(name: str) -> Tensor:
        parts = [getattr(r, name) for r in rollouts]
        if parts[0].dim() == 1:
            return torch.cat(parts)
        if name.startswith("prompt"):
            return torch.cat([F.pad(part, (prompt - part.shape[1], 0)) for part in parts])
        return torch.cat([F.pad(part, (0, response - part.shape[1])) for part in parts])

    return Rollout(**{field.name: joined(field.name) for field in dataclasses.fields(Rollout)})


def select_rows(rollout: Rollout, rows: Tensor) -> Rollout:
    """Some rows of a rollout, with the columns that are padding in all of them cut away."""
    prompt = int(rollout.prompt_mask[rows].sum(1).max())
    response = max(int(rollout.response_mask[rows].sum(1).max()), 1)

    def cut(name: str) -> Any:
        value = getattr(rollout, name)[rows]
        if value.dim() == 1:
            return value
        return value[:, value.shape[1] - prompt :] if name.startswith("prompt") else value[:, :response]

    return Rollout(**{field.name: cut(field.name) for field in dataclasses.fields(Rollout)})
