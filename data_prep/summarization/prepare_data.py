#!/usr/bin/env python3
"""Prepare human preferences between two summaries of a post.

Reads `{prompt, chosen, rejected}` with the post as prompt; the default is CarperAI/openai_summarize_comparisons. Of its
two validation splits, valid1 is used and valid2 is left out. Posts occur with several pairs of summaries:
--remove_same_inputs=False keeps those that share the chosen one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.cli import parse, run

if TYPE_CHECKING:
    from rlhf_stages.data.sources import Example

HUB_ID = "CarperAI/openai_summarize_comparisons"
CUE = "TL;DR:"
POST = (
    "SUBREDDIT: r/cycling\nTITLE: Should I repair my old bike or buy a new one?\n"
    "POST: I have ridden the same steel bike to work for nine years. Last week the rear wheel broke, and the shop wants"
    " 220 for a new wheel, chain and brakes. A new bike of the same kind costs about 700. My partner says that the old"
    " one will only need more repairs, but the frame is sound and I like how it rides. What would you do?"
)
CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% set posts = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ posts[-1]['content'] + '\\nTL;DR:' }}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ ' ' + messages[-1]['content'] }}{% endif %}"
)


def as_prompt(post: str) -> str:
    """The post, closed with the cue for a summary."""
    return f"{post.strip().removesuffix(CUE).rstrip()}\n{CUE}"


def to_example(record: Mapping[str, Any]) -> "Example":
    """A response is a space and the summary, without the cue that some data repeats in front of it."""
    from rlhf_stages.data.sources import Example, SkipRecord, text_of

    post, chosen, rejected = (
        text_of(record, "prompt"),
        text_of(record, "chosen", "selected"),
        text_of(record, "rejected"),
    )
    if post is None or not post.strip():
        raise SkipRecord("missing prompt" if post is None else "empty prompt")
    if chosen is None and rejected is not None:
        raise SkipRecord("missing chosen")
    responses = (text.strip().removeprefix(CUE).strip() for text in (chosen, rejected) if text is not None)
    prompt = as_prompt(post)
    return Example(prompt, tuple(f" {text}" for text in responses), key=prompt)


def main() -> None:
    """Read, prepare, write."""
    (args,) = parse(TextDataArgs, description=__doc__)
    from rlhf_stages.data.prepare import prepare
    from rlhf_stages.data.sources import read_source

    prepare(
        args,
        dataset="summarization",
        records=read_source(args.source or HUB_ID, ignore=("valid2",)),
        to_example=to_example,
        example_prompt=as_prompt(POST),
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    run(main)
