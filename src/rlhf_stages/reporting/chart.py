"""Small pictures as SVG: curves over steps, and points in a plane. Each line is labelled where it ends.

Colours are classes that the style sheet defines, so that a picture follows light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_stages.reporting.curves import Panel
from rlhf_stages.reporting.markup import Markup, join, short, tag
from rlhf_stages.reporting.numbers import thinned

WIDTH, HEIGHT = 360, 200
_LEFT, _TOP, _BOTTOM = 46, 10, 26
_MOST_POINTS, _MOST_DOTS = 360, 160
# height of a label
_LABEL = 13
# width of a character of a label, near enough
_CHARACTER = 6.2


@dataclass(frozen=True)
class Dots:
    """Points of one run in a plane, in order; `label` stands at the last.

    line: drawn through them in their colour. edge: a dashed line over them.
    """

    label: str
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    line: Sequence[tuple[float, float]] = ()
    edge: Sequence[tuple[float, float]] = ()
    colour: str = "train"


@dataclass(frozen=True)
class _Frame:
    """Where values lie in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    right: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return _LEFT + across * (self.right - _LEFT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within a range, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def curves(panel: Panel) -> Markup:
    """The curves of a panel over the steps."""
    labels = [f"{line.label} {short(line.points[-1][1])}".strip() for line in panel.lines]
    values = [value for line in panel.lines for _, value in line.points]
    steps = [step for line in panel.lines for step, _ in line.points]
    frame = _Frame((min(steps), max(*steps, min(steps) + 1)), _padded(values), _right_edge(labels))
    drawn = [_grid(frame, "step", whole_x=True)]
    for line in panel.lines:
        pixels = [frame.at(*point) for point in thinned(line.points, _MOST_POINTS)]
        drawn.append(_line(pixels, line.colour) if len(pixels) > 1 else _dot(pixels[0], line.colour))
    tips = [frame.at(*line.points[-1]) for line in panel.lines]
    drawn += _end_labels(tips, labels, [line.colour for line in panel.lines], frame.right)
    return _picture(drawn, f"{panel.title}, {panel.unit}: {', '.join(labels)}")


def scatter(
    groups: Sequence[Dots], x_unit: str, description: str, x_range: tuple[float, float] | None = None
) -> Markup:
    """Points of runs in a plane, from pale (early) to strong (late), with the frontier as a line."""
    values = [y for dots in groups for _, y in dots.points]
    across = x_range or _padded([x for dots in groups for x, _ in dots.points])
    frame = _Frame(across, _padded(values), _right_edge([dots.label for dots in groups]))
    drawn = [_grid(frame, x_unit)]
    for dots in groups:
        every = max(1, math.ceil(len(dots.points) / _MOST_DOTS))
        kept = sorted({*range(0, len(dots.points), every), len(dots.points) - 1})
        for i in kept:
            strength = 0.25 + 0.75 * (i + 1) / len(dots.points)
            title = dots.titles[i] if i < len(dots.titles) else None
            drawn.append(_dot(frame.at(*dots.points[i]), dots.colour, title, strength))
        if dots.line:
            drawn.append(_line([frame.at(*point) for point in dots.line], dots.colour))
        if dots.edge:
            drawn.append(_line([frame.at(*point) for point in dots.edge], f"{dots.colour} edge"))
    tips = [frame.at(*dots.points[-1]) for dots in groups]
    drawn += _end_labels(tips, [dots.label for dots in groups], [dots.colour for dots in groups], frame.right)
    return _picture(drawn, description)


def _picture(drawn: Sequence[Markup], description: str) -> Markup:
    return tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=description)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """A range with room at both ends; 0 stays an end where no value is below it and it is near."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
    bottom = 0.0 if 0 <= low < 0.35 * high else low - room
    return bottom, high + room


def _right_edge(labels: Sequence[str]) -> float:
    return WIDTH - 10 - min(110.0, _CHARACTER * max(map(len, labels), default=0))


def _grid(frame: _Frame, x_unit: str, *, whole_x: bool = False) -> Markup:
    drawn = []
    for value in ticks(*frame.y):
        y = frame.at(frame.x[0], value)[1]
        drawn.append(tag("line", x1=_LEFT, x2=f"{frame.right:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        drawn.append(tag("text", short(value), x=_LEFT - 6, y=f"{y + 4:.1f}", class_="tick left"))
    found = ticks(*frame.x, count=4)
    for value in [v for v in found if v == int(v)] if whole_x else found:
        x = frame.at(value, frame.y[0])[0]
        drawn.append(tag("text", short(value), x=f"{x:.1f}", y=HEIGHT - 9, class_="tick"))
    drawn.append(tag("text", x_unit, x=_LEFT - 10, y=HEIGHT - 9, class_="tick left"))
    return join(drawn)


def _line(pixels: Sequence[tuple[float, float]], colour: str) -> Markup:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in pixels)
    return tag("path", d=path, class_=f"curve c-{colour}")


def _dot(pixel: tuple[float, float], colour: str, title: str | None = None, strength: float = 1.0) -> Markup:
    place = {"cx": f"{pixel[0]:.1f}", "cy": f"{pixel[1]:.1f}", "r": "2.6", "opacity": f"{strength:.2f}"}
    return tag("circle", *([tag("title", title)] if title else []), class_=f"dot c-{colour}", **place)


def _end_labels(
    tips: Sequence[tuple[float, float]], labels: Sequence[str], colours: Sequence[str], right: float
) -> list[Markup]:
    """Labels to the right of the lines, moved apart where they would overlap."""
    places = spread([y + 4 for _, y in tips], _LABEL, _TOP + 8.0, HEIGHT - _BOTTOM + 2.0)
    return [
        tag("text", label, x=f"{right + 6:.1f}", y=f"{place:.1f}", class_=f"label c-{colour}")
        for label, place, colour in zip(labels, places, colours, strict=True)
    ]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places of labels, moved apart to at least `gap`, in the same order and, if there is room, within a range."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for rank, i in enumerate(order):
        moved[i] = max(places[i], low) if rank == 0 else max(places[i], moved[order[rank - 1]] + gap)
    for rank, i in enumerate(reversed(order)):
        moved[i] = min(moved[i], high - rank * gap)
    return moved
