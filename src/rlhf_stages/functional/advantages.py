"""From scores to advantages.

Legend: B sequences, R response tokens. All token tensors are (B, R), aligned with the response: place t belongs to
the t-th token that the actor chose.
"""

import torch
from torch import Tensor

from rlhf_stages.functional.masking import last_index, masked_sum


def k1(log_ratio: Tensor) -> Tensor:
    """log(actor / reference) itself: unbiased under samples of the actor, single values may be negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of the log-ratio: never negative, biased, little variance."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """reference / actor - 1 + log-ratio: never negative and unbiased."""
    return (-log_ratio).exp() - 1 + log_ratio


# of Schulman, "Approximating KL Divergence" (2020), for KL(actor || reference) from samples of the actor
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate of KL(actor || reference) at each sampled token, 0 off the mask, in nats.

    In the reward k1 is the one whose policy gradient is that of the KL.
    """
    return KL_ESTIMATORS[estimator](torch.where(response_mask, logprobs - ref_logprobs, 0))


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


def response_returns(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of the rewards of each response, KL and score together, (B, R) -> (B,)."""
    return masked_sum(rewards, response_mask, dim=1)


def rloo_advantages(returns: Tensor, response_mask: Tensor, group_size: int) -> Tensor:
    """Return of a response less the mean of the others to the same prompt (Ahmadian et al. 2024), on each token.

    Args:
        returns: (B,), the responses to a prompt stand in a row, `group_size` of them.
    """
    groups = returns.reshape(-1, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return torch.where(response_mask, (groups - others).reshape(-1, 1), 0)


def grpo_advantages(returns: Tensor, response_mask: Tensor, group_size: int) -> Tensor:
    """Return of a response, whitened over the responses to its prompt (Shao et al. 2024, eq. 3), on each token.

    Args:
        returns: (B,), the responses to a prompt stand in a row, `group_size` of them; equal ones give 0.
    """
    groups = returns.reshape(-1, group_size)
    # the constant is TRL's: rounding must not become an advantage where all returns are equal
    whitened = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return torch.where(response_mask, whitened.reshape(-1, 1), 0)
