#!/usr/bin/env python3
"""A page to talk to checkpoints, one or two side by side, with the score of a reward model.

    python scripts/demo.py experiments/helpdesk/helpdesk-tiny/ppo

It offers all experiments of --log_dir, and listens to this machine alone unless --host says otherwise.
"""

import os

from rlhf_stages.args import DemoArgs
from rlhf_stages.cli import parse, run


def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    (args,) = parse(DemoArgs, argv=argv, description=__doc__)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it tells nobody

    from pages.demo import open_demo

    open_demo(args)


if __name__ == "__main__":
    run(main)
