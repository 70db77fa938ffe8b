#!/usr/bin/env python3
"""Prepare human preferences about helpful and harmless dialogues.

Reads `{prompt, chosen, rejected}` with the dialogue so far as prompt, as in Dahoas/full-hh-rlhf (the default), or raw
`{chosen, rejected}` with whole dialogues, as in Anthropic/hh-rlhf. All pairs that open with the same human turn stay on
the same side of every split.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.cli import parse, run

if TYPE_CHECKING:
    from rlhf_stages.data.sources import Example

HUB_ID = "Dahoas/full-hh-rlhf"
QUESTION = "Why does bread dough rise when it rests in a warm place?"


def to_example(record: Mapping[str, Any]) -> "Example":
    """The prompt ends with "Assistant:"; a response is one turn, a space and the text."""
    from rlhf_stages.data.dialogue import as_prompt, first_human_turn, is_one_turn, split_dialogue
    from rlhf_stages.data.sources import Example, SkipRecord, text_of

    prompt, chosen = text_of(record, "prompt"), text_of(record, "chosen", "selected")
    rejected = text_of(record, "rejected")
    if prompt is None:
        if chosen is None or rejected is None:
            raise SkipRecord("missing chosen" if chosen is None else "missing rejected")
        try:
            prompt, chosen, rejected = split_dialogue(chosen, rejected)
        except ValueError:
            raise SkipRecord("no shared prompt") from None
    elif chosen is None and rejected is not None:
        raise SkipRecord("missing chosen")
    responses = tuple(text for text in (chosen, rejected) if text is not None)
    if not all(map(is_one_turn, responses)):
        raise SkipRecord("reply of several turns")
    prompt = as_prompt(prompt)
    return Example(prompt, tuple(" " + text.strip() for text in responses), key=first_human_turn(prompt))


def main() -> None:
    """Read, prepare, write."""
    (args,) = parse(TextDataArgs, description=__doc__)
    from rlhf_stages.data.dialogue import CHAT_TEMPLATE, as_prompt
    from rlhf_stages.data.prepare import prepare
    from rlhf_stages.data.sources import read_source

    prepare(
        args,
        dataset="helpful_harmless",
        records=read_source(args.source or HUB_ID),
        to_example=to_example,
        example_prompt=as_prompt(QUESTION),
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    run(main)
