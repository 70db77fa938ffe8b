"""Is this run well? Numbers of each rollout; `rlhf_stages.rollout.monitor` says what they mean.

Legend: B sequences, R response tokens.
"""

import itertools

import torch
from torch import Tensor

from rlhf_stages.functional.masking import masked_mean, masked_sum
from rlhf_stages.rollout.collect import Rollout

PERCENTILES = (5, 50, 95)


def health_metrics(rollout: Rollout) -> dict[str, Tensor]:
    """Numbers of a rollout, scalars; the devices' are averaged by whoever logs them.

    health/entropy: mean over the response tokens, nats. health/kl_max: largest KL of a response to the reference, nats,
    and health/kl_error: standard error of the mean. health/length_std: deviation of the tokens per response.
    health/duplicate_percentage: responses that an earlier one of the rollout equals. health/distinct_2: different pairs
    of neighbouring tokens per pair. health/score_pXX: percentiles of the reward model's scores.
    """
    mask = rollout.response_mask
    kl = masked_sum(rollout.logprobs - rollout.ref_logprobs, mask, dim=1)
    rows = [ids[kept].tolist() for ids, kept in zip(rollout.response_ids, mask, strict=True)]
    pairs = [pair for row in rows for pair in itertools.pairwise(row)]
    scores = rollout.scores.float()
    duplicates = 1 - len(set(map(tuple, rows))) / len(rows)
    return {
        "health/entropy": masked_mean(rollout.entropies, mask),
        "health/kl_max": kl.max(),
        "health/kl_error": kl.std(correction=0) / len(kl) ** 0.5,
        "health/length_std": mask.sum(1).float().std(correction=0),
        "health/duplicate_percentage": torch.tensor(100 * duplicates, device=mask.device),
        "health/distinct_2": torch.tensor(len(set(pairs)) / len(pairs) if pairs else 0.0, device=mask.device),
        **{f"health/score_p{p:02}": scores.quantile(p / 100) for p in PERCENTILES},
    }
