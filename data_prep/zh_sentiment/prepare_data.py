#!/usr/bin/env python3
"""Prepare Chinese reviews: texts to imitate, ranked lists, prompts, and labelled texts to train classifiers on.

--source names the reviews (`label,review`, 1 positive, 0 negative: a csv file, or a folder of them), --rank_lists a
file of ranked lists (a list per line, tabs between its texts, the best first). --stage=finetune splits each review into
an opening and the rest; --stage=preference writes the lists, whatever their length; --stage=prompt draws from four
prompts, or from those of a file; --stage=classify writes two halves of the reviews with their labels, so that a second
classifier can judge what the first one rewards. Reviews that a list holds are dropped, since the classifiers would have
seen what the reward model is tested on.
"""

import sys
from pathlib import Path

from rlhf_stages.args import ZhSentimentArgs
from rlhf_stages.cli import parse, run


def main() -> None:
    """Read, sift, write."""
    (args,) = parse(ZhSentimentArgs, description=__doc__)
    from rlhf_stages.data.prepare import prepare
    from rlhf_stages.data.sources import read_source
    from rlhf_stages.data.zh_sentiment import PROMPTS, Lists, Reviews, draw_prompts, to_example, write_labelled

    lists = Lists(args.rank_lists, args) if args.rank_lists else None
    if args.stage == "prompt":
        records = draw_prompts(args)
    elif args.stage == "preference":
        records = lists
    else:
        reviews = records = Reviews(read_source(args.source), lists.lists if lists else (), args)
        if lists:
            exact, plain = reviews.in_lists
            what = "dropped" if args.remove_leak else "kept, for --remove_leak=False"
            print(
                f"reviews that a ranked list holds: {exact:,} word for word, {plain:,} if only letters and digits count"
                f"; {what}",
                file=sys.stderr,
            )
    if args.stage == "classify":
        for name, count in write_labelled(reviews.reviews, Path(args.destination_dir), args).items():
            print(f"half {name}: {count:,} texts")
        for split, reasons in reviews.skipped.items():
            dropped = ", ".join(f"{number:,} {reason}" for reason, number in reasons.most_common())
            print(f"{split}: dropped: {dropped or 'none'}")
        print(f"wrote sentiment_a_*.jsonl and sentiment_b_*.jsonl to {args.destination_dir}")
        return
    prepare(
        args,
        dataset="zh_sentiment",
        records=records,
        to_example=to_example,
        example_prompt=PROMPTS[0],
        chat_template=None,
    )


if __name__ == "__main__":
    run(main)
