"""Results as text."""

import textwrap
from collections.abc import Mapping, Sequence

from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.terminal import printable


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
