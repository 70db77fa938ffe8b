"""What evaluate.py found, from the file of its --output; and texts before and after."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_stages.files import read_json
from rlhf_stages.reporting.folder import Run

_FIRST, _WORST = 5, 3


@dataclass(frozen=True)
class Text:
    """A response, and what it was given, by name."""

    who: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """A prompt and responses to it; `note` says why it is shown."""

    prompt: str
    texts: list[Text]
    note: str = ""


@dataclass(frozen=True)
class Evaluation:
    """Policies by name, in order: their numbers by name, and their responses to the same prompts; and how often reward
    models are right, by split, group of pairs and name, with `n`, the pairs.
    """

    policies: dict[str, dict[str, float]]
    comparisons: list[Comparison]
    reward_accuracy: dict[str, dict[str, dict[str, float]]]
    settings: str


def read_evaluation(path: Path) -> Evaluation:
    """Read the JSON file that `evaluate.py --output` wrote.

    Raises:
        FileNotFoundError: not there. ValueError: no JSON, or not of evaluate.py.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--evaluation={path}: no such file; evaluate.py --output={path} writes it")
    content = read_json(path)
    summary = content.get("summary")
    if not isinstance(summary, Mapping) and not isinstance(content.get("reward_accuracy"), Mapping):
        raise ValueError(f"--evaluation={path} is not of evaluate.py (neither `summary` nor `reward_accuracy` in it)")
    summary = summary if isinstance(summary, Mapping) else {}
    whole = _group(content, "whole")
    policies = {
        str(name): _numbers(column) | _numbers(whole.get(name))
        for name, column in summary.items()
        if isinstance(column, Mapping)
    }
    replies = _group(content, "replies")
    args, generation = _group(content, "args"), _group(content, "generation")
    settings = ""
    if args and generation:
        settings = f"{args.get('split')} split, temperature {generation.get('temperature')}, seed {args.get('seed')}"
    return Evaluation(
        policies,
        _comparisons(replies),
        {str(split): _accuracy(groups) for split, groups in _group(content, "reward_accuracy").items()},
        settings,
    )


def _group(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = content.get(name)
    return group if isinstance(group, Mapping) else {}


def _accuracy(groups: Any) -> dict[str, dict[str, float]]:
    """How often reward models are right, by group of pairs and by name."""
    return {
        str(name): _numbers({"n": group.get("n"), **_group(group, "share")})
        for name, group in (groups.items() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    }


def _numbers(column: Any) -> dict[str, float]:
    """The numbers of a column, whether they have intervals or not."""
    found = {}
    for name, value in column.items() if isinstance(column, Mapping) else ():
        value = value.get("value") if isinstance(value, Mapping) else value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[str(name)] = float(value)
    return found


def _comparisons(replies: Mapping[str, Any]) -> list[Comparison]:
    """The first prompts, and those where the last policy did worst against the first."""
    columns = {str(name): column for name, column in replies.items() if isinstance(column, list) and column}
    rows: list[Comparison] = []
    for entries in zip(*columns.values(), strict=False):
        if not all(isinstance(entry, Mapping) and isinstance(entry.get("text"), str) for entry in entries):
            continue
        texts = [Text(name, e["text"], _scores(e)) for name, e in zip(columns, entries, strict=True)]
        rows.append(Comparison(str(entries[0].get("prompt", "")), texts))
    shown = rows[:_FIRST]
    falls = sorted((fall, i) for i, row in enumerate(rows[_FIRST:]) if (fall := _change(row)) is not None and fall < 0)
    shown += [
        Comparison(rows[_FIRST + i].prompt, rows[_FIRST + i].texts, "among the largest losses")
        for _, i in falls[:_WORST]
    ]
    return shown


def _scores(entry: Mapping[str, Any]) -> dict[str, float]:
    found = {"gold": entry.get("gold"), "reward": entry.get("reward"), "KL": entry.get("kl")}
    return _numbers(found)


def _change(row: Comparison) -> float | None:
    """What the last gained on the first, in gold where there is one, else in reward."""
    first, last = row.texts[0].numbers, row.texts[-1].numbers
    for name in ("gold", "reward"):
        if name in first and name in last:
            return last[name] - first[name]
    return None


def own_samples(run: Run, count: int = 3) -> list[Comparison]:
    """What samples.jsonl of a run holds: the example prompt at the first and the last step, and the first and the last
    rollouts with their scores."""
    found = []
    examples = [s for s in run.samples if s.get("name") == "example_sample" and _is_text(s)]
    if examples:
        texts = [examples[0], *examples[-1:]] if len(examples) > 1 else examples
        found.append(
            Comparison(
                str(texts[0]["prompt"]),
                [Text(f"step {s['step']:,}", s["response"]) for s in texts],
                "the example prompt",
            )
        )
    rollouts = [s for s in run.samples if s.get("name") == "rollout_sample" and _is_text(s)]
    early, late = rollouts[:count], rollouts[max(count, len(rollouts) - count) :]
    for note, part in (("first rollouts", early), ("last rollouts", late)):
        for sample in part:
            numbers = _numbers({"reward": sample.get("score"), "KL": sample.get("kl")})
            found.append(
                Comparison(sample["prompt"], [Text(f"step {sample['step']:,}", sample["response"], numbers)], note)
            )
    return found


def _is_text(sample: Mapping[str, Any]) -> bool:
    return isinstance(sample.get("prompt"), str) and isinstance(sample.get("response"), str)
