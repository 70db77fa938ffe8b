"""Which numbers of a stage stand together in a picture, and in what unit."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.numbers import Series


@dataclass(frozen=True)
class Line:
    """A curve: its label, its points, and its colour: `train`, `val`, or the number of a further one."""

    label: str
    points: Series
    colour: str = "train"


@dataclass(frozen=True)
class Panel:
    """Curves over the steps of a run that share an axis."""

    title: str
    unit: str
    lines: list[Line]


# title, unit, {label: column}; columns that a run does not have are left out
_Plan = tuple[str, str, dict[str, str]]
_RATE: list[_Plan] = [
    ("Gradient norm", "before clipping", {"": "info/grad_norm"}),
    ("Learning rate", "", {"": "info/lr"}),
]
_COST: list[_Plan] = [
    ("Padding", "% of the places", {"": "info/padding_percentage"}),
    ("Memory of the GPU", "GiB, largest so far", {"": "info/peak_memory_gib"}),
]
_PAIRS: list[_Plan] = [
    ("Loss", "nats per pair", {"train": "train/loss", "validation": "val/loss"}),
    ("Accuracy", "share of pairs in the right order", {"train": "train/acc", "validation": "val/acc"}),
    (
        "Margin",
        "reward of the better less the worse",
        {"train": "info/reward_margin", "validation": "val/reward_margin"},
    ),
]
PANELS: dict[str, list[_Plan]] = {
    "sft": [
        ("Loss", "nats per token", {"train": "train/loss", "validation": "val/loss"}),
        *_RATE,
        ("Throughput", "tokens per second", {"": "info/tokens_per_seconds"}),
        *_COST,
    ],
    "rm": [
        *_PAIRS,
        ("Scores of validation", "mean over the texts", {"mean": "val/reward_mean", "deviation": "val/reward_std"}),
        *_RATE,
        *_COST,
    ],
    "dpo": [
        *_PAIRS,
        (
            "Log-probability",
            "nats per response, validation",
            {"better": "val/choosen_logprobs", "worse": "val/rejected_logprobs"},
        ),
        *_RATE,
        *_COST,
    ],
    "classifier": [
        ("Loss", "nats per text", {"train": "train/loss", "validation": "val/loss"}),
        ("Accuracy", "share of texts", {"train": "train/acc", "validation": "val/acc"}),
        *_RATE,
        *_COST,
    ],
    "ppo": [
        ("Reward", "mean over responses", {"train": "train/reward_mean", "validation": "val/reward_mean"}),
        ("Reward parts", "means, before their weights", {"*": "reward/*_mean"}),
        ("KL to the reference", "nats per response", {"train": "train/kl_sequence", "validation": "val/kl_sequence"}),
        ("KL coefficient", "reward per nat", {"": "info/kl_coeff"}),
        ("Entropy", "nats per token", {"": "health/entropy"}),
        ("Length", "tokens per response", {"train": "train/response_length", "validation": "val/response_length"}),
        ("Distinct-2", "different pairs of tokens per pair", {"": "health/distinct_2"}),
        (
            "Cut off or empty",
            "% of the responses",
            {"cut off": "train/cut_off_percentage", "empty": "train/empty_percentage"},
        ),
        ("Clip fraction", "share of the tokens", {"": "info/clip_fraction"}),
        ("KL of an update", "nats per token", {"": "info/approx_kl"}),
        ("Explained variance", "of the returns, by the critic", {"": "info/explained_variance"}),
        ("Actor's loss", "per token", {"": "train/actor_loss"}),
        ("Critic's loss", "per token", {"": "train/critic_loss"}),
        ("Gradient norms", "before clipping", {"actor": "info/actor_grad_norm", "critic": "info/critic_grad_norm"}),
        ("Learning rate", "of the actor", {"": "info/lr"}),
        (
            "Time of a step",
            "seconds",
            {"sampling": "info/generation_time", "rollout": "info/rollout_time", "updates": "info/ppo_time"},
        ),
        ("Memory of the GPU", "GiB, largest so far", {"": "info/peak_memory_gib"}),
    ],
}
_COLOURS = {"train": "train", "": "train", "validation": "val"}
# more curves than this in one picture cannot be told apart
_MOST_LINES = 4


def panels_of(run: Run) -> list[Panel]:
    """The pictures of a run, those that have at least one point."""
    panels = []
    for title, unit, columns in PANELS.get(run.stage, []):
        panel = Panel(title, unit, _lines(run, columns))
        if panel.lines:
            panels.append(panel)
    return panels


def reward_parts(names: Iterable[str]) -> list[str]:
    """The parts of the reward, by the columns `reward/<part>_mean`."""
    return [
        name[len("reward/") : -len("_mean")] for name in names if name.startswith("reward/") and name.endswith("_mean")
    ]


def _lines(run: Run, columns: dict[str, str]) -> list[Line]:
    if "*" in columns:
        parts = sorted(reward_parts(run.metrics.names), key=lambda part: part == "gold")  # which is not paid: last
        columns = {part: f"reward/{part}_mean" for part in parts[:_MOST_LINES]}
    lines = []
    for number, (label, column) in enumerate(columns.items()):
        points = run.metrics.series(column) or run.timing.series(column)
        if points:
            lines.append(Line(label, points, _COLOURS.get(label, str(number))))
    return lines
