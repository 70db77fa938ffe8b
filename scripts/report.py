#!/usr/bin/env python3
"""One HTML page (and PNG files) about training runs: curves, what the reward cost and was worth, texts, warnings."""

from pathlib import Path
from typing import Any

from rlhf_stages.args import ReportArgs
from rlhf_stages.cli import parse, run

COLOURS = {"train": "#2864b4", "val": "#c4571b", "0": "#2864b4", "1": "#c4571b", "2": "#3b8a5a", "3": "#7a5aa6"}


def main(argv: list[str] | None = None) -> Path:
    """Write the page, again and again with --watch; returns its path."""
    (args,) = parse(ReportArgs, argv=argv, description=__doc__)

    import time

    from rlhf_stages.evaluation.gold import load_score
    from rlhf_stages.files import write_text
    from rlhf_stages.reporting.evaluation import read_evaluation
    from rlhf_stages.reporting.folder import experiments_of
    from rlhf_stages.reporting.lineage import titles, with_ancestors
    from rlhf_stages.reporting.page import Report, build_page

    # 1. What to read
    gold_score = load_score(args.gold_score) if args.gold_score else None
    folders, missing = experiments_of(args.experiments)
    output = Path(args.output) if args.output else folders[0] / "report.html"
    written: list[Path] = []

    while True:
        # 2. Read everything as it is now; what is missing or damaged is said on the page
        runs, notes, evaluation = with_ancestors(folders), list(missing), None
        going = args.watch is not None and not all(r.finished for r in runs)
        if args.evaluation and args.watch and not Path(args.evaluation).is_file():
            notes.append(f"{args.evaluation} is not there yet")
        elif args.evaluation:
            evaluation = read_evaluation(Path(args.evaluation))

        # 3. The page, and the pictures, each in one piece: a reader never sees half of one
        made = time.strftime("%Y-%m-%d %H:%M")
        report = Report(runs, folders, evaluation, gold_score, made, args.watch if going else None, notes)
        write_text(output, [build_page(report)])
        if args.png:
            names = titles(runs)
            written = [path for r in runs if (path := draw(r, names[r.dir], output)) is not None]
        if not going:
            break
        try:
            time.sleep(args.watch)
        except KeyboardInterrupt:
            break

    # 4. Done
    for path in (output, *written):
        print(f"{'report' if path == output else 'curves':12} {path}")
    return output


def draw(run: Any, name: str, output: Path) -> Path | None:
    """The curves of a run as one PNG file beside the page; None if there is nothing to draw yet."""
    import os
    import re

    from rlhf_stages.reporting.chart import spread
    from rlhf_stages.reporting.curves import panels_of
    from rlhf_stages.reporting.numbers import thinned

    panels = panels_of(run)
    if not panels:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 2.7 * rows), dpi=100, layout="constrained")
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        values = [value for line in panel.lines for _, value in line.points]
        low, high = min(values), max(values)
        heights = [(line.points[-1][1] - low) / ((high - low) or 1) for line in panel.lines]
        heights = spread(heights, 0.08, 0.0, 1.0)
        for line, height in zip(panel.lines, heights, strict=True):
            steps, curve = zip(*thinned(line.points, 1000), strict=True)
            colour = COLOURS.get(line.colour, "#8a8f98")
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, curve, color=colour, linewidth=1.4, marker=marker, markersize=3)
            label = {"color": colour, "fontsize": 8, "va": "center", "parse_math": False}
            axes.text(1.0, height, line.label, transform=axes.transAxes, **label)
        axes.set_title(f"{panel.title} ({panel.unit})" if panel.unit else panel.title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8, length=0, labelcolor="#66707a")
        axes.margins(x=0, y=0.02)
        axes.grid(axis="y", color="#e4e6e3")
        axes.set_xlabel("step", fontsize=8, color="#66707a")
        axes.spines[:].set_visible(False)
    plain = re.sub(r"[^\w.-]+", "-", name)
    path = output.with_name(f"{output.stem}-{plain}.png")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


if __name__ == "__main__":
    run(main)
