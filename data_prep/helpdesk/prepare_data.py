#!/usr/bin/env python3
"""Generate a customer-support corpus and prepare it: the embedded default that needs no download.

`corpus.py` beside this file writes the dialogues and knows the right answer to every question. SFT imitates replies of
mixed quality, preferences are decided by the gold score with some labels flipped (none in the test split), and PPO gets
prompts of its own.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.cli import parse, run

import corpus

if TYPE_CHECKING:
    from rlhf_stages.data.sources import Example


@dataclass(frozen=True, kw_only=True)
class HelpdeskArgs(TextDataArgs):
    """Data preparation: generated dialogues to token shards."""

    tokenizer_name: str = "models/helpdesk-tiny"  # Tokenizer: hub id or folder; make_model.py makes this one
    max_length: int = 96  # Tokens of prompt and response with BOS and EOS; longer responses are cut, EOS kept
    max_prompt_length: int = 64  # Tokens; records with a longer prompt are dropped
    stage_split: str = "3,5,2"  # Shares of the prompts for finetune, preference, prompt; they never overlap
    num_dialogues: int = 8000  # Dialogues to train and validate on
    num_test_dialogues: int = 1500  # Dialogues to test on
    flip_probability: float = 0.1  # Share of the training preferences whose label is wrong

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is not None:
            raise ValueError("--source: this dataset is generated; leave it out")


def dialogues(args: HelpdeskArgs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Split and record of every dialogue: a prompt, and two replies ranked by gold or one to imitate."""
    prompts = corpus.generate_prompts(args.seed, args.num_dialogues + args.num_test_dialogues)
    for number, prompt in enumerate(prompts):
        split = "train" if number < args.num_dialogues else "test"
        rng = random.Random(f"{args.seed}/replies/{number}")
        if args.stage == "preference":
            flip = args.flip_probability if split == "train" else 0.0
            yield split, {"prompt": prompt, "responses": corpus.preference_pair(prompt, rng, flip)}
        else:
            yield split, {"prompt": prompt, "responses": (corpus.demonstration(prompt, rng),)}


def to_example(record: Mapping[str, Any]) -> "Example":
    """The records are as the stages need them; the prompt itself is the key of the splits."""
    from rlhf_stages.data.sources import Example

    return Example(record["prompt"], record["responses"], key=record["prompt"])


def main() -> None:
    """Generate, prepare, write."""
    (args,) = parse(HelpdeskArgs, description=__doc__)
    from rlhf_stages.data.dialogue import CHAT_TEMPLATE
    from rlhf_stages.data.prepare import prepare

    prepare(
        args,
        dataset="helpdesk",
        records=dialogues(args),
        to_example=to_example,
        example_prompt=corpus.generate_prompts(args.seed + 1, 1)[0],
        chat_template=CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    run(main)
