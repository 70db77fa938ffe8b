#!/usr/bin/env python3
"""Prepare DailyDialog: for each utterance of a dialogue, what was said before it and the utterance.

--source is a folder of the official text files, the official zip file, or a data set with the columns dialog, act and
emotion (the default is the hub's daily_dialog). --stage=finetune writes the shards for SFT and PPO, whose metadata name
the act and the emotion of each reply; --stage=classify writes texts to train classifiers of acts and emotions on. Texts
become normal English, and what validation and test have is dropped from train; both can be switched off.
"""

from pathlib import Path

from rlhf_stages.args import DailyDialogArgs
from rlhf_stages.cli import parse, run

HUB_ID = "daily_dialog"
QUESTIONS = ("Hello. Is the library still open?", "Yes, for one more hour. What are you looking for?")


def main() -> None:
    """Read, sift, write."""
    (args,) = parse(DailyDialogArgs, description=__doc__)
    from rlhf_stages.data.daily_dialog import Dialogues, chat_template, to_example, write_labelled
    from rlhf_stages.data.daily_dialog_files import read_dialogues
    from rlhf_stages.data.prepare import prepare

    dialogues = Dialogues(read_dialogues(args.source or HUB_ID), args)
    if args.stage == "classify":
        rows = write_labelled(dialogues, Path(args.destination_dir), args)
        for split, count in rows.items():
            reasons = dialogues.skipped[split].most_common()
            dropped = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
            print(f"{split}: {count:,} texts; dropped: {dropped or 'none'}")
        print(f"wrote act_*.jsonl and emotion_*.jsonl to {args.destination_dir}")
        return
    prepare(
        args,
        dataset="daily_dialog",
        records=dialogues,
        to_example=to_example,
        example_prompt="".join(text + args.separator for text in QUESTIONS),
        chat_template=chat_template(args.separator, args.context_turns),
        separator=args.separator,
    )


if __name__ == "__main__":
    run(main)
