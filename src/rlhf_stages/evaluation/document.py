"""Results as text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_stages.args import GenerationArgs
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.evaluation.table import accuracy_table, interval_table
from rlhf_stages.terminal import folded, printable, without_links

_ACCURACY = (
    "reward models: share of the pairs whose better text has the higher score, and its 95 % interval, for which the"
    " pairs of a list count as one; a tie is wrong. `longer wins` is what counting tokens would reach"
)


def document(results: Mapping[str, Any], markdown: bool) -> str:
    """What evaluate.py found, the replies left out: tables, what stands in them, and what could not be measured.

    Args:
        results: the content of `evaluate.py --output`.
        markdown: Markdown, else text for a terminal.
    """
    parts = []
    if "summary" in results:
        parts += _policies(results, markdown)
    if "reward_accuracy" in results:
        parts += [_line(_ACCURACY, markdown), accuracy_table(results["reward_accuracy"], markdown)]
    paths = [_line(f"{name}: {path}", markdown) for name, path in results["checkpoints"].items()]
    parts.append("\n".join(f"- {line}" for line in paths) if markdown else "\n".join(paths))
    return "\n\n".join([*parts, *(_line(note, markdown) for note in results["notes"])])


def _policies(results: Mapping[str, Any], markdown: bool) -> list[str]:
    args, prompts = results["args"], results["prompts"]
    drawn = settings_line(GenerationArgs(**results["generation"]), args["seed"])
    title = f"{results['dataset']}: {prompts:,} held-out prompt{'s' * (prompts > 1)} ({args['split']} split); {drawn}"
    table, legend = interval_table(results["summary"], results["whole"], args["bootstrap_samples"], markdown)
    kl = f"KL is to {results['reference']}, in nats per reply"
    read = f"perplexity is that of {results['texts']:,} of the data's own responses"
    found = "; ".join([kl, *([read] if results["texts"] else []), *([legend] if legend else [])])
    return [_line(title, markdown), table, _line(found, markdown)]


def _line(text: str, markdown: bool) -> str:
    return without_links(printable(text)) if markdown else folded(printable(text))


def settings_line(generation: GenerationArgs, seed: int) -> str:
    """How the replies were drawn."""
    drawn = f"temperature {generation.temperature:g}, top-k {generation.top_k}, top-p {generation.top_p:g}"
    drawn = drawn if generation.do_sample else "most probable token"
    beams = f", {generation.num_beams} beams" if generation.num_beams > 1 else ""
    each = f", {generation.num_return_sequences} to a prompt" if generation.num_return_sequences > 1 else ""
    return f"{drawn}{beams}, {generation.min_new_tokens} to {generation.max_new_tokens} tokens{each}, seed {seed}"


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
