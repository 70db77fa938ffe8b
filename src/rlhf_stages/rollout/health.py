"""Is this run well? Numbers of each rollout; `rlhf_stages.rollout.monitor` says what they mean.

Legend: B sequences, R response tokens.
"""

import itertools
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlhf_stages.functional.masking import masked_sum
from rlhf_stages.rollout.collect import Rollout

PERCENTILES = (5, 50, 95)


def health_metrics(rollout: Rollout, fabric: Fabric) -> dict[str, Tensor]:
    """Numbers of a rollout over all devices, scalars.

    health/entropy: mean over the response tokens, nats. health/kl_max: largest KL of a response to the reference, nats.
    health/kl_error: standard error of the mean KL if its true value is 0. health/length_std: deviation of the tokens
    per response. health/score_pXX: percentiles of the reward model's scores. Responses stay where they are, so that the
    last two are of this device alone, and are averaged by whoever logs them. health/duplicate_percentage: responses
    that an earlier one equals. health/distinct_2: different pairs of neighbouring tokens per pair.
    """
    mask = rollout.response_mask
    sums = (masked_sum(values, mask, dim=1) for values in (rollout.logprobs - rollout.ref_logprobs, rollout.entropies))
    here = torch.stack([*sums, mask.sum(1), rollout.scores.float()])  # (4, B)
    gathered: Any = fabric.all_gather(here)
    kl, entropies, lengths, scores = gathered.reshape(-1, *here.shape).transpose(0, 1).flatten(1)
    rows = [ids[kept].tolist() for ids, kept in zip(rollout.response_ids, mask, strict=True)]
    pairs = [pair for row in rows for pair in itertools.pairwise(row)]
    duplicates = 1 - len(set(map(tuple, rows))) / len(rows)
    return {
        "health/entropy": entropies.sum() / lengths.sum().clamp(min=1),
        "health/kl_max": kl.max(),
        "health/kl_error": kl.square().mean().sqrt() / len(kl) ** 0.5,
        "health/length_std": lengths.std(correction=0),
        "health/duplicate_percentage": torch.tensor(100 * duplicates, device=mask.device),
        "health/distinct_2": torch.tensor(len(set(pairs)) / len(pairs) if pairs else 0.0, device=mask.device),
        **{f"health/score_p{p:02}": scores.quantile(p / 100) for p in PERCENTILES},
    }
