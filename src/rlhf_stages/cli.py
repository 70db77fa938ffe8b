"""The command line: argv and YAML to the dataclasses of `rlhf_stages.args`, and errors to one line.

A script asks for the groups it needs: `sft, model, generation, fabric = parse(SFTArgs, ModelArgs, ...)`. This module
must not import torch: `--help` has to answer at once.
"""

import argparse
import difflib
import errno
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import simple_parsing
from simple_parsing import ConflictResolution, SimpleHelpFormatter

from rlhf_stages.config import NoEffect, config_tokens, gives_way, tell
from rlhf_stages.terminal import folded, printable

# the start of the program, near enough: scripts import this module before anything large
STARTED = time.monotonic()
# a run that was stopped and can be continued with --resume (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 75
# called before a script ends with an error, so that its message gets a line of its own
before_error: list[Callable[[], object]] = []


class Interrupted(Exception):
    """The run was stopped from outside, and saved.

    Args:
        is_first: this is the first process. The others end with 0, for launchers kill all when one of them does not.
    """

    def __init__(self, message: str, is_first: bool = True) -> None:
        super().__init__(message)
        self.exit_code = EXIT_INTERRUPTED if is_first else 0


class Finished(Exception):
    """There is nothing left to do."""


class HelpFormatter(SimpleHelpFormatter):  # type: ignore[misc]
    """Says that a flag is required, and leaves out the names that only the parser needs."""

    def start_section(self, heading: str | None) -> None:
        """Group titles without the destination that simple-parsing adds."""
        super().start_section(re.sub(r"(Args)? \[.*\]$", "", heading or "").lower())

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text: str | None = super()._get_help_string(action)
        return text.replace("(default: %(default)s)", "(required)") if text and action.required else text


def parse(*groups: type, argv: Sequence[str] | None = None, description: str | None = None) -> tuple[Any, ...]:
    """Parse argv into one instance of each dataclass in `groups`.

    `--config file.yaml` supplies any of the flags; the command line wins, and what would do nothing beside its flags is
    left out of the file. Wrong input ends the program with 2 and one line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    without: list[str] = []
    while True:
        parser = _parser(groups, description)
        try:
            namespace = parser.parse_args(config_tokens(argv, groups, without) + argv)
        except NoEffect as error:
            if set(error.flags) <= set(without) or not gives_way(error, argv):
                parser.error(str(error))
            without += error.flags
            tell(f"left out of the config file: {error}")
        except ValueError as error:
            parser.error(str(error))
        except SystemExit as stop:
            # simple-parsing prints a complaint about `--no_x=True` and leaves with 0, as if all were well
            raise SystemExit(stop.code or (0 if {"-h", "--help"} & set(argv) else 2)) from None
        else:
            return tuple(getattr(namespace, group.__name__) for group in groups)


class Parser(simple_parsing.ArgumentParser):  # type: ignore[misc]
    """Says in one line what is wrong; the usage of a stage has sixty."""

    def error(self, message: str) -> None:
        """End with 2; an unknown flag comes with the nearest one that there is."""
        if unknown := re.match(r"unrecognized arguments: (--\w+)", message):
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else "; --help lists all flags"
        self.exit(2, f"error: {printable(message)}\n")


def _parser(groups: Sequence[type], description: str | None) -> Parser:
    parser = Parser(
        description=description,
        allow_abbrev=False,
        conflict_resolution=ConflictResolution.NONE,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags; the command line wins")
    for group in groups:
        parser.add_arguments(group, dest=group.__name__)
    return parser


def _thread_error(args: threading.ExceptHookArgs) -> None:
    """A full disk in a logger's thread: whoever writes to it next meets the error, and says it in one line."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


def run(main: Callable[[], object]) -> None:
    """Call a script's main; an error that its user can mend ends in one line on stderr and exit code 2.

    A run that was interrupted and saved ends with exit code 75, Ctrl-C before there was anything to save with 130.
    """
    threading.excepthook = _thread_error
    warnings.formatwarning = lambda message, *_: folded(f"warning: {printable(str(message))}") + "\n"
    try:
        main()
    except Interrupted as stop:
        if stop.exit_code:
            print(f"{printable(str(stop))}; the same command with --resume continues", file=sys.stderr)
        raise SystemExit(stop.exit_code) from None
    except Finished as done:
        print(printable(str(done)))
    except (ValueError, OSError, FloatingPointError) as error:
        for call in before_error:
            call()
        hint = "; make room, and go on with --resume" if getattr(error, "errno", None) == errno.ENOSPC else ""
        print(f"error: {printable(str(error))}{hint}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
