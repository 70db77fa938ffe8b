"""The parts of the page that speak of one run, or of an evaluation."""

import math
from collections.abc import Mapping, Sequence

from rlhf_stages.reporting.changes import changed_arguments
from rlhf_stages.reporting.chart import Dots, curves, scatter
from rlhf_stages.reporting.curves import panels_of
from rlhf_stages.reporting.evaluation import Comparison, Evaluation, own_samples
from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.markup import Markup, join, short, tag
from rlhf_stages.reporting.overview import figure, percent, table
from rlhf_stages.reporting.throughput import throughput_of
from rlhf_stages.reporting.tradeoff import Point, Tradeoff, frontier

# characters of a sample that are shown
_LONGEST = 4000


def warnings(found: Sequence[str]) -> Markup | None:
    """What looks ill."""
    if not found:
        return None
    return tag("div", tag("b", "Warnings"), tag("ul", *(tag("li", text) for text in found)), class_="warn")


def curves_of(run: Run) -> Markup:
    """All curves of a run."""
    figures = [figure(panel.title, panel.unit, curves(panel)) for panel in panels_of(run)]
    if not figures:
        return tag("p", "Nothing was logged yet.", class_="muted")
    return join([tag("h3", "Curves"), tag("div", *figures, class_="grid-of")])


def tradeoff(found: Tradeoff) -> Markup | None:
    """Reward against KL with its frontier; gold over the same axis, and gold against the reward."""
    points = found.points
    if not points:
        return None
    best = sorted(frontier(points), key=lambda p: p.kl)
    across = (0.0, 1.05 * max(0.01, *(p.distance for p in points)))
    names = [_name(p) for p in points]
    reward = Dots(
        f"step {points[-1].step:,}",
        [(p.distance, p.reward) for p in points],
        names,
        edge=[(p.distance, p.reward) for p in best] if len(best) > 1 else (),
    )
    figures = [figure("Reward", "over √KL to the reference", scatter([reward], "√nats", "Reward over KL", across))]
    measured = [p for p in points if p.gold is not None]
    text = (
        f"Each point is a policy on its way, pale at the start and strong at the end ({found.source}). The dashed line"
        " is the frontier: no other point has more reward for as little KL."
    )
    if measured:
        label, names = f"step {measured[-1].step:,}", [_name(p) for p in measured]
        gold = Dots(label, [(p.distance, p.gold or 0.0) for p in measured], names, colour="val")
        both = Dots(label, [(p.reward, p.gold or 0.0) for p in measured], names, colour="val")
        figures.append(
            figure("Gold score", "over √KL to the reference", scatter([gold], "√nats", "Gold over KL", across))
        )
        figures.append(figure("Gold score", "over the reward", scatter([both], "reward", "Gold over reward")))
        text += (
            " Gold is what the reward stands for and PPO is not paid for. Where the reward goes on rising and gold does"
            " not, the reward is over-optimised (Gao et al. 2022)."
        )
    title = "What the reward costs, and what it is worth" if measured else "What the reward costs"
    return join([tag("h3", title), tag("p", text, class_="muted"), tag("div", *figures, class_="grid-of")])


def _name(point: Point) -> str:
    gold = "" if point.gold is None else f", gold {short(point.gold)}"
    return f"step {point.step}: reward {short(point.reward)}, KL {short(point.kl)} nats{gold}"


def throughput(run: Run) -> Markup | None:
    """Where the time went."""
    found = throughput_of(run)
    if math.isnan(found.step_seconds) and not found.phases:
        return None
    known = sum(phase.seconds for phase in found.phases)
    rows: list[list[object]] = []
    bars = []
    whole = max(known, found.step_seconds if found.step_seconds == found.step_seconds else known)
    for number, phase in enumerate(found.phases):
        share = phase.seconds / whole if whole else math.nan
        name = join([tag("span", "■ ", class_=f"c-{number}"), phase.name]) if len(found.phases) > 1 else phase.name
        rows.append([name, f"{short(phase.seconds)} s", percent(share), phase.rate])
        bars.append(tag("i", class_=f"c-{number}", style=f"width:{100 * share:.2f}%", title=phase.name))
    if found.phases and whole > known:
        rest = whole - known
        rows.append(["validation, saving, the rest", f"{short(rest)} s", percent(rest / whole), ""])
    tokens = " Tokens are those of the responses." if run.stage == "ppo" else ""
    text = f"{short(whole)} s a step; {_clock(found.elapsed)} in all.{tokens}"
    parts = [tag("h3", "Time"), tag("p", text, class_="muted")]
    if len(bars) > 1:
        parts.append(tag("div", *bars, class_="bar"))
    if rows:
        parts.append(table(["phase", "per step", "share", "throughput"], rows, numbers=3))
    return join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def arguments(run: Run) -> Markup | None:
    """Flags that differ from their defaults."""
    changes = changed_arguments(run)
    rewards = [
        [name, str(settings.get("kind", "")), _weights(settings.get("weights"))]
        for name, settings in run.group("rewards").items()
        if isinstance(settings, dict)
    ]
    parts = []
    if changes:
        rows = [
            [join([tag("code", c.flag), tag("span", c.meaning, class_="meaning")]), c.value, c.default] for c in changes
        ]
        parts += [tag("h3", "Arguments that differ from their defaults"), table(["flag", "value", "default"], rows)]
    if rewards:
        parts += [tag("h3", "Parts of the reward"), table(["part", "kind", "weight"], rewards)]
    return join(parts) if parts else None


