"""Numbers that say how a rollout went."""

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlhf_stages.functional.masking import masked_mean, masked_sum, moments
from rlhf_stages.functional.metrics import explained_variance
from rlhf_stages.rollout.collect import Rollout
from rlhf_stages.rollout.experience import Experience
from rlhf_stages.tracking import distribution


def rollout_metrics(rollout: Rollout, prefix: str) -> dict[str, Tensor]:
    """Means over the responses of a rollout, scalars.

    <prefix>/reward_mean: score, with those of single tokens. <prefix>/kl_div_mean: KL to the reference per token, nats
    (mean over a response's tokens, then over responses). <prefix>/kl_sequence: the same summed over a response. The
    rest: tokens per response, percentage of responses that were cut off before EOS, and that are EOS alone.
    """
    mask = rollout.response_mask
    log_ratio = rollout.logprobs - rollout.ref_logprobs
    lengths = mask.sum(1)
    return {
        f"{prefix}/reward_mean": (rollout.scores + masked_sum(rollout.token_scores, mask, dim=1)).mean(),
        f"{prefix}/kl_div_mean": masked_mean(log_ratio, mask, dim=1).mean(),
        f"{prefix}/kl_sequence": masked_sum(log_ratio, mask, dim=1).mean(),
        f"{prefix}/response_length": lengths.float().mean(),
        f"{prefix}/cut_off_percentage": 100 * (~rollout.ended).float().mean(),
        f"{prefix}/empty_percentage": 100 * torch.logical_and(rollout.ended, lengths == 1).float().mean(),
    }


def experience_metrics(experience: Experience, fabric: Fabric, *, critic: bool) -> dict[str, float]:
    """Distributions of scores, advantages and returns over all devices, and what a critic explains of the returns."""
    mask, returns = experience.rollout.response_mask, experience.returns
    found = {
        **distribution("debug/reward_scores", experience.rollout.scores, fabric),
        **distribution("debug/advantages", experience.advantages[mask], fabric),
        **distribution("debug/returns", returns[mask], fabric),
    }
    if critic:
        error, target = (
            fabric.all_reduce(moments(tensor, mask), reduce_op="sum")
            for tensor in (returns - experience.rollout.values, returns)
        )
        found["info/explained_variance"] = explained_variance(_tensor(error), _tensor(target))
    return found


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)
