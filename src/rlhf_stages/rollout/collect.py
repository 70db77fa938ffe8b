"""A rollout: prompts, sampled responses, and what the four models say about them.

Legend: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), T = P + R.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_stages.args import PPOArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.advantages import gae, kl_estimate, token_rewards
from rlhf_stages.functional.losses import gather_logprobs
from rlhf_stages.functional.masking import last_index, moments, whiten
from rlhf_stages.models.forward import response_logits
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

    @property
    def input_ids(self) -> Tensor:
        """Prompt and response, (B, T)."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """True at every real token, (B, T)."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)


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
    ids = torch.cat([prompts.input_ids, responses.ids], dim=1)
    mask = torch.cat([prompts.attention_mask, responses.mask], dim=1)
    size = responses.ids.shape[1]
    logprobs, ref_logprobs = (
        torch.where(
            responses.mask, gather_logprobs(response_logits(model, ids, mask, size), responses.ids, temperature), 0
        )
        for model in (actor, reference)
    )
    values = critic(ids, mask)[:, -size - 1 : -1]  # (B, R)
    scores = reward_model(ids, mask).gather(1, last_index(mask)[:, None]).squeeze(1)  # (B,)
    return Rollout(
        prompt_ids=prompts.input_ids,
        prompt_mask=prompts.attention_mask,
        response_ids=responses.ids,
        response_mask=responses.mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=torch.where(responses.mask, values, 0),
        scores=scores,
        ended=responses.ended,
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