def _weights(points: object) -> str:
    """A weight, or weights by step."""
    pairs = points if isinstance(points, list) else []
    pairs = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    if len(pairs) == 1:
        return f"{pairs[0][1]}"
    return ", ".join(f"{weight} at step {step}" for step, weight in pairs)


def checkpoints(run: Run) -> Markup | None:
    """What was saved."""
    if not run.checkpoints:
        return tag("p", "No checkpoint is there (yet).", class_="muted") if run.args else None
    rows = []
    for saved in run.checkpoints:
        marks = [name for name, at in (("latest", run.latest), ("best", run.best)) if at == saved.name]
        digest = tag("code", saved.sha256[:12], title=saved.sha256, class_="id") if saved.sha256 else ""
        rows.append([saved.name, saved.problem or ", ".join(marks), digest, f"{saved.size / 1e6:,.1f} MB"])
    return join(
        [tag("h3", "Checkpoints"), table(["checkpoint", "", "SHA-256 of the weights", "size"], rows, numbers=1)]
    )


def evaluation(found: Evaluation | None) -> Markup | None:
    """evaluate.py's table, texts side by side, and how often reward models are right."""
    if found is None:
        return None
    parts = [tag("h2", "Before and after", id="evaluation")]
    names = list(dict.fromkeys(name for column in found.policies.values() for name in column))
    if names:
        rows = [
            [name, *(f"{column[name]:.3f}" if name in column else "" for column in found.policies.values())]
            for name in names
        ]
        held_out = f"Held-out prompts, {found.settings}." if found.settings else "Held-out prompts."
        parts += [tag("p", held_out, class_="muted"), table(["", *found.policies], rows, numbers=len(found.policies))]
    parts += [_comparison(row) for row in found.comparisons]
    if found.reward_accuracy:  # a long table
        parts += _reward_accuracy(found.reward_accuracy)
    return tag("section", *parts)


def _reward_accuracy(splits: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Markup]:
    """A row per split and group of pairs, a column per reward model."""
    groups = {f"{split}: {name}": group for split, found in splits.items() for name, group in found.items()}
    names = list(dict.fromkeys(name for group in groups.values() for name in group if name != "n"))
    rows = [
        [label, f"{group.get('n', 0):,.0f}", *(f"{group[name]:.3f}" if name in group else "" for name in names)]
        for label, group in groups.items()
    ]
    what = "How often the better text of a pair has the higher score. Longer wins: what counting tokens would reach."
    return [tag("p", what, class_="muted"), table(["", "pairs", *names], rows, numbers=len(names) + 1)]


def samples(run: Run) -> Markup | None:
    """Texts of samples.jsonl."""
    found = own_samples(run)
    if not found:
        return None
    return join([tag("h3", "Samples"), *(_comparison(row) for row in found)])


def _comparison(row: Comparison) -> Markup:
    answers = []
    for text in row.texts:
        numbers = " · ".join(f"{name} {value:.2f}" for name, value in text.numbers.items())
        answers.append(
            tag(
                "div",
                tag("div", tag("b", text.who), f" · {numbers}" if numbers else "", class_="who"),
                tag("p", _cut(text.text.strip()) or "(empty)", class_="text"),
            )
        )
    note = tag("div", row.note, class_="small muted") if row.note else None
    return tag(
        "div", note, tag("p", _cut(row.prompt.strip()), class_="prompt"), tag("div", *answers, class_="answers"),
        class_="pair",
    )  # fmt: skip


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text) - _LONGEST:,} more characters)"
