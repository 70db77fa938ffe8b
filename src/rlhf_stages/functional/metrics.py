"""Statistics of preferences and of a policy update.

Legend: B sequences, P pairs, R response tokens.
"""

import torch
from torch import Tensor

from rlhf_stages.functional.losses import log_ratio
from rlhf_stages.functional.masking import masked_mean


def pair_statistics(better_scores: Tensor, worse_scores: Tensor) -> dict[str, Tensor]:
    """Accuracy (a tie is wrong), mean scores and margin of P pairs, scalars."""
    return {
        "acc": (better_scores > worse_scores).float().mean(),
        "choosen_reward": better_scores.mean(),
        "rejected_reward": worse_scores.mean(),
        "reward_margin": (better_scores - worse_scores).mean(),
    }


def policy_statistics(
    logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor, clip_coeff: float
) -> dict[str, Tensor]:
    """KL of the old to the new policy (k3, never negative) and share of clipped ratios, all inputs (B, R), scalars."""
    log = log_ratio(logprobs, old_logprobs, response_mask)
    clipped = (log.exp() - 1).abs() > clip_coeff
    return {
        "approx_kl": masked_mean(log.exp() - 1 - log, response_mask),
        "clip_fraction": masked_mean(clipped.float(), response_mask),
    }


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the response tokens; 0 where the returns do not vary."""
    error, target = (returns - values)[response_mask], returns[response_mask]
    if target.numel() < 2 or float(target.var()) == 0:
        return torch.zeros((), device=returns.device)
    return 1 - error.var() / target.var()
