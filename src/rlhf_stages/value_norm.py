"""Values on a scale of their own: running mean and standard deviation of the returns."""

import torch
from torch import Tensor

from rlhf_stages.functional.masking import mean_std


class ValueNorm:
    """Exponential mean and standard deviation of the returns of all rollouts, without bias towards the start.

    The critic's output is a normalized value: `denormalize` makes a return of it, `normalize` a target. The idea is
    that of PopArt (van Hasselt et al. 2016), without its rescaling of the head, as MAPPO and OpenRL use it.

    Args:
        beta: weight of the past at each update.
    """

    def __init__(self, beta: float = 0.99) -> None:
        self.beta = beta
        self._total = torch.zeros(3, dtype=torch.float64)

    def update(self, moments: Tensor) -> None:
        """Take in the `moments` of a rollout's returns, summed over all devices, (3,)."""
        # per sample, so that a rollout with longer responses does not weigh more
        self._total = self.beta * self._total + (1 - self.beta) * moments.cpu() / moments[0].cpu().clamp(min=1)

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {"total": self._total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with the statistics of a run that is resumed."""
        self._total = state["total"]

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns to the critic's scale."""
        mean, std = self._scale()
        return (returns - mean) / std

    def denormalize(self, values: Tensor) -> Tensor:
        """The critic's output to the scale of returns."""
        mean, std = self._scale()
        return values * std + mean

    def _scale(self) -> tuple[float, float]:
        """Mean and standard deviation; 0 and 1 before the first update. The weights' sum cancels in both."""
        mean, std = (float(statistic) for statistic in mean_std(self._total / self._total[0].clamp(min=1e-12)))
        return mean, (std if std > 1e-4 else 1.0)
