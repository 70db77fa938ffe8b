"""The parts of the page that speak of all runs: what stands first, and where the runs come from."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rlhf_stages.reporting.chart import Dots, scatter
from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.lineage import parents_of
from rlhf_stages.reporting.markup import Markup, join, short, tag
from rlhf_stages.reporting.numbers import ends
from rlhf_stages.reporting.tradeoff import Tradeoff, smoothed

STAGE_NAMES = {
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "ppo": "PPO",
    "dpo": "DPO",
    "classifier": "Classifier",
}
# the number that says most about a stage: column, name
_HEADLINES = {
    "sft": ("val/loss", "validation loss, nats per token"),
    "rm": ("val/acc", "validation accuracy"),
    "ppo": ("val/reward_mean", "validation reward"),
    "dpo": ("val/acc", "validation accuracy"),
    "classifier": ("val/acc", "validation accuracy"),
}
_DIGITS = 12
# characters of a label
_LABEL = 18
# more runs than this in one picture share a colour; their labels tell them apart
_COLOURS = 4


def anchor(name: str) -> str:
    """A name as the target of a link."""
    return "run-" + re.sub(r"[^\w-]+", "-", name)


def title(runs: Sequence[Run], asked: Sequence[Path]) -> str:
    """What the page is about."""
    about = [run for run in runs if run.dir in set(asked)] or list(runs)
    found = list(dict.fromkeys(f"{run.dataset} / {run.name}" for run in about))
    if len(about) == 1:
        return f"{found[0]} / {about[0].stage}"
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def header(runs: Sequence[Run], asked: Sequence[Path], made: str, refresh: int | None) -> Markup:
    """Title, date, and what kind of page this is."""
    again = f" · drawn anew every {refresh} s" if refresh else ""
    return join([tag("h1", title(runs, asked)), tag("p", f"{made}{again}", class_="muted small")])


def stages(runs: Sequence[Run], names: Mapping[Path, str], found: Mapping[Path, Sequence[str]]) -> Markup:
    """A card per run, in the order in which they were made."""
    cards = []
    shown = {path.resolve(): name for path, name in names.items()}
    for before, run in zip([None, *runs], runs, strict=False):
        parents = _parents(run)
        known = [shown[at] for at in parents if at in shown]
        column, meaning = _HEADLINES.get(run.stage, ("", ""))
        both = ends(run.metrics.series(column))
        value: Markup | str = "–"
        if both:
            start = tag("span", f"{short(both[0])} → ", class_="muted") if both[0] != both[1] else None
            value = join([start, short(both[1])])
        warned = len(found.get(run.dir, ()))
        state = "finished" if run.finished else run.state()
        flags = f"{state}{f' · {warned} warning' + 's' * (warned > 1) if warned else ''}"
        name = STAGE_NAMES.get(run.stage, run.stage) if names[run.dir] == run.stage else names[run.dir]
        cards.append(
            tag(
                "li",
                tag("a", tag("div", name, class_="name"), href=f"#{anchor(names[run.dir])}"),
                tag("div", value, class_="big"),
                tag("div", meaning, class_="small muted"),
                tag("div", f"from {', '.join(known)}", class_="small muted") if known else None,
                tag("div", flags, class_="small muted"),
                class_="from" if before and before.dir.resolve() in parents else None,
            )
        )
    return tag("ul", *cards, class_="stages")


def _parents(run: Run) -> list[Path]:
    """The experiment folders that a run started from."""
    return [at.resolve() for parent in parents_of(run) if (at := parent.experiment) is not None]


def notes(runs: Sequence[Run], names: Mapping[Path, str], more: Sequence[str]) -> Markup | None:
    """What could not be read, or should not be compared."""
    lines = list(more)
    datasets = sorted({run.dataset for run in runs})
    if len(datasets) > 1:
        lines.append(
            f"These runs are of different datasets ({', '.join(datasets)}): their losses, rewards and samples cannot be"
            " compared with each other."
        )
    lines += [f"{names[run.dir]}: {problem}" for run in runs for problem in run.problems]
    if not lines:
        return None
    listed = tag("ul", *(tag("li", line) for line in lines))
    return tag("div", tag("b", "What this page does not show, or shows with care"), listed, class_="warn")


def comparison(runs: Sequence[Run], names: Mapping[Path, str], tradeoffs: Mapping[Path, Tradeoff]) -> Markup | None:
    """Several PPO runs in one plane, if they share a dataset."""
    shown = [run for run in runs if run.dir in tradeoffs and tradeoffs[run.dir].points]
    if len(shown) < 2 or len({run.dataset for run in shown}) > 1:
        return None
    labels = _labels([names[run.dir] if len({r.name for r in shown}) < len(shown) else run.name for run in shown])
    pictures = []
    for what in ("reward", "gold"):
        groups = []
        for number, (run, label) in enumerate(zip(shown, labels, strict=True)):
            measured = [p for p in tradeoffs[run.dir].points if getattr(p, what) is not None]
            places, line = (
                [(p.distance, getattr(p, what)) for p in some]
                for some in (measured, smoothed(measured, max(1, len(measured) // 10)))
            )
            if places:
                colour = str(number) if len(shown) <= _COLOURS else "train"
                groups.append(Dots(label, places, line=line if len(line) > 1 else (), colour=colour))
        if groups:
            caption = {"reward": "Reward of all runs", "gold": "Gold score of all runs"}[what]
            picture = scatter(groups, "√nats", f"{caption} against the square root of KL")
            pictures.append(figure(caption, "over √KL to the reference", picture))
    text = (
        "A point is a policy on its way, pale at the start and strong at the end; a line is the mean of a tenth of the"
        " points of a run at a time."
    )
    return tag(
        "section", tag("h2", "Runs compared"), tag("p", text, class_="muted"), tag("div", *pictures, class_="grid-of")
    )


def _labels(names: Sequence[str]) -> list[str]:
    """What tells names apart: without the words that all of them start with, and short enough for a picture."""
    words = [re.split(r"(?<=[-_/])", name) for name in names]
    shared = takewhile(lambda column: len(set(column)) == 1, zip(*(some[:-1] for some in words), strict=False))
    start = len(list(shared))
    return ["".join(some[start:])[-_LABEL:] for some in words]


def lineage(runs: Sequence[Run], names: Mapping[Path, str]) -> Markup:
    """Where each run comes from: parents with digests, data, versions."""
    rows = []
    experiments = {run.dir.resolve(): names[run.dir] for run in runs}
    for run in runs:
        for parent in parents_of(run):
            at = parent.experiment.resolve() if parent.experiment else None
            who = experiments.get(at, parent.path) if at else parent.path
            step = Path(parent.path).name
            digest = tag("span", "weights ", _digest(parent.recorded), class_="meaning")
            rows.append([names[run.dir], join([f"{parent.role}: {who} · {step}", digest]), parent.state])
        model = run.group("model_args").get("model_name")
        if model and not run.group("parents"):
            rows.append([names[run.dir], f"model: {model}", "where it starts"])
    data = [[names[run.dir], name, _digest(str(value))] for run in runs for name, value in run.group("shards").items()]
    versions = {name: str(value) for run in runs for name, value in run.group("versions").items()}
    parts = [tag("h2", "Lineage", id="lineage")]
    if rows:
        parts.append(table(["run", "made from (SHA-256 of the weights)", "today"], rows))
    if data:
        parts += [tag("h3", "Data"), table(["run", "shard", "fingerprint"], data)]
    if versions:
        text = ", ".join(f"{name} {value}" for name, value in versions.items())
        parts += [tag("h3", "Versions"), tag("p", text, class_="small muted")]
    return tag("section", *parts)


def table(header_row: Sequence[str], rows: Sequence[Sequence[object]], numbers: int = 0) -> Markup:
    """A table whose last `numbers` columns hold numbers; a None is an empty cell."""
    first = len(header_row) - numbers
    kinds = [None if i < first else "n" for i in range(len(header_row))]
    head = tag("tr", *(tag("th", cell, class_=kind) for cell, kind in zip(header_row, kinds, strict=True)))
    body = [tag("tr", *(tag("td", c, class_=k) for c, k in zip(row, kinds, strict=True))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide")


def figure(caption: str, unit: str, picture: Markup) -> Markup:
    """A picture with its title and unit above it."""
    return tag("figure", tag("figcaption", tag("b", caption), " ", tag("span", unit)), picture)


def _digest(text: str) -> Markup:
    return tag("code", text[:_DIGITS], title=text, class_="id")


def percent(share: float) -> str:
    """A share of 1 as a percentage."""
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"
