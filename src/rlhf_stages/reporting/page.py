"""The report as one HTML file: no script, no picture from elsewhere, every text of a model or a file escaped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_stages.reporting import overview, sections
from rlhf_stages.reporting.evaluation import Evaluation
from rlhf_stages.reporting.findings import findings
from rlhf_stages.reporting.folder import Run
from rlhf_stages.reporting.lineage import titles
from rlhf_stages.reporting.markup import Markup, join, tag
from rlhf_stages.reporting.style import STYLE
from rlhf_stages.reporting.tradeoff import Tradeoff, tradeoff_of

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Report:
    """What a page is made of.

    runs: parents before children. asked: the folders that were named on the command line. made: when, as text.
    refresh: seconds after which a browser loads the page again, for a run that goes on.
    """

    runs: Sequence[Run]
    asked: Sequence[Path] = ()
    evaluation: Evaluation | None = None
    gold_score: Callable[[str, str], float] | None = None
    made: str = ""
    refresh: int | None = None
    notes: Sequence[str] = field(default_factory=list)


def build_page(report: Report) -> str:
    """The whole file.

    Raises:
        ValueError: the gold score fails on a sample.
    """
    names = titles(report.runs)
    tradeoffs = {run.dir: tradeoff_of(run, report.gold_score) for run in report.runs if run.stage == "ppo"}
    found = {run.dir: findings(run, tradeoffs[run.dir].points if run.dir in tradeoffs else ()) for run in report.runs}
    body = join(
        [
            overview.header(report.runs, report.asked, report.made, report.refresh),
            overview.stages(report.runs, names, found),
            overview.notes(report.runs, names, report.notes),
            overview.comparison(report.runs, names, tradeoffs),
            sections.evaluation(report.evaluation),
            *(_run(run, names[run.dir], found[run.dir], tradeoffs) for run in report.runs),
            overview.lineage(report.runs, names),
            tag(
                "footer",
                "Numbers: metrics.csv and timing.csv of each folder. Curves with many points keep the smallest and the"
                " largest value of each stretch. KL is in nats; nothing on this page is fetched from a network.",
            ),
        ]
    )
    title = overview.title(report.runs, report.asked)
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            tag("meta", http_equiv="refresh", content=report.refresh) if report.refresh else None,
            tag("title", f"{title} · report"),
            tag("style", Markup(STYLE)),
        ]
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', tag('main', body)), lang='en')}\n"


def _run(run: Run, name: str, found: Sequence[str], tradeoffs: Mapping[Path, Tradeoff]) -> Markup:
    tradeoff = tradeoffs.get(run.dir)
    return tag(
        "section",
        tag("h2", name, id=overview.anchor(name)),
        tag("p", run.state(), class_="muted"),
        sections.warnings(found),
        sections.tradeoff(tradeoff) if tradeoff else None,
        sections.curves_of(run),
        sections.samples(run),
        sections.throughput(run),
        sections.arguments(run),
        sections.checkpoints(run),
    )
