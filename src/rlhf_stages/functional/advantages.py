"""From scores to advantages.

Legend: B sequences, R response tokens. All token tensors are (B, R), aligned with the response: place t belongs to
the t-th token that the actor chose.
"""

import torch
from torch import Tensor

from rlhf_stages.functional.masking import last_index


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Log-ratio of actor and reference at each sampled token (k1 of Schulman's "Approximating KL"), 0 off the mask.

    Its mean over samples of the actor is KL(actor || reference); single values may be negative, the mean is not.
    """
    return torch.where(response_mask, logprobs - ref_logprobs, 0)


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coeff: float) -> Tensor:
    """Reward of each token: -kl_coeff * kl, and the score on top at the last token (EOS, or where it was cut).

    Args:
        scores: (B,) one score per response. A response without any token gets no reward.
    """
    rewards = torch.where(response_mask, -kl_coeff * kl, 0)
    last = last_index(response_mask)
    at_end = torch.arange(kl.shape[1], device=kl.device) == last[:, None]
    return torch.where(at_end, rewards + scores[:, None], rewards)


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) and the returns `advantages + values`.

    A response ends its episode: the value after its last token is 0 and nothing is bootstrapped. 0 off the mask.
    """
    values = torch.where(response_mask, values, 0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(response_mask[:, t], delta + gamma * lambd * next_advantage, 0)
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values
