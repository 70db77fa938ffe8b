"""Reward against KL, and gold against proxy: what a policy won, what it paid for it, and whether it was worth it.

Gao, Schulman, Hilton 2022 ("Scaling Laws for Reward Model Overoptimization", arXiv 2210.10760): over the square root of
the KL to the reference the reward that is optimized, the proxy, rises, and the gold score rises and then falls.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.numbers import mean

# fewer validations than this make no curve
_ENOUGH = 4
_BINS = 8
_SMOOTHED = 3
# gold has fallen if it is lower than its highest by this share of its range, and by this many times the mean difference
# of neighbouring points, which is noise
_FALL, _NOISE = 0.1, 3.0


@dataclass(frozen=True)
class Point:
    """A policy on its way: KL to the reference in nats per response, reward, and gold where there is one."""

    step: int
    kl: float
    reward: float
    gold: float | None = None

    @property
    def distance(self) -> float:
        """Square root of the KL; an estimate below 0 counts as 0."""
        return math.sqrt(max(0.0, self.kl))


@dataclass(frozen=True)
class Tradeoff:
    """Points of a run in order of their steps, where they come from, and what the gold score is called."""

    points: list[Point]
    source: str
    gold: str | None = None


def gold_part(run: Run) -> str | None:
    """The part of the reward that is measured and not paid: called gold, or of weight 0 throughout."""
    for name, settings in run.group("rewards").items():
        weights = settings.get("weights") if isinstance(settings, dict) else None
        unpaid = isinstance(weights, list) and weights and all(isinstance(w, list) and w[-1:] == [0] for w in weights)
        if name == "gold" or unpaid:
            return name
    return None


def tradeoff_of(run: Run, gold_score: Callable[[str, str], float] | None = None) -> Tradeoff:
    """Validations where there are enough of them, else the rollouts of the logged steps.

    Args:
        gold_score: scores the texts of samples.jsonl (`rollout_sample`, one for each logged step) where the run has no
            gold of its own; each point is then a mean over a stretch of the run.

    Raises:
        ValueError: the gold score fails on a sample.
    """
    part = gold_part(run)
    if part is None and gold_score is not None:
        return _of_samples(run, gold_score)
    columns = ("val/kl_sequence", "val/reward_mean", f"val/reward_{part}")
    validated = _points(run, *columns)
    if len(validated) >= _ENOUGH:
        return Tradeoff(validated, "the validations", part)
    points = _points(run, "train/kl_sequence", "train/reward_mean", f"reward/{part}_mean")
    return Tradeoff(points, "the rollouts of the logged steps", part)


def _points(run: Run, kl: str, reward: str, gold: str) -> list[Point]:
    return [
        Point(step, row[kl], row[reward], row.get(gold))
        for step, row in run.metrics.rows
        if kl in row and reward in row
    ]


def _of_samples(run: Run, gold_score: Callable[[str, str], float]) -> Tradeoff:
    scored = []
    for sample in run.samples:
        numbers = [sample.get("score"), sample.get("kl")]
        texts = [sample.get("prompt"), sample.get("response")]
        if all(isinstance(n, (int, float)) for n in numbers) and all(isinstance(t, str) for t in texts):
            gold = gold_score(str(texts[0]), str(texts[1]))
            scored.append(Point(sample["step"], float(numbers[1] or 0), float(numbers[0] or 0), gold))
    size = max(1, math.ceil(len(scored) / _BINS))
    stretches = [scored[i : i + size] for i in range(0, len(scored), size)]
    points = [
        Point(
            stretch[-1].step,
            mean([p.kl for p in stretch]),
            mean([p.reward for p in stretch]),
            mean([p.gold for p in stretch if p.gold is not None]),
        )
        for stretch in stretches
    ]
    return Tradeoff(points, f"samples.jsonl, {size} sample{'s' * (size > 1)} a point", "gold score")


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats: none has less KL and no less reward, or more reward and no more KL."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kl, -p.reward)):
        if not kept or point.reward > kept[-1].reward or (point.kl, point.reward) == (kept[-1].kl, kept[-1].reward):
            kept.append(point)
    return kept


def over_optimised(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """Where gold was highest and where the run has ended, if gold has fallen since while the reward rose.

    Both are means of three neighbouring points, for single ones are noisy.
    """
    measured = [point for point in points if point.gold is not None]
    smooth = smoothed(measured, _SMOOTHED)
    if len(smooth) < 2:
        return None
    golds, raw = ([point.gold or 0.0 for point in some] for some in (smooth, measured))
    noise = mean([abs(after - before) for before, after in itertools.pairwise(raw)])
    peak, last = smooth[golds.index(max(golds))], smooth[-1]
    fallen = max(golds) - golds[-1] > max(_FALL * (max(golds) - min(golds)), _NOISE * noise)
    return (peak, last) if fallen and last.reward > peak.reward else None


def smoothed(points: Sequence[Point], size: int) -> list[Point]:
    """Means of each `size` neighbouring points; fewer than that have none."""
    return [_middle(points[i : i + size]) for i in range(len(points) - size + 1)]


def _middle(points: Sequence[Point]) -> Point:
    return Point(
        points[len(points) // 2].step,
        mean([p.kl for p in points]),
        mean([p.reward for p in points]),
        mean([p.gold or 0.0 for p in points]),
    )
