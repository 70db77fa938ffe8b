"""Warnings about a run, from the numbers of its steps. Needs no tensors, so that reports can ask it too."""

import math
from collections.abc import Mapping
from typing import Any

QUIET_STEPS = 20  # a warning is not repeated within this many steps
# what later steps are compared with the first step's
_COMPARED = (
    *("health/distinct_2", "health/duplicate_percentage", "train/response_length", "train/reward_mean"),
    "train/cut_off_percentage",
)


class HealthMonitor:
    """Compares each step's metrics with the first step's and says what looks ill, each thing once in a while."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._said: dict[str, int] = {}
        self._blind_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"first": self._first, "said": self._said, "blind_steps": self._blind_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a run that is resumed had seen."""
        self._first, self._said, self._blind_steps = state["first"], state["said"], state["blind_steps"]

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Warnings about a step, by its metrics (those of `rollout_metrics` as train/..., and of this module)."""
        self._first = self._first or {name: metrics[name] for name in _COMPARED}
        variance = metrics.get("info/explained_variance")
        self._blind_steps = self._blind_steps + 1 if variance is not None and variance <= 0 else 0
        found = {
            "collapse": self._collapse(metrics),
            "length": self._length(metrics),
            "kl": self._kl(metrics),
            "critic": self._blind_steps >= 10
            and "the critic explains nothing of the returns (explained variance <= 0 for 10 steps): raise"
            " --critic_learning_rate, use --critic_warmup_steps, or look at --reward_clip_value, which may cut all"
            " scores to one",
        }
        due = {
            name: text for name, text in found.items() if text and step - self._said.get(name, -math.inf) >= QUIET_STEPS
        }
        self._said |= dict.fromkeys(due, step)
        return [f"step {step}: {text}" for text in due.values()]

    def _collapse(self, m: Mapping[str, float]) -> str | None:
        distinct, first = m["health/distinct_2"], self._first["health/distinct_2"]
        duplicates = m["health/duplicate_percentage"]
        if m["train/empty_percentage"] > 50:
            return f"{m['train/empty_percentage']:.0f} % of the responses are empty: the reward model likes silence"
        if distinct < 0.5 * first or duplicates > 50 > self._first["health/duplicate_percentage"]:
            return (
                f"the responses collapse (distinct-2 {first:.2f} -> {distinct:.2f}, {duplicates:.0f} % duplicates):"
                " raise --init_kl_coeff or --entropy_coeff, or lower --actor_learning_rate"
            )
        return None

    def _length(self, m: Mapping[str, float]) -> str | None:
        length, first = m["train/response_length"], self._first["train/response_length"]
        richer = m["train/reward_mean"] > self._first["train/reward_mean"]
        if richer and not 0.5 * first <= length <= 1.5 * first:
            return (
                f"reward rises while responses go from {first:.0f} to {length:.0f} tokens: the reward model may pay for"
                " length; read samples.jsonl, and compare with evaluate.py"
            )
        if m["train/cut_off_percentage"] > 50 > self._first["train/cut_off_percentage"]:
            return (
                f"{m['train/cut_off_percentage']:.0f} % of the responses are cut off at --max_new_tokens:"
                " use --missing_eos_penalty"
            )
        return None

    def _kl(self, m: Mapping[str, float]) -> str | None:
        kl = m["train/kl_sequence"]
        if kl > 20:
            return (
                f"the actor is {kl:.0f} nats per response from the reference, where a reward model knows little:"
                " raise --init_kl_coeff, or use --adaptive_kl_coeff"
            )
        if kl < -3 * m["health/kl_error"] - 1e-3:
            return (
                f"the mean KL is negative beyond chance ({kl:.2g} nats): responses do not come from the actor that is"
                " scored; see the self-check"
            )
        return None
