#!/usr/bin/env python3
"""A page on which people rank and score replies of a model, and what a reward model trains on comes out.

    python scripts/annotate.py --models experiments/helpdesk/helpdesk-tiny/sft \\
        --prompts data/helpdesk/helpdesk-tiny/finetune_train.pt

Several people may use one server at once. It listens to this machine alone unless --host says otherwise; then
--auth_file has to say who may come in:

    python scripts/annotate.py --auth_file=feedback/users --add_user=ann
"""

import os
import sys
from pathlib import Path

from rlhf_stages.args import AnnotateArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C; or add a user."""
    (args,) = parse(AnnotateArgs, argv=argv, description=__doc__)
    from rlhf_stages.feedback import accounts

    if args.add_user is not None:
        accounts.add_user(Path(args.auth_file), args.add_user, _ask_password(args.add_user))
        print(f"{args.add_user} may come in; the users are in {args.auth_file}")
        return
    users = None if args.auth_file is None else accounts.read_users(Path(args.auth_file))
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it tells nobody

    import torch
    from transformers.utils import logging as transformers_logging

    from rlhf_stages.feedback.desk import Desk
    from rlhf_stages.feedback.store import Store

    from pages.annotation import SCRIPT, build
    from pages.serving import serve

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    store = Store(args.database)
    serve(build(Desk(args, store), has_accounts=users is not None), SCRIPT, args, users)
    store.close()


def _ask_password(name: str) -> str:
    """A password, typed twice without being shown; from a pipe, its first line."""
    from getpass import getpass

    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass(f"Password of {name}: ")
    if getpass("Again: ") != password:
        raise ValueError("the two passwords differ; nothing was written")
    return password


if __name__ == "__main__":
    run(main)
