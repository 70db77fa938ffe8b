#!/usr/bin/env python3
"""Talk to a model in the terminal.

    python scripts/chat.py experiments/helpdesk/helpdesk-tiny/ppo

The model is an experiment folder, one of its checkpoints, any model folder, or a hub id.
"""

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

from rlhf_stages.args import ChatArgs
from rlhf_stages.cli import parse, run
from rlhf_stages.terminal import printable

if TYPE_CHECKING:
    from rlhf_stages.chat import ChatSession

HELP = "Say something. `reset` starts over, `quit` or Ctrl-D leaves, Ctrl-C stops a reply."


def main() -> None:
    """Load, then read and answer until the end."""
    (args,) = parse(ChatArgs, description=__doc__)
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal or a pipe
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and earlier lines in input()

    print(f"loading {args.source} ...", flush=True)
    import torch
    from transformers.utils import logging as transformers_logging

    from rlhf_stages.chat import ChatSession

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; what is wrong comes as an error
    dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[args.precision]
    session = ChatSession.load(args.source, device=args.device, dtype=dtype, trust_remote_code=args.trust_remote_code)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    size = session.model.num_parameters() / 1e6
    print(
        f"{session.name}: {size:,.1f} million parameters, {session.model.device}, {str(dtype).removeprefix('torch.')}"
    )
    print(printable("\n".join([*session.notes, HELP])))
    talk(session, args)


def talk(session: "ChatSession", args: ChatArgs) -> None:
    """Read a line, answer it, and again, until `quit` or the end of the input."""
    while True:
        try:
            text = input("\nYou: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not sys.stdin.isatty():
            print(printable(text))  # so that the output of a piped conversation reads like one
        if text in ("quit", "exit", "quit()", "exit()", "q"):
            return
        if text == "reset":
            session.reset()
            print("(starting over)")
        elif text:
            answer(session, text, args)


def answer(session: "ChatSession", text: str, args: ChatArgs) -> None:
    """Print the reply as it comes; Ctrl-C ends it."""
    print("Model: ", end="", flush=True)
    said = False
    try:
        with contextlib.closing(session.stream(text, args)) as pieces:
            for piece in pieces:
                print(printable(piece), end="", flush=True)
                said = True
        print("" if said else "(says nothing)")
    except KeyboardInterrupt:
        print(" (stopped)")


if __name__ == "__main__":
    try:
        run(main)
    except KeyboardInterrupt:  # while it loads
        sys.exit(130)
