"""Where the time of a run went, by phase."""

import itertools
from dataclasses import dataclass

from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.numbers import mean


@dataclass(frozen=True)
class Phase:
    """Seconds of a phase per step (mean over the logged steps), and what it gets done in a second."""

    name: str
    seconds: float
    rate: str = ""


@dataclass(frozen=True)
class Throughput:
    """phases: of a step. step_seconds: from step to step by the clock, validation and saving included, NaN if unknown.
    elapsed: seconds that all processes of the run have trained together."""

    phases: list[Phase]
    step_seconds: float
    elapsed: float


def throughput_of(run: Run) -> Throughput:
    """Times from timing.csv; no phases for stages that have one only."""
    clock = run.timing.series("info/elapsed_seconds")
    pieces = [  # a resumed run starts its clock anew
        (after - before if after > before else after, late - early)
        for (early, before), (late, after) in itertools.pairwise(clock)
    ]
    elapsed = sum(seconds for seconds, _ in pieces) + (clock[0][1] if clock else 0.0)
    steps = sum(count for _, count in pieces)
    step_seconds = sum(seconds for seconds, _ in pieces) / steps if steps else float("nan")
    return Throughput(_ppo_phases(run) if run.stage == "ppo" else _tokens(run), step_seconds, elapsed)


def _tokens(run: Run) -> list[Phase]:
    rate = mean([value for _, value in run.timing.series("info/tokens_per_seconds")])
    times = run.timing.series("info/time")
    if len(times) < 2:
        return []
    steps = times[-1][0] - times[0][0]  # the last line may hold fewer than the others
    seconds = sum(value for _, value in times[1:]) / steps  # without the first line: it holds the first validation
    return [Phase("training", seconds, f"{rate:,.0f} tokens/s" if rate == rate else "")]


def _ppo_phases(run: Run) -> list[Phase]:
    """Sampling, reading by all models, updates. Rates per process: those of one process times their number is more."""
    seconds = {
        name: mean([value for _, value in run.timing.series(f"info/{name}_time")])
        for name in ("generation", "rollout", "ppo")
    }
    if any(value != value for value in seconds.values()):
        return []
    length = mean([value for _, value in run.metrics.series("train/response_length")])
    rollout, responses = (
        run.group("train_args").get("rollout_size"),
        run.group("gen_args").get("num_return_sequences", 1),
    )
    count = rollout * responses if isinstance(rollout, int) and isinstance(responses, int) else 0
    epochs = run.group("train_args").get("ppo_epochs")
    epochs = epochs if isinstance(epochs, int) else 1

    def rate(phase: float, tokens: float) -> str:
        return f"{tokens / phase:,.0f} tokens/s" if phase > 0 and tokens == tokens and tokens else ""

    reading = max(0.0, seconds["rollout"] - seconds["generation"])
    return [
        Phase("sampling", seconds["generation"], rate(seconds["generation"], count * length)),
        Phase("scoring", reading, rate(reading, count * length)),
        Phase("updates", seconds["ppo"], rate(seconds["ppo"], count * length * epochs)),
    ]
