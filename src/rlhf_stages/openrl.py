"""OpenRL's configuration files, as flags of `rlhf_ppo.py`; the table of keys is `rlhf_stages.openrl_keys`."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_stages.openrl_keys import KEYS, Context

_BLOCKS = ("env", "reward_class", "vec_info_class")
# ids whose settings the table knows; those of others are the user's own
_BUILT_IN = ("NLPReward", "NLPVecInfo", "VecInfo", "EPS_RewardInfo")


@dataclass(frozen=True)
class Translated:
    """Tokens for the keys of OpenRL, the keys without effect, and what is left: flags under their own names."""

    tokens: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)


def translate(config: Mapping[str, Any], given: Mapping[str, Sequence[str]]) -> Translated:
    """Turn OpenRL's keys in a config into flags.

    Args:
        given: the flags of the command line, with the words after them.

    Raises:
        ValueError: a key asks for something that does not exist here, or contradicts another.
    """
    theirs = {name for name in config if name in _BLOCKS or (name in KEYS and KEYS[name].tokens is not None)}
    rest = {name: value for name, value in config.items() if name not in theirs}
    keys = _flatten({name: value for name, value in config.items() if name in theirs})
    context = Context(keys, rest, given)
    tokens: list[str] = []
    ignored: list[str] = []
    taken: dict[str, tuple[str, Any]] = {}
    for name, value in keys.items():
        if value is None or name not in KEYS:  # the settings of an own reward
            continue
        key = KEYS[name]
        if key.renames:
            (flag,) = key.flags
            other, before = taken.setdefault(flag, (name, value))
            if flag in rest or before != value:
                raise ValueError(f"{flag if flag in rest else other} and {name} both set --{flag}; give one of them")
        try:
            new = key.tokens(value, context) if key.tokens else None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if new is None:
            ignored.append(name)
        else:
            tokens += new
    return Translated(tokens, ignored, rest)


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks as dotted keys, `env.args.data_path`; every value is plain."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        parts: Mapping[str, Any] = {name: value}
        if name in _BLOCKS:
            if value is None:
                continue
            parts = {f"{name}.{inner}": part for inner, part in _block(name, value).items()}
            if f"{name}.args" in parts:
                args = _block(f"{name}.args", parts.pop(f"{name}.args") or {})
                parts |= {f"{name}.args.{inner}": part for inner, part in args.items()}
        flat |= parts
    own = {f"{block}.args." for block in _BLOCKS[1:] if flat.get(f"{block}.id") not in (None, *_BUILT_IN)}
    for name, value in flat.items():
        if name not in KEYS and not name.startswith(tuple(own)):
            raise ValueError(f"unknown key {name!r}{_hint(name)}")
        if isinstance(value, (list, dict, set, tuple)):
            raise ValueError(f"{name} is nested, expected a value")
    return flat


def _block(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a block of `name: value` lines, got {type(value).__name__}")
    return value


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, KEYS, n=1)
    return f"; did you mean {near[0]}?" if near else ""
