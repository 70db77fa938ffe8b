#!/usr/bin/env python3
"""Two models answer the same prompts, and people (or a program) say blind which answer is better.

    python scripts/compare.py --models experiments/helpdesk/helpdesk-tiny/sft experiments/helpdesk/helpdesk-tiny/ppo \\
        --prompts data/helpdesk/helpdesk-tiny/prompt_test.pt

People vote on a page; --judge=reward_model, length or classifier votes at once. Votes go to the database of
annotate.py, and a Markdown report says who wins, how often, and whether that may be chance.
"""

import os
from pathlib import Path

from rlhf_stages.args import CompareArgs, FabricArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> Path:
    """Sample, vote, report; returns the path of the report."""
    args, fabric_args = parse(CompareArgs, FabricArgs, argv=argv, description=__doc__)

    from dataclasses import replace

    from transformers.utils import logging as transformers_logging

    from rlhf_stages import loop
    from rlhf_stages.feedback import accounts, judges
    from rlhf_stages.feedback.contest import ContestDesk, contestants_of, open_contest, warnings_of
    from rlhf_stages.feedback.store import Store
    from rlhf_stages.feedback.verdict import conclusion, report, tallies_of
    from rlhf_stages.files import write_text
    from rlhf_stages.terminal import printable

    # 1. Who is compared, and what should be known about it
    users = None if args.auth_file is None else accounts.read_users(Path(args.auth_file))
    if fabric_args.devices not in ("auto", "1"):
        raise ValueError(f"--devices={fabric_args.devices}: two models are compared on one device")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    contestants = contestants_of(args.models)
    warnings = warnings_of(contestants, str(args.prompts))
    print("\n".join(printable(f"note: {warning}") for warning in warnings), end="\n" if warnings else "")

    # 2. Replies of both to the same prompts, unless the database has them
    fabric = loop.start_fabric(replace(fabric_args, devices="1"), args.seed)
    store = Store(args.database)
    items = open_contest(args, contestants, store, fabric)

    # 3. Votes
    if args.judge == "people":
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it tells nobody
        from pages.comparison import SCRIPT, build
        from pages.serving import serve

        desk = ContestDesk(args, contestants, items, store, warnings)
        serve(build(desk, has_accounts=users is not None), SCRIPT, args, users)
    else:
        judges.vote(args, items, store, fabric)

    # 4. Result
    for tally in tallies_of(items, store):
        print(printable(conclusion(tally, contestants)))
    write_text(path := Path(args.report), [report(args, contestants, items, store, warnings)])
    store.close()
    print(f"report      {path}\nvotes       {args.database}")
    return path


if __name__ == "__main__":
    run(main)
