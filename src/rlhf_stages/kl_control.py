"""KL coefficient: fixed, or steered towards a target."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class FixedKL:
    """A coefficient that stays as it is."""

    coeff: float

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the coefficient of a run that is resumed."""
        self.coeff = state["coeff"]

    def update(self, kl: float, samples: int) -> None:
        """Nothing to do."""


@dataclass
class HorizonKL(FixedKL):
    """Proportional controller (Ziegler et al. 2019, section 2.2).

    Each update multiplies the coefficient by 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon. More samples
    than the horizon count as the horizon, so that the coefficient never changes its sign.
    """

    target: float
    horizon: int
    clip: float = 0.2

    def update(self, kl: float, samples: int) -> None:
        """Steer by the mean KL of `samples` responses, measured as `target` is."""
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        self.coeff *= 1 + error * min(samples / self.horizon, 1)


@dataclass
class ErrorKL(FixedKL):
    """Proportional controller without a horizon (RL4LMs, Ramamurthy et al. 2022; OpenRL).

    Each update multiplies the coefficient by 1 + rate * clip(kl / target - 1, -0.2, 0.2): by 2 % at most.
    """

    target: float
    rate: float = 0.1
    clip: float = 0.2

    def update(self, kl: float, samples: int) -> None:
        """Steer by the mean KL, measured as `target` is; how many samples it is from does not matter."""
        self.coeff *= 1 + self.rate * min(max(kl / self.target - 1, -self.clip), self.clip)


def make_kl_control(kind: str, coeff: float, target: float, horizon: int) -> FixedKL:
    """The controller called `fixed`, `horizon` or `error`, starting at `coeff`."""
    if kind == "horizon":
        return HorizonKL(coeff, target, horizon)
    return ErrorKL(coeff, target) if kind == "error" else FixedKL(coeff)
