"""What a model says of tokens, from logits that are never all held in fp32.

Legend: B sequences, T tokens, R response tokens, V vocabulary.

Logits are the largest tensor of a step: 64 responses of 128 tokens with a vocabulary of 50,000 take 1.6 GB in fp32, and
their softmax and gradient as much again. Here a few rows at a time go to fp32, and once more in the backward pass; or,
where functions are `fused` by torch.compile, one kernel reads them all and nothing is written in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2**26  # logits in fp32 at a time: 256 MiB


def token_statistics(
    logits: Tensor,
    ids: Tensor,
    transform: Callable[[Tensor], Tensor],
    entropies: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each id under the logits at its place, (B, R) fp32, in nats, and on request the entropy there.

    Args:
        logits: (B, R, V) as the model gives them; those at t predict `ids[:, t]`.
        transform: to the logits of the distribution that counts, (b, R, V) -> (b, R, V) fp32.
    """
    parts = _by_rows(_statistics, logits, ids, (transform, entropies), fused)
    logprobs, entropy_parts = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy_parts) if entropies else None


def sft_loss(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float = 0.0, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each token given those before it.

    Args:
        logits: (B, T, V); those at t predict the token at t + 1.
        targets: (B, T) the ids, `ignore_index` where a token does not count.

    Returns:
        Sum over the tokens that count (nats), and their number. The first token is never predicted.
    """
    following = F.pad(targets[:, 1:], (0, 1), value=ignore_index)  # (B, T): what the logits at each place predict
    parts = _by_rows(_cross_entropy, logits, following, (ignore_index, label_smoothing), fused)
    return torch.stack(parts).sum(), (targets[:, 1:] != ignore_index).sum()


def gather_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each id under the logits at its place, (B, R, V), (B, R) -> (B, R) fp32, in nats.

    `logits[:, t]` must be those that predict `ids[:, t]`: the caller shifts.
    """
    logits = logits.float()
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the distribution at each place, (B, R, V) -> (B, R) fp32, in nats."""
    logprobs = F.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def _statistics(
    logits: Tensor, ids: Tensor, transform: Callable[[Tensor], Tensor], entropies: bool
) -> tuple[Tensor, Tensor | None]:
    scaled = transform(logits)
    return gather_logprobs(scaled, ids), entropy(scaled) if entropies else None


def _cross_entropy(logits: Tensor, wanted: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    # an ignored row of NaN would still have a NaN gradient
    read = torch.where((wanted != ignore_index)[..., None], logits, 0).float().flatten(0, 1)
    return F.cross_entropy(
        read, wanted.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )


def _by_rows(
    function: Callable[..., Any], logits: Tensor, ids: Tensor, settings: tuple[Any, ...], fused: bool
) -> list[Any]:
    """What the function says of a few rows at a time, or if fused of all at once."""
    if fused:
        return [torch.compile(function)(logits, ids, *settings)]
    rows = max(CHUNK // max(logits[0].numel(), 1), 1)
    parts = zip(torch.split(logits, rows), torch.split(ids, rows), strict=True)
    if rows >= len(logits) or not (torch.is_grad_enabled() and logits.requires_grad):
        return [function(*part, *settings) for part in parts]
    return [checkpoint(function, *part, *settings, use_reentrant=False, preserve_rng_state=False) for part in parts]
