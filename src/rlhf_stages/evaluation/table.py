"""Results as text."""

import textwrap
from collections.abc import Mapping, Sequence

from rlhf_stages.args import EvaluateArgs, GenerationArgs
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.terminal import printable

_CHANGES = ("change", "change_low", "change_high")


def comparison_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A row per number, a column per policy."""
    rows = list(next(iter(columns.values())))
    label = max(map(len, rows))
    widths = [max(len(name), 9) for name in columns]
    lines = [" " * label + "".join(f"  {name:>{w}}" for name, w in zip(columns, widths, strict=True))]
    for row in rows:
        values = "".join(f"  {column[row]:{w}.3f}" for column, w in zip(columns.values(), widths, strict=True))
        lines.append(f"{row:{label}}{values}")
    return "\n".join(lines)


def interval_table(
    columns: Mapping[str, Mapping[str, Mapping[str, float]]], whole: Mapping[str, Mapping[str, float]], markdown: bool
) -> str:
    """A row per measure, a column per policy: the value, half the width of its interval, and the change to the first.

    Args:
        columns: as `with_intervals` gives them.
        whole: numbers of a column that have no interval.
        markdown: a Markdown table, else aligned text.
    """
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    names += list(dict.fromkeys(name for column in whole.values() for name in column))
    first = next(iter(columns))
    rows = [["", *columns]]
    for name in names:
        row = [name]
        for column, measures in columns.items():
            if name in whole.get(column, {}):
                row.append(f"{whole[column][name]:.3f}")
            elif name in measures:
                row.append(_with_change(measures[name], columns[first].get(name)))
            else:
                row.append("-" if markdown else "")
        rows.append(row)
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def settings_line(generation: GenerationArgs, args: EvaluateArgs, prompts: int) -> str:
    """How the replies were drawn, and what the intervals are."""
    drawn = f"temperature {generation.temperature:g}, top-k {generation.top_k}, top-p {generation.top_p:g}"
    drawn = drawn if generation.do_sample else "most probable token"
    beams = f", {generation.num_beams} beams" if generation.num_beams > 1 else ""
    intervals = (
        f"± is half of the 95 % interval of {args.bootstrap_samples:,} resamples of the prompts, in brackets the change"
        " to the first and the interval of the change"
    )
    return (
        f"{drawn}{beams}, {generation.min_new_tokens} to {generation.max_new_tokens} tokens, seed {args.seed};"
        f" {intervals if prompts > 1 else 'one prompt says nothing of how far others are from it: no intervals'}"
    )


def _with_change(entry: Mapping[str, float], first: Mapping[str, float] | None) -> str:
    text = f"{entry['value']:.3f}"
    if "low" in entry:
        text += f" ±{(entry['high'] - entry['low']) / 2:.3f}"
    if "change" not in entry or first is None or not first["value"]:
        return text
    change, *interval = (100 * entry[name] / abs(first["value"]) for name in _CHANGES if name in entry)
    return f"{text} ({change:+.1f} %{', {:+.1f} to {:+.1f}'.format(*interval) if interval else ''})"


def side_by_side(replies: Mapping[str, Sequence[Reply]], count: int, width: int = 92) -> str:
    """The first prompts with what each policy said to them."""
    blocks = []
    label = max(map(len, replies)) + 2
    for row in range(min(count, *(len(column) for column in replies.values()))):
        lines = [printable(next(iter(replies.values()))[row].prompt.strip())]
        for name, column in replies.items():
            reply = column[row]
            gold = "" if reply.gold is None else f"  [gold {reply.gold:.2f}]"
            text = textwrap.wrap(printable(" ".join(reply.text.split())) + gold, width - label) or [""]
            lines += [f"{name if i == 0 else '':>{label - 2}}  {line}" for i, line in enumerate(text)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
