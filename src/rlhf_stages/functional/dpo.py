"""Direct preference optimization (Rafailov et al. 2023).

Legend: P preference pairs. Log-probabilities are those of whole responses: sums over their tokens, in nats.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """The reward under which the policy is optimal, beta * log(policy / reference), up to a term of the prompt alone.

    Section 4 of the paper, eq. 5 without its partition function, which cancels between responses to the same prompt.
    """
    return beta * (logprobs - ref_logprobs)


def dpo_loss(
    better: Tensor, worse: Tensor, ref_better: Tensor, ref_worse: Tensor, beta: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-log sigmoid of the margin between the implicit rewards of a pair (eq. 7), all inputs (P,).

    With label smoothing e, each label is taken to be wrong with probability e: (1 - e) times the loss of the pair and
    e times that of the pair turned round (conservative DPO, Mitchell 2023). Its minimum is then at a finite margin,
    where sigmoid(margin) = 1 - e.

    Returns:
        Sum over the pairs (nats), and their number.
    """
    # policy less reference first: these are near each other, and their difference loses nothing to rounding
    margin = implicit_rewards(better, ref_better, beta) - implicit_rewards(worse, ref_worse, beta)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return loss.sum(), torch.full((), len(margin), device=margin.device)
