"""Losses of the policy update.

Legend: B sequences, R response tokens. All token tensors are (B, R). A loss returns the sum over the
response tokens and their number, so that the caller divides once by all that one optimizer step sees, on all devices.
"""

import torch
from torch import Tensor

from rlhf_stages.functional.advantages import k3
from rlhf_stages.functional.masking import masked_sum

# exp() of the log-ratio stays finite in fp32 (and its product with an advantage does), cf. verl and OpenRLHF
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Log of the probability ratio, clamped so that its exponential is finite; 0 where nothing counts."""
    return torch.where(response_mask, logprobs - old_logprobs, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_bounds(clip_coeff: float, clip_coeff_high: float | None) -> tuple[float, float]:
    """Smallest and largest ratio that counts; without a `clip_coeff_high` the range is the same on both sides."""
    return 1 - clip_coeff, 1 + (clip_coeff if clip_coeff_high is None else clip_coeff_high)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_coeff: float,
    clip_coeff_high: float | None = None,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of PPO (Schulman et al. 2017, eq. 7), negated.

    Args:
        clip_coeff, clip_coeff_high: the ratio counts between 1 - clip_coeff and 1 + clip_coeff_high (None: clip_coeff;
            asymmetric as in DAPO, Yu et al. 2025).
        dual_clip: for negative advantages the loss is at most `dual_clip * |advantage|` (Ye et al. 2020); 0 is off.

    Returns:
        Sum over the response tokens, and their number.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    clipped = ratio.clamp(*clip_bounds(clip_coeff, clip_coeff_high))
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, dual_clip * advantages.abs()), loss)
    return masked_sum(loss, response_mask), response_mask.sum()


def kl_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) as a loss: k3 weighted by the probability ratio to the sampling policy.

    Its gradient on each sample is ratio * log(policy / reference) * grad log policy, that is: unbiased for the reverse
    KL. Without the weight k1 has gradient 0 on average and k3 that of another divergence (Liu et al. 2025,
    arXiv 2510.01555; "Comedy of Estimators", arXiv 2512.21852).

    Returns:
        Sum over the response tokens, and their number.
    """
    ratio = log_ratio(logprobs, old_logprobs, response_mask).exp()
    to_reference = log_ratio(logprobs, ref_logprobs, response_mask)
    return masked_sum(ratio * k3(to_reference), response_mask), response_mask.sum()


def squared_error(difference: Tensor) -> Tensor:
    """Half the square. The half is part of the loss and not of `vf_coeff`."""
    return 0.5 * difference.square()


def huber_error(difference: Tensor, delta: float) -> Tensor:
    """Half the square up to `delta`, a line of the same slope beyond (Huber 1964)."""
    size = difference.abs()
    return torch.where(size <= delta, squared_error(difference), delta * (size - 0.5 * delta))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    clip_coeff: float,
    huber_delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Error of the values, the larger of clipped and unclipped (OpenAI baselines).

    Args:
        clip_coeff: the value counts within this distance of the old one.
        huber_delta: Huber error with this delta in place of the squared one.

    Returns:
        Sum over the response tokens, and their number.
    """
    values = torch.where(response_mask, values, 0)  # or a NaN under the padding would have a NaN gradient
    clipped = old_values + (values - old_values).clamp(-clip_coeff, clip_coeff)
    differences = values - returns, clipped - returns
    errors = [squared_error(d) if huber_delta is None else huber_error(d, huber_delta) for d in differences]
    return masked_sum(torch.maximum(*errors), response_mask), response_mask.sum()
