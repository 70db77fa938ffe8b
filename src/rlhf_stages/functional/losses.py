"""Losses of the stages.

Legend: B sequences, T tokens, P preference pairs, L labels. A loss returns the sum
over what counts and the count, so that the caller divides once by all that one optimizer step sees, on all devices.

The reward losses take every pair i < j of ranked lists of any length, and the mean is over all pairs of the step: a
list of k texts weighs as its k (k - 1) / 2 pairs do (the rank-list loss of InstructGPT, Ouyang et al. 2022, eq. 1,
weighs every list alike instead). With margins, the better text is to win by them: -log sigmoid(better - worse - margin)
(Llama 2, Touvron et al. 2023, eq. 2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_stages.functional.masking import length_mask, masked_mean


def score_at(scores: Tensor, lengths: Tensor) -> Tensor:
    """Score of a right-padded text: the one at its last token, (B, T), (B,) -> (B,)."""
    return scores.gather(1, (lengths - 1)[:, None]).squeeze(1)


def per_sample_reward_loss(
    better: Tensor, worse: Tensor, starts: Tensor, better_lengths: Tensor, worse_lengths: Tensor, margins: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairwise loss on every token from the first difference to the end of the longer text (DeepSpeed-Chat).

    -log sigmoid(better_t - worse_t - margin), averaged over these tokens for each pair. A text that has ended keeps the
    score of its last token, so that nothing depends on what stands in the padding.

    Args:
        better, worse: (P, T) token scores.
        starts: (P,) first index at which the two texts differ.
        better_lengths, worse_lengths: (P,) lengths in tokens.
        margins: (P,) by how much the better text is to win; 0 is none.

    Returns:
        Sum over the pairs, and their number.
    """
    size = better.shape[1]
    lead = _held(better, better_lengths) - _held(worse, worse_lengths) - margins[:, None]
    mask = length_mask(torch.maximum(better_lengths, worse_lengths), size) & ~length_mask(starts, size)
    return masked_mean(-F.logsigmoid(lead), mask, dim=1).sum(), _pairs(better)


def last_token_reward_loss(
    better: Tensor, worse: Tensor, starts: Tensor, better_lengths: Tensor, worse_lengths: Tensor, margins: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairwise loss on the scores of the last tokens (Ouyang et al. 2022, eq. 1); `starts` is not used.

    Returns:
        Sum over the pairs, and their number.
    """
    lead = score_at(better, better_lengths) - score_at(worse, worse_lengths)
    return -F.logsigmoid(lead - margins).sum(), _pairs(better)


def average_reward_loss(
    better: Tensor, worse: Tensor, starts: Tensor, better_lengths: Tensor, worse_lengths: Tensor, margins: Tensor
) -> tuple[Tensor, Tensor]:
    """Pairwise loss on the mean score of each text from the first difference to its own end.

    Returns:
        Sum over the pairs, and their number.
    """
    size = better.shape[1]
    after = ~length_mask(starts, size)
    # a text that is a prefix of the other has no token of its own: its last one speaks for it
    means = [
        torch.where(
            starts < lengths, masked_mean(scores, after & length_mask(lengths, size), dim=1), score_at(scores, lengths)
        )
        for scores, lengths in ((better, better_lengths), (worse, worse_lengths))
    ]
    return -F.logsigmoid(means[0] - means[1] - margins).sum(), _pairs(better)


REWARD_LOSSES = {
    "per_sample": per_sample_reward_loss,
    "last_token": last_token_reward_loss,
    "average": average_reward_loss,
}


def centering_loss(better: Tensor, worse: Tensor) -> tuple[Tensor, Tensor]:
    """Squared sum of the scores of the two texts of a pair, which keeps scores around 0 (Eisenstein et al. 2023).

    Preferences alone leave it open what is added to every score.

    Args:
        better, worse: (P,) scores of the texts.

    Returns:
        Sum over the pairs, and their number.
    """
    return (better + worse).square().sum(), _pairs(better)


def classification_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the label of each text.

    Args:
        logits: (B, L).
        labels: (B,) int64, the right ones.
        weights: (L,) fp32, what a text of each label counts; ones by custom.

    Returns:
        Weighted sum over the texts (nats), and the sum of their weights.
    """
    return F.cross_entropy(logits.float(), labels, weight=weights, reduction="sum"), weights[labels].sum()


def balanced_weights(counts: Tensor) -> Tensor:
    """Weights that let every label count as the most frequent one does, (L,) texts of each label -> (L,) fp32.

    None is below 1, so that a step of few texts still has a count of at least 1.
    """
    return counts.max() / counts.clamp(min=1).float()


def _held(scores: Tensor, lengths: Tensor) -> Tensor:
    """The scores with the last real one repeated over the padding, (P, T)."""
    places = torch.arange(scores.shape[1], device=scores.device)
    return scores.gather(1, torch.minimum(places, (lengths - 1)[:, None]))


def _pairs(scores: Tensor) -> Tensor:
    # filled on the device: a copy from the host would wait for it, and could not be part of a CUDA graph
    return torch.full((), len(scores), device=scores.device)
