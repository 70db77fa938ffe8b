"""Experience: a rollout with its advantages, and the losses of an update on it.

Legend: B sequences, R response tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_stages.args import PPOArgs
from rlhf_stages.functional.advantages import (
    gae,
    grpo_advantages,
    kl_estimate,
    response_returns,
    rloo_advantages,
    token_rewards,
)
from rlhf_stages.functional.masking import masked_sum, moments, whiten
from rlhf_stages.functional.metrics import policy_statistics
from rlhf_stages.functional.ppo import kl_loss, policy_loss, value_loss
from rlhf_stages.rollout.collect import Fit, Rollout, select_rows, take
from rlhf_stages.value_norm import ValueNorm


@dataclass(frozen=True)
class Experience:
    """A rollout with its advantages and returns, (B, R), and the rewards they come from: what the update sees.

    `returns` are what the critic learns; without a critic nobody reads them.
    """

    rollout: Rollout
    rewards: Tensor
    advantages: Tensor
    returns: Tensor

    def select(self, rows: Sequence[int], fit: Fit | None = None) -> "Experience":
        """Some rows, with the columns that are padding in all of them cut away, and padding as `fit` says."""
        chosen = select_rows(self.rollout, rows, fit)
        size = chosen.response_ids.shape[1]
        filled = rows if fit is None else fit.fill(rows)
        index = torch.tensor(filled).to(self.rewards.device, non_blocking=True)
        return Experience(chosen, *(take(t, index, size) for t in (self.rewards, self.advantages, self.returns)))

    def normalized(self, value_norm: ValueNorm | None) -> "Experience":
        """Values and returns on the scale that the critic learns."""
        if value_norm is None:
            return self
        values = value_norm.normalize(self.rollout.values)
        rollout = replace(self.rollout, values=values)
        return replace(self, rollout=rollout, returns=value_norm.normalize(self.returns))


def make_experience(
    rollout: Rollout,
    args: PPOArgs,
    kl_coeff: float,
    group_size: int = 1,
    global_sum: Callable[[Tensor], Tensor] = lambda total: total,
    reward_scale: tuple[float, float] = (0.0, 1.0),
) -> Experience:
    """Scores to advantages: standardize, penalty for a missing EOS, clip, scale, KL, GAE (or RLOO, GRPO), whiten.

    Scores of single tokens are added where they belong, as they are.

    Args:
        group_size: responses to each prompt; they stand in a row.
        global_sum: adds a tensor up over all devices; scaling and whitening are over the global rollout.
        reward_scale: mean and standard deviation by which scores are standardized.
    """
    mask = rollout.response_mask
    mean, std = reward_scale
    scores = (rollout.scores - mean) / std
    scores = torch.where(rollout.ended, scores, scores - args.missing_eos_penalty)
    if args.clip_rewards:
        scores = scores.clamp(-args.reward_clip_value, args.reward_clip_value)
    if args.normalize_rewards:
        every = torch.ones_like(scores, dtype=torch.bool)
        scores = whiten(scores, every, global_sum(moments(scores)), shift_mean=False)
    kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, mask, args.kl_estimator)
    rewards = token_rewards(scores, kl, mask, kl_coeff) + torch.where(mask, rollout.token_scores, 0)
    if args.advantage_estimator == "gae":
        advantages, returns = gae(rewards, rollout.values, mask, args.gae_gamma, args.gae_lambd)
        if args.normalize_advantages:
            advantages = whiten(advantages, mask, global_sum(moments(advantages, mask)), shift_mean=True)
        return Experience(rollout, rewards, advantages, returns)
    estimate = {"rloo": rloo_advantages, "grpo": grpo_advantages}[args.advantage_estimator]
    advantages = estimate(response_returns(rewards, mask), mask, group_size)
    return Experience(rollout, rewards, advantages, torch.zeros_like(advantages))


def kl_moved(
    outputs: Sequence[Mapping[str, Tensor]], batches: Sequence[Experience], global_sum: Callable[[Tensor], Tensor]
) -> float:
    """How far the actor is from the one that sampled, as an update found it: mean over the response tokens of all
    devices, nats.

    Args:
        outputs: statistics of `policy_objective`, one for each micro-batch.
    """
    counts = torch.stack([batch.rollout.response_mask.sum() for batch in batches])
    kls = torch.stack([statistics["approx_kl"] for statistics in outputs])
    total, count = global_sum(torch.stack([(kls * counts).sum(), counts.sum()])).unbind()
    return float(total / count.clamp(min=1))


def policy_objective(
    batch: Experience, logprobs: Tensor, entropies: Tensor | None, args: PPOArgs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate, entropy bonus and KL term of a micro-batch.

    Args:
        logprobs, entropies: (B, R) of the sampled distribution under the policy as it is now; entropies are only read
            with an `entropy_coeff`.

    Returns:
        The sum over the response tokens, and statistics of the update.
    """
    r, mask = batch.rollout, batch.rollout.response_mask
    loss, _ = policy_loss(
        logprobs, r.logprobs, batch.advantages, mask, args.clip_coeff, args.clip_coeff_high, args.dual_clip
    )
    if args.entropy_coeff and entropies is not None:
        loss = loss - args.entropy_coeff * masked_sum(entropies, mask)
    if args.kl_loss_coeff:
        loss = loss + args.kl_loss_coeff * kl_loss(logprobs, r.logprobs, r.ref_logprobs, mask)[0]
    return loss, policy_statistics(logprobs.detach(), r.logprobs, mask, args.clip_coeff, args.clip_coeff_high)


def value_objective(batch: Experience, values: Tensor, args: PPOArgs) -> Tensor:
    """Value loss of a micro-batch, summed over the response tokens.

    Args:
        batch: `normalized`, where values have a scale of their own.
        values: (B, R) as the critic gives them now, on that scale.
    """
    r = batch.rollout
    clip = args.clip_coeff if args.value_clip_coeff is None else args.value_clip_coeff
    delta = args.huber_delta if args.value_loss == "huber" else None
    return value_loss(values, r.values, batch.returns, r.response_mask, clip, delta)[0]
