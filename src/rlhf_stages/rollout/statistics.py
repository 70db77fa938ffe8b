"""Numbers that say how a rollout went."""

import torch
from torch import Tensor

from rlhf_stages.functional.masking import masked_mean, masked_sum
from rlhf_stages.rollout.collect import Rollout


def rollout_metrics(rollout: Rollout, prefix: str) -> dict[str, Tensor]:
    """Means over the responses of a rollout, scalars.

    <prefix>/reward_mean: score of the reward model. <prefix>/kl_div_mean: KL to the reference per token, nats (mean
    over a response's tokens, then over responses). <prefix>/kl_sequence: the same summed over a response. The rest:
    tokens per response, percentage of responses that were cut off before EOS, and that are EOS alone.
    """
    mask = rollout.response_mask
    log_ratio = rollout.logprobs - rollout.ref_logprobs
    lengths = mask.sum(1)
    return {
        f"{prefix}/reward_mean": rollout.scores.mean(),
        f"{prefix}/kl_div_mean": masked_mean(log_ratio, mask, dim=1).mean(),
        f"{prefix}/kl_sequence": masked_sum(log_ratio, mask, dim=1).mean(),
        f"{prefix}/response_length": lengths.float().mean(),
        f"{prefix}/cut_off_percentage": 100 * (~rollout.ended).float().mean(),
        f"{prefix}/empty_percentage": 100 * torch.logical_and(rollout.ended, lengths == 1).float().mean(),
    }
