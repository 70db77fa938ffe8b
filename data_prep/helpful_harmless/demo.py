#!/usr/bin/env python3
"""A page to chat with a model that was trained on helpful and harmless dialogues."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlhf_stages.args import DemoArgs
from rlhf_stages.cli import parse, run


@dataclass(frozen=True, kw_only=True)
class ChatDemoArgs(DemoArgs):
    """A page to chat with checkpoints, one or two side by side."""

    log_dir: str = "experiments/helpful_harmless"  # Folder whose experiments the page offers


def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    (args,) = parse(ChatDemoArgs, argv=argv, description=__doc__)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it tells nobody
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # where the page is

    from dataclasses import replace

    from pages.demo import CHAT, open_demo

    open_demo(args, replace(CHAT, title="Helpful and harmless"))


if __name__ == "__main__":
    run(main)
