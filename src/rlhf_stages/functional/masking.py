"""Masks, positions and masked statistics.

Legend: B sequences, T tokens. Masks are bool, True = counts. What lies under a False is never read, be it NaN.
"""

import torch
from torch import Tensor


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """True at the first `lengths[b]` of `size` places, (B,) -> (B, size)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def last_index(mask: Tensor) -> Tensor:
    """Index of the last True of each row, -1 for a row without, (B, T) -> (B,) int64."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask, places, 0).amax(1) - 1


def left_aligned(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding, wherever it stands, behind the tokens that count; (B, T) x 2 -> (B, longest) x 2.

    A causal model then reads each text as it would alone, with positions from 0, and no query sees nothing but
    padding: on an H100 cuDNN attention gave such queries NaN gradients in 3 of 300 random bf16 batches (torch 2.11).
    """
    order = mask.long().argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
    return ids.gather(1, order), mask.gather(1, order)


def packed_mask(position_ids: Tensor) -> Tensor:
    """Who sees whom in rows of several texts: each token those of its own text up to itself, (B, T) -> (B, 1, T, T).

    A text starts where its position is 0. Padding, with positions of 0, is texts of one token.
    """
    text = (position_ids == 0).cumsum(1)
    same = text[:, None, :, None] == text[:, None, None, :]
    return same & torch.ones_like(same[:1]).tril()


def first_difference(a: Tensor, b: Tensor) -> Tensor:
    """Index of the first token at which two right-padded id tensors differ, T if none, (B, T) x 2 -> (B,) int64."""
    differs = a != b
    return torch.where(differs.any(1), differs.long().argmax(1), a.shape[1])


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values that count, over everything or over one axis (which is dropped)."""
    kept = torch.where(mask, values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values that count; 0 where none does."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def moments(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Count, sum and sum of squares of the values that count, all without a mask, (3,) float64.

    They add up over devices, so that a statistic of the global batch is `mean_std` of their sum.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    kept = torch.where(mask, values, 0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def mean_std(total: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (population) standard deviation from `moments`, two scalars in float64."""
    count, first, second = total.unbind()
    mean = first / count.clamp(min=1)
    return mean, (second / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()


def whiten(values: Tensor, mask: Tensor, total: Tensor, shift_mean: bool, eps: float = 1e-8) -> Tensor:
    """Scale the values to standard deviation 1, and with `shift_mean` to mean 0; 0 where the mask is False.

    `total` holds the `moments` of all values that are to share the scale: those of every device. Values that are all
    equal become 0 (or stay as they are without `shift_mean`), never NaN.
    """
    mean, std = (statistic.to(values.dtype) for statistic in mean_std(total))
    scale = torch.where(std > eps, std, torch.ones_like(std))
    whitened = (values - mean) / scale
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0)
