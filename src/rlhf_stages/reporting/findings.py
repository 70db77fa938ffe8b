"""What looks ill about a run, in sentences that say what it means and what to try."""

import re
from collections.abc import Sequence

from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.numbers import ends
from rlhf_stages.reporting.tradeoff import Point, over_optimised
from rlhf_stages.rollout.monitor import HealthMonitor

# what the monitor reads of a step; a row without them is a validation, or of another version
_NEEDED = {
    *("health/distinct_2", "health/duplicate_percentage", "health/kl_error"),
    *("train/empty_percentage", "train/cut_off_percentage", "train/response_length"),
    *("train/reward_mean", "train/kl_sequence"),
}
# a validation loss counts as risen above this multiple of its lowest
_RISEN = 1.02


def findings(run: Run, points: Sequence[Point] = ()) -> list[str]:
    """Warnings of the health monitor at the logged steps, skipped steps, overfitting, and over-optimisation.

    Args:
        points: of `tradeoff_of`, in order of their steps.
    """
    found = [*_health(run), *_skipped(run), *_overfit(run), *_less_likely(run)]
    turned = over_optimised(points)
    if turned is not None:
        peak, last = turned
        found.append(
            f"over-optimised: the gold score was highest around step {peak.step:,} ({peak.gold:.3f}, KL {peak.kl:.2f}"
            f" nats) and has fallen to {last.gold:.3f} while the reward went from {peak.reward:.3f} to"
            f" {last.reward:.3f}: take an earlier checkpoint, raise --init_kl_coeff, or train a better reward model"
        )
    return found


def _health(run: Run) -> list[str]:
    """Each kind of warning once: its last wording, and from where to where it was said."""
    monitor, said = HealthMonitor(), dict[str, list[tuple[int, str]]]()
    for step, row in run.metrics.rows:
        if row.keys() >= _NEEDED:
            for warning in monitor.check(row, step):
                text = warning.partition(": ")[2]
                said.setdefault(re.sub(r"[-\d.]+", "", text), []).append((step, text))
    found = []
    for entries in said.values():
        first, last = entries[0][0], entries[-1][0]
        where = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        found.append(f"{where}: {entries[-1][1]}")
    return found


def _skipped(run: Run) -> list[str]:
    if not run.skipped:
        return []
    steps = sorted({entry["step"] for entry in run.skipped})
    shown = ", ".join(f"{step:,}" for step in steps[:5]) + (" and later" if len(steps) > 5 else "")
    reason = str(run.skipped[-1].get("reason", "a value was not finite"))[:200]
    return [
        f"{len(steps)} step{'s' * (len(steps) > 1)} skipped ({shown}), the last because {reason}: lower the learning"
        " rate, or look at the samples that skipped.jsonl names"
    ]


def _overfit(run: Run) -> list[str]:
    losses = run.metrics.series("val/loss")
    if len(losses) < 3:
        return []
    step, lowest = min(losses, key=lambda point: point[1])
    last = losses[-1][1]
    if lowest <= 0 or last <= _RISEN * lowest:
        return []
    return [
        f"the validation loss was lowest at step {step:,} ({lowest:.4g}) and has risen to {last:.4g}: the model learns"
        " the training data by heart; take the checkpoint `best`, or train for fewer steps"
    ]


def _less_likely(run: Run) -> list[str]:
    if run.stage != "dpo":
        return []
    both = ends(run.metrics.series("val/choosen_logprobs"))
    if both is None or both[1] >= both[0]:
        return []
    return [
        f"the better responses became less likely ({both[0]:.4g} to {both[1]:.4g} nats): DPO pushes both down; raise"
        " --beta, or train for fewer steps"
    ]
