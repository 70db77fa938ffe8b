"""metrics.csv and timing.csv as they are found: of a run that still writes, of one that was killed, damaged."""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# (step, value), steps rising
Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a run.

    rows: (step, numbers by name), in order of the steps; what was logged twice for a step is one row.
    """

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def series(self, name: str) -> Series:
        """One number over the steps at which it was logged."""
        return [(step, row[name]) for step, row in self.rows if name in row]

    @property
    def names(self) -> list[str]:
        """Everything that was logged, by name."""
        return sorted({name for _, row in self.rows for name in row})

    @property
    def last_step(self) -> int:
        """The last step of which there is a number, 0 if there is none."""
        return self.rows[-1][0] if self.rows else 0


def read_numbers(path: Path) -> tuple[Numbers, list[str]]:
    """The numbers of a file, and a sentence for each thing that is wrong with it. Nothing is raised."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Numbers(), [f"There is no {path.name}: nothing was logged yet, or it was removed."]
    problems = []
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        problems.append(
            f"{path.name} ends in the middle of a line (the run is writing, or was killed); that line is left out."
        )
    lines = _cells(whole)
    header = next(lines, None)
    if not header or "step" not in header:
        return Numbers(), [*problems, f"{path.name} has no header with a column `step`; it is left out."]
    by_step: dict[int, dict[str, float]] = {}
    bad_lines = bad_cells = 0
    for cells in lines:
        row = dict(zip(header, cells, strict=True)) if cells and len(cells) == len(header) else {}
        step = row.pop("step", "")
        if not step.isascii() or not step.isdigit() or len(step) > 18:
            bad_lines += 1
            continue
        found = {name: _number(cell) for name, cell in row.items() if cell}
        finite = {name: value for name, value in found.items() if value is not None}
        bad_cells += len(found) - len(finite)
        by_step.setdefault(int(step), {}).update(finite)
    if bad_lines:
        problems.append(f"{path.name}: {bad_lines} damaged line{'s' * (bad_lines > 1)} left out.")
    if bad_cells:
        problems.append(f"{path.name}: {bad_cells} value{'s' * (bad_cells > 1)} that are not finite numbers left out.")
    return Numbers(sorted(by_step.items())), problems


def _cells(text: str) -> Iterator[list[str] | None]:
    """The cells of each line, None for a line that is no CSV."""
    for line in text.splitlines():
        try:
            yield next(csv.reader([line]), None)
        except csv.Error:
            yield None


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def mean(values: list[float]) -> float:
    """Their mean; NaN if there is none."""
    return math.fsum(values) / len(values) if values else math.nan


def ends(series: Series) -> tuple[float, float] | None:
    """The first and the last value."""
    return (series[0][1], series[-1][1]) if series else None


def thinned(series: Series, most: int) -> Series:
    """At most about `most` points: of each stretch the smallest and the largest value, so that no peak is lost."""
    if len(series) <= most:
        return series
    kept: Series = [series[0]]
    stretches = max(1, most // 2)
    for i in range(stretches):
        stretch = series[i * len(series) // stretches : (i + 1) * len(series) // stretches]
        pair = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(pair - {kept[-1]})
    if kept[-1] != series[-1]:
        kept.append(series[-1])
    return kept
