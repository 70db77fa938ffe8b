#!/usr/bin/env python3
"""A page on which a model that was trained on summaries sums up a post: subreddit, title, text."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from prepare_data import CUE, POST

from rlhf_stages.args import DemoArgs
from rlhf_stages.cli import parse, run

_PARTS = re.compile(r"SUBREDDIT:\s*(?:r/)?(.*?)\s*\nTITLE:\s*(.*?)\s*\nPOST:\s*(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class SummaryDemoArgs(DemoArgs):
    """A page to have posts summed up by checkpoints, one or two side by side."""

    log_dir: str = "experiments/summarization"  # Folder whose experiments the page offers


def compose(subreddit: str, title: str, post: str) -> str:
    """The post as the data spells it; the checkpoint's template adds the cue for a summary."""
    return f"SUBREDDIT: r/{subreddit.strip().removeprefix('r/')}\nTITLE: {title.strip()}\nPOST: {post.strip()}"


def split(prompt: str) -> tuple[str, str, str]:
    """Subreddit, title and text of a prompt of the data."""
    prompt = prompt.strip().removesuffix(CUE).strip()
    found = _PARTS.fullmatch(prompt)
    return (found[1], found[2], found[3]) if found else ("", "", prompt)


def main(argv: list[str] | None = None) -> None:
    """Serve until Ctrl-C."""
    (args,) = parse(SummaryDemoArgs, argv=argv, description=__doc__)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported: it tells nobody
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # where the page is

    from pages.demo import Form, open_demo

    form = Form(
        title="Sum up a post",
        subtitle="Choose an experiment, or two, and give them a post.",
        empty="Choose a checkpoint and give it a post.",
        fields=("Subreddit", "Title", "Post"),
        compose=compose,
        split=split,
        example=split(POST),
        remembers=False,
    )
    open_demo(args, form)


if __name__ == "__main__":
    run(main)
