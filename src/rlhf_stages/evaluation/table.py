"""Tables, as aligned text and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stages.evaluation.reward_accuracy import ALL
from rlhf_stages.terminal import COLUMNS, without_links

_CHANGES = ("change", "change_low", "change_high")
Columns = Mapping[str, Mapping[str, Mapping[str, float]]]


def interval_table(
    columns: Columns, whole: Mapping[str, Mapping[str, float]], samples: int, markdown: bool
) -> tuple[str, str]:
    """A row per measure, a column per policy: the value, half the width of its interval, and the change from the first.

    Args:
        columns: as `with_intervals` gives them.
        whole: numbers of a column that have no interval.
        samples: how many resamples the intervals are of.
        markdown: a Markdown table; else aligned text, where a mark stands for the change if there is no room.

    Returns:
        The table, and what its signs mean; that is empty where there are no intervals.
    """
    rows = _rows(columns, whole, brief=False)
    is_brief = not markdown and _width(rows) > COLUMNS
    table = _markdown(rows) if markdown else _aligned(_rows(columns, whole, is_brief))
    return table, _legend(columns, samples, is_brief)


def accuracy_table(splits: Mapping[str, Mapping[str, Mapping[str, Any]]], markdown: bool) -> str:
    """A row per split and group of pairs, a column per reward model, as `accuracy_rows` gives them."""
    rows = [["", "n", *splits[next(iter(splits))][ALL]["share"]]]
    for split, groups in splits.items():
        for name, group in groups.items():
            label = f"{split}: {name}" if name == ALL or markdown else f"  {name}"
            shares = [f"{s['value']:.3f} ({s['low']:.3f}-{s['high']:.3f})" for s in group["share"].values()]
            rows.append([label, f"{group['n']:,}", *shares])
    return _markdown(rows) if markdown else _aligned(rows)


def _rows(columns: Columns, whole: Mapping[str, Mapping[str, float]], brief: bool) -> list[list[str]]:
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    names += list(dict.fromkeys(name for column in whole.values() for name in column))
    rows = [["", *(f"{column}  " if brief else column for column in columns)]]
    for name in names:
        row = [name]
        for column, measures in columns.items():
            if name in whole.get(column, {}):
                row.append(f"{whole[column][name]:.3f}" + "  " * brief)
            elif name in measures:
                row.append(_cell(measures[name], brief))
            else:
                row.append("-" + "  " * brief)
        rows.append(row)
    return rows


def _cell(entry: Mapping[str, float], brief: bool) -> str:
    text = f"{entry['value']:.3f}"
    if "low" in entry:
        text += f" ±{(entry['high'] - entry['low']) / 2:.3f}"
    if brief:
        differs = "change_low" in entry and not entry["change_low"] <= 0 <= entry["change_high"]
        return text + (" *" if differs else "  ")
    if "change" not in entry:
        return text
    change, *interval = (f"{entry[name]:+.3f}" for name in _CHANGES if name in entry)
    return f"{text} ({', '.join([change, *([' to '.join(interval)] if interval else [])])})"


def _legend(columns: Columns, samples: int, is_brief: bool) -> str:
    if not any("low" in entry for column in columns.values() for entry in column.values()):
        return ""
    legend = f"± is half of the 95 % interval of {samples:,} resamples of the prompts"
    first = next(iter(columns))
    if len(columns) == 1:
        return legend
    if is_brief:
        return f"{legend}; * marks a change from {first} whose interval leaves out 0"
    return f"{legend}, in brackets the change from {first} and the interval of the change"


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]))) - 2


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Text of at most `COLUMNS`: the columns that do not fit follow below, with their labels again."""
    blocks: list[list[int]] = [[]]
    for column in range(1, len(rows[0])):
        if blocks[-1] and _width([[row[i] for i in (0, *blocks[-1], column)] for row in rows]) > COLUMNS:
            blocks.append([])
        blocks[-1].append(column)
    return "\n\n".join(_block(rows, block) for block in blocks)


def _block(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> str:
    label = max(len(row[0]) for row in rows)
    widths = [max(len(row[i]) for row in rows) for i in columns]
    return "\n".join(
        row[0].ljust(label) + "".join(f"  {row[i]:>{width}}" for i, width in zip(columns, widths, strict=True)).rstrip()
        for row in rows
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    names = [without_links(name).replace("|", "\\|") for name in rows[0]]
    lines = ["| " + " | ".join(row) + " |" for row in (names, *rows[1:])]
    return "\n".join([lines[0], "| --- " * len(names) + "|", *lines[1:]])
