"""Statistics of preferences and of a policy update.

Legend: B sequences, P pairs, R response tokens.
"""

from torch import Tensor

from rlhf_stages.functional.masking import masked_mean, mean_std
from rlhf_stages.functional.ppo import clip_bounds, log_ratio


def pair_statistics(better_scores: Tensor, worse_scores: Tensor) -> dict[str, Tensor]:
    """Accuracy (a tie is wrong), mean scores and margin of P pairs, scalars."""
    return {
        "acc": (better_scores > worse_scores).float().mean(),
        "choosen_reward": better_scores.mean(),
        "rejected_reward": worse_scores.mean(),
        "reward_margin": (better_scores - worse_scores).mean(),
    }


def order_accuracy(better_scores: Tensor, worse_scores: Tensor, lists: Tensor) -> tuple[Tensor, Tensor]:
    """Share of the ranked lists whose scores fall strictly from the best text to the worst.

    They do where every pair i < j of a list is right; for lists of two it is the accuracy of the pairs.

    Args:
        better_scores, worse_scores: (P,) scores of the pairs.
        lists: (P,) number of the list that a pair comes from.

    Returns:
        The share, and the number of lists.
    """
    # without a count of the lists or their pairs, for which the host would have to wait for the device
    together = lists[:, None] == lists  # (P, P)
    in_order = ~(together & ~(better_scores > worse_scores)).any(1)
    weights = 1 / together.sum(1)  # of a pair, so that each list weighs 1
    count = weights.sum().round()
    return (weights * in_order).sum().round() / count, count


def policy_statistics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    clip_coeff: float,
    clip_coeff_high: float | None = None,
) -> dict[str, Tensor]:
    """KL of the old to the new policy (k3, never negative), share of clipped ratios, and the mean ratio, scalars.

    All inputs (B, R); the means are over the response tokens.
    """
    log = log_ratio(logprobs, old_logprobs, response_mask)
    ratio = log.exp()
    lowest, highest = clip_bounds(clip_coeff, clip_coeff_high)
    clipped = (ratio < lowest) | (ratio > highest)
    return {
        "approx_kl": masked_mean(ratio - 1 - log, response_mask),
        "clip_fraction": masked_mean(clipped.float(), response_mask),
        "ratio_mean": masked_mean(ratio, response_mask),
    }


def explained_variance(error: Tensor, target: Tensor) -> float:
    """1 - Var(error) / Var(target), from the `moments` of returns - values and of the returns over all devices.

    0 where the returns do not vary by more than rounding: then there is nothing to explain.
    """
    error_std, (mean, std) = mean_std(error)[1], mean_std(target)
    return float(1 - (error_std / std) ** 2) if std > 1e-6 * mean.abs().clamp(min=1) else 0.0
