#!/usr/bin/env python3
"""A dataset of your own: questions with an answer and a worse one, from a jsonl or csv file.

    python examples/faq/prepare_data.py --source=examples/faq/questions.jsonl --stage=finetune \\
        --destination_dir=data/faq/helpdesk-tiny --tokenizer_name=models/helpdesk-tiny --stage_split=all
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.cli import parse, run

if TYPE_CHECKING:
    from rlhf_stages.data.sources import Example


def to_example(record: Mapping[str, Any]) -> "Example":
    """Answers are ranked, best first. Questions that differ in case or spaces stay on the same side of every split."""
    from rlhf_stages.data.dialogue import as_prompt
    from rlhf_stages.data.sources import Example, SkipRecord, text_of

    question, answer, worse = (text_of(record, name) for name in ("question", "answer", "worse"))
    if question is None or answer is None:
        raise SkipRecord("no question or no answer")  # counted under these words
    responses = [f" {text.strip()}" for text in (answer, worse) if text is not None]
    return Example(as_prompt(question), tuple(responses), key=" ".join(question.lower().split()))


def main() -> None:
    """Read, prepare, write."""
    (args,) = parse(TextDataArgs, description=__doc__)
    from rlhf_stages.data.dialogue import CHAT_TEMPLATE, as_prompt
    from rlhf_stages.data.prepare import prepare
    from rlhf_stages.data.sources import read_source

    if args.source is None:
        raise ValueError("--source: name the file of questions, or a folder of such files")
    prepare(
        args,
        dataset="faq",
        records=read_source(args.source),
        to_example=to_example,
        example_prompt=as_prompt("How long do you need to repair a wheel?"),
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    run(main)
