"""Numbers of your own about every rollout: `--plugins examples/custom_metrics.py`.

They stand in metrics.csv and in the loggers under the names that the function returns. It may declare `rollout` (the
tensors, see `rlhf_stages.rollout.collect.Rollout`), `prompts`, `responses`, `references` and `metadata`.
"""

from collections.abc import Sequence

from rlhf_stages.plugins import register_metrics
from rlhf_stages.rollout.collect import Rollout


@register_metrics("questions")
def questions(rollout: Rollout, responses: Sequence[str]) -> dict[str, float]:
    """How many responses ask something back, and whether those are liked."""
    asks = [response.rstrip().endswith("?") for response in responses]
    liked = [score for score, is_question in zip(rollout.scores.tolist(), asks, strict=True) if is_question]
    share = sum(asks) / len(asks)
    return {"mine/question_share": share, "mine/question_score": sum(liked) / len(liked) if liked else 0.0}
