"""Which rewards a run has, with what weights: YAML and `--reward` tokens to `RewardSpec`."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_SETTINGS = {"type", "weight", "clip", "normalize", "per_token"}


@dataclass(frozen=True)
class RewardSpec:
    """One part of the reward.

    Attributes:
        kind: a registered name, `path.py:function` or `module:function`.
        weights: (step, weight), steps rising; between two steps the weight follows a line, outside it is constant.
        clip: smallest and largest score; clipped before normalization.
        normalize: scores less their running mean, by their running deviation.
        per_token: it gives each response a list with a score for each of its tokens.
        options: what the reward itself is given.
    """

    name: str
    kind: str
    weights: tuple[tuple[int, float], ...] = ((0, 1.0),)
    clip: tuple[float, float] | None = None
    normalize: bool = False
    per_token: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, step: float) -> float:
        """The weight at a step; at infinity the last."""
        steps, weights = zip(*self.weights, strict=True)
        return float(np.interp(step, steps, weights))


def read_specs(config: str | None, tokens: Sequence[str], taken: Collection[str] = ()) -> list[RewardSpec]:
    """The parts that a YAML file names, then those of `--reward NAME[=WEIGHT][,setting=value...]`.

    Args:
        taken: names that mean something else in this run.

    Raises:
        FileNotFoundError: no such file. ValueError: it, or a token, cannot be read; two parts have one name.
    """
    specs = ([] if config is None else _from_file(Path(config))) + [_from_token(token) for token in tokens]
    names = [spec.name for spec in specs]
    for name in names:
        if name in taken:
            raise ValueError(
                f"no reward may be called {name!r}, as the parent of --{name}_experiment_dir is; give it another name,"
                " and its `type`"
            )
        if names.count(name) > 1:
            raise ValueError(f"two rewards are called {name!r}; give one of them another name, and its `type`")
    return specs


def _from_file(path: Path) -> list[RewardSpec]:
    if not path.is_file():
        raise FileNotFoundError(f"--reward_config {path}: no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # besides its own, yaml raises half a dozen types on wrong tags, dates and nesting
        raise ValueError(f"--reward_config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"--reward_config {path}: expected `name: {{weight: ..., ...}}` lines")
    return [_spec(str(name), settings, f"--reward_config {path}") for name, settings in content.items()]


def _from_token(token: str) -> RewardSpec:
    head, *rest = token.split(",")
    name, _, weight = head.partition("=")
    settings: dict[str, Any] = {"weight": _value(weight)} if weight else {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--reward {token}: expected setting=value, got {part!r}")
        settings[key.strip()] = _value(value)
    return _spec(name.strip(), settings, f"--reward {token}")


def _value(text: str) -> Any:
    """A number, true or false; anything else is text, such as a pattern: without its quotes, if it has any."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _spec(name: str, settings: Any, origin: str) -> RewardSpec:
    settings = {"weight": settings} if _is_number(_numbers(settings)) else settings or {}
    if not name or not isinstance(settings, Mapping):
        raise ValueError(f"{origin}: {name or 'a reward without a name'}: expected a weight, or settings by name")
    kind = str(settings.get("type", name))
    clip = _numbers(settings.get("clip"))
    normalize, per_token = settings.get("normalize", False), settings.get("per_token", False)
    if clip is not None:
        clip = (-clip, clip) if _is_number(clip) else clip
        if not isinstance(clip, Sequence) or len(clip) != 2 or not all(map(_is_number, clip)) or clip[0] >= clip[1]:
            raise ValueError(f"{origin}: {name}: clip is a number above 0 or [low, high], got {settings['clip']!r}")
    if not isinstance(normalize, bool) or not isinstance(per_token, bool) or (normalize and per_token):
        raise ValueError(f"{origin}: {name}: normalize and per_token are true or false, and not both true")
    return RewardSpec(
        name=name.rpartition(":")[2],  # path.py:function is called after its function
        kind=kind,
        weights=_weights(settings.get("weight", 1.0), f"{origin}: {name}"),
        clip=None if clip is None else (float(clip[0]), float(clip[1])),
        normalize=normalize,
        per_token=per_token,
        options={str(key): value for key, value in settings.items() if key not in _SETTINGS},
    )


def _weights(value: Any, origin: str) -> tuple[tuple[int, float], ...]:
    value = _numbers(value)
    points = {0: value} if _is_number(value) else value
    steps = list(points) if isinstance(points, Mapping) else []
    if steps and all(isinstance(s, int) and s >= 0 for s in steps) and all(map(_is_number, points.values())):
        return tuple((step, float(points[step])) for step in sorted(steps))
    raise ValueError(f"{origin}: weight is a number, or numbers by step such as {{0: 0.0, 100: 0.5}}, got {value!r}")


def _numbers(value: Any) -> Any:
    """The value, or all in it, with numbers that YAML takes for text, as 1e-3."""
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else value
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    return [_numbers(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
