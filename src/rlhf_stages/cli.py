"""The command line: argv and YAML to the dataclasses of `rlhf_stages.args`, and errors to one line.

A script asks for the groups it needs: `sft, model, generation, fabric = parse(SFTArgs, ModelArgs, ...)`. This module
must not import torch: `--help` has to answer at once.
"""

import argparse
import dataclasses
import difflib
import errno
import re
import sys
import threading
import time
import typing
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import simple_parsing
from simple_parsing import ConflictResolution, SimpleHelpFormatter

from rlhf_stages.terminal import printable

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

    `--config file.yaml` supplies any of the flags; the command line wins. Wrong input ends in argparse's usage error.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = simple_parsing.ArgumentParser(
        description=description,
        allow_abbrev=False,
        conflict_resolution=ConflictResolution.NONE,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags; the command line wins")
    for group in groups:
        parser.add_arguments(group, dest=group.__name__)
    try:
        tokens = _config_tokens(argv, groups) + argv
        namespace = parser.parse_args(tokens)
    except ValueError as error:
        parser.error(str(error))
    except SystemExit as stop:
        # simple-parsing prints a complaint about `--no_x=True` and leaves with 0, as if all were well
        raise SystemExit(stop.code or (0 if {"-h", "--help"} & set(argv) else 2)) from None
    return tuple(getattr(namespace, group.__name__) for group in groups)


def _config_tokens(argv: Sequence[str], groups: Sequence[type]) -> list[str]:
    """The flags of the `--config` file as command-line tokens, to stand before the real ones."""
    path = None
    for token, following in zip(argv, [*argv[1:], ""], strict=False):
        if token == "--config":
            path = following
        elif token.startswith("--config="):
            path = token.removeprefix("--config=")
    if path is None:
        return []
    if not path or path.startswith("--"):
        raise ValueError("--config needs a file")
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except Exception as error:  # besides its own, yaml raises half a dozen types on wrong tags, dates and nesting
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines, got {type(config).__name__}")
    known = {f.name for group in groups for f in dataclasses.fields(group)} | {"model_name_or_path"}
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--config {path}: unknown flag {key!r}{hint}")
        parts = config[key] if isinstance(config[key], list) else [config[key]]
        if any(isinstance(part, (list, dict, set, tuple)) for part in parts):  # their text can be endless, or very long
            raise ValueError(f"--config {path}: {key} is nested, expected a value or a list of values")
    lists = {f.name for group in groups for f in dataclasses.fields(group) if typing.get_origin(f.type) is list}
    given = {token.partition("=")[0].removeprefix("--") for token in argv if token.startswith("--")}
    tokens = []
    for key, value in config.items():
        if key in lists & given:  # the command line's would be added to these
            continue
        if key in lists and isinstance(value, list):
            tokens += [f"--{key}", *map(str, value)]
        elif isinstance(value, list):
            tokens.append(f"--{key}={','.join(map(str, value))}")
        elif value is not None:
            tokens.append(f"--{key}={value}")
    return tokens


def _thread_error(args: threading.ExceptHookArgs) -> None:
    """A full disk in a logger's thread: whoever writes to it next meets the error, and says it in one line."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


def run(main: Callable[[], object]) -> None:
    """Call a script's main; an error that its user can mend ends in one line on stderr and exit code 2.

    A run that was interrupted and saved ends with exit code 75, Ctrl-C before there was anything to save with 130.
    """
    threading.excepthook = _thread_error
    warnings.formatwarning = lambda message, *_: f"warning: {printable(str(message))}\n"
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
