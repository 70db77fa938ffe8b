"""Arguments of a run that differ from their defaults, with what they mean."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simple_parsing.docstring import get_attribute_docstring

from rlhf_stages import args
from rlhf_stages.reporting.folder import Run

_TRAIN = {"sft": args.SFTArgs, "rm": args.RMArgs, "ppo": args.PPOArgs, "dpo": args.DPOArgs}
_TRAIN["classifier"] = args.ClassifierArgs
# these say where a run lies and how it was called for, which stands elsewhere on the page
_PLACES = {"data_dir", "log_dir", "experiment_name", "resume", "overwrite", "sft_experiment_dir", "rm_experiment_dir"}


@dataclass(frozen=True)
class Change:
    """A flag, its value and its default, as text."""

    flag: str
    value: str
    default: str
    meaning: str


def changed_arguments(run: Run) -> list[Change]:
    """The flags whose value is not the default of this version; without those that name folders."""
    found = []
    for group, kind in _groups(run.stage).items():
        defaults = {field.name: _default(field) for field in dataclasses.fields(kind)}
        for name, value in run.group(group).items():
            if name in _PLACES or (name in defaults and _plain(value) == _plain(defaults[name])):
                continue
            known = name in defaults
            default = _text(defaults[name]) if known else "no such flag in this version"
            found.append(Change(f"--{name}", _text(value), default, _meaning(kind, name) if known else ""))
    return found


def _groups(stage: str) -> Mapping[str, type]:
    return {
        "train_args": _TRAIN.get(stage, args.TrainArgs),
        "model_args": args.ModelArgs,
        "gen_args": args.RolloutArgs if stage == "ppo" else args.GenerationArgs,
        "fabric_args": args.FabricArgs,
    }


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _meaning(kind: type, name: str) -> str:
    comment = get_attribute_docstring(kind, name)
    return " ".join((comment.comment_inline.removeprefix("noqa: RUF009") or comment.comment_above or "").split())


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
