"""`--config` files: YAML to the command-line tokens that stand before the real ones.

A block `globals:` gives names that `{{ name }}` stands for in the rest of the file (Jinja2, sandboxed). Files for
`rlhf_ppo.py` may use OpenRL's keys, see `rlhf_stages.openrl`.
"""

import dataclasses
import difflib
import os
import re
import sys
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_stages.openrl import translate
from rlhf_stages.openrl_keys import KEYS
from rlhf_stages.terminal import printable

# the lines of the block, up to the next that begins at the margin with anything but a comment
_GLOBALS = re.compile(r"^globals:.*\n(?:(?:[ \t].*|#.*|)\n)*", re.MULTILINE)


class NoEffect(ValueError):
    """Flags that were given and would do nothing, because of another one.

    Args:
        flags: their names.
        when: what they act with, or without: `with --finetune_mode=lora`. The first flag in it decides.
    """

    def __init__(self, flags: Sequence[str], when: str) -> None:
        super().__init__(f"--{' --'.join(flags)} only act{'s' * (len(flags) == 1)} {when}")
        self.flags = flags
        self.decided_by = re.findall(r"--(\w+)", when)[0]


def config_tokens(argv: Sequence[str], groups: Sequence[type], without: Collection[str] = ()) -> list[str]:
    """The flags of the `--config` file in `argv`, if there is one.

    Args:
        without: flags of the file that are left out.

    Raises:
        ValueError: the file cannot be read, or does not hold flags of these groups.
    """
    given = _given(argv)
    if "config" not in given:
        return []
    path = (given["config"] or [""])[-1]
    if not path:
        raise ValueError("--config needs a file")
    try:
        config = _read(path)
        fields = [f for group in groups for f in dataclasses.fields(group)]
        known = {f.name for f in fields} | {"model_name_or_path"}
        tokens: list[str] = []
        if any(group.__name__ == "PPOArgs" for group in groups):
            translated = translate(config, given)
            config = translated.rest
            tokens = [token for token in translated.tokens if token[2:].partition("=")[0] not in without]
            known |= KEYS.keys()
            if translated.ignored and not without:  # else it has been said
                tell(f"{path}: no effect here: {', '.join(translated.ignored)} (docs/from-openrl.md)")
        _check(config, known)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    lists = {f.name for f in fields if typing.get_origin(f.type) is list}
    without = {*without, *(lists & given.keys())}  # to a list that of the command line would be added
    for key, value in config.items():
        if key in without:
            continue
        if key in lists and isinstance(value, list):
            tokens += [f"--{key}", *map(str, value)]
        elif isinstance(value, list):
            tokens.append(f"--{key}={','.join(map(str, value))}")
        elif value is not None:
            tokens.append(f"--{key}={value}")
    return tokens


def tell(line: str) -> None:
    """Say what becomes of a config file, on the first process alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(printable(line), file=sys.stderr)


def gives_way(error: NoEffect, argv: Sequence[str]) -> bool:
    """Whether flags do nothing because the command line decided so, which names none of them itself: a file's may be
    left out then.
    """
    given = _given(argv).keys()
    return not given.isdisjoint((error.decided_by, f"no_{error.decided_by}")) and given.isdisjoint(error.flags)


def _given(argv: Sequence[str]) -> dict[str, list[str]]:
    """The words after each flag of a command line; of one that is there twice, the last ones."""
    given: dict[str, list[str]] = {}
    words: list[str] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            words = [value] if equals else []
            given[name] = words
        else:
            words.append(token)
    return given


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8") + "\n"
        if block := _GLOBALS.search(text):
            names = yaml.safe_load(block[0])["globals"]
            text = _filled_in(text[: block.start()] + text[block.end() :], names or {})
        config = yaml.safe_load(text) or {}
    except Exception as error:  # besides its own, yaml raises half a dozen types on wrong tags, dates and nesting
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(config, dict):
        raise ValueError(f"expected `flag: value` lines, got {type(config).__name__}")
    return config


def _filled_in(text: str, names: Any) -> str:
    """The text with `{{ name }}` replaced."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not isinstance(names, Mapping):
        raise ValueError(f"globals is a block of `name: value` lines, got {type(names).__name__}")
    template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(text)
    return template.render({str(name): value for name, value in names.items()})


def _check(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Every key is a flag, and has a value or a list of values."""
    for key, value in config.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown flag {key!r}{hint}")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, (list, dict, set, tuple)) for part in parts):  # their text can be endless, or very long
            raise ValueError(f"{key} is nested, expected a value or a list of values")
