"""`args.json` of a prepared folder: what the stages in it were made of, with which arguments."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.files import write_json

Counts = dict[str, dict[str, Any]]  # Of each split: kept, truncated, skipped by reason


def write_manifest(
    folder: Path,
    args: TextDataArgs,
    dataset: str,
    tokenizer: Mapping[str, Any],
    chat_template: str | None,
    counts: Counts,
) -> None:
    """Add a stage to `args.json`; the others, which another run may just have added, stay. Raises as below."""
    stages = earlier_stages(folder, args, dataset, tokenizer)
    stages[args.stage] = {"args": dataclasses.asdict(args), "counts": counts}
    masking = stages.get("finetune", stages[args.stage])["args"]
    manifest = {"dataset": dataset, "tokenizer": tokenizer, "chat_template": chat_template}
    manifest |= {name: masking[name] for name in ("mask_prompt", "ignore_index")} | {"stages": stages}
    write_json(folder / "args.json", manifest)


def earlier_stages(folder: Path, args: TextDataArgs, dataset: str, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The stages in the folder's `args.json`, none if there is no such file.

    Raises:
        ValueError: they were prepared so that this one could overlap with them, or not fit together with them.
    """
    path = folder / "args.json"
    if not path.exists():
        return {}
    names = ("seed", "stage_split", "test_percentage")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        stages: dict[str, Any] = manifest["stages"]
        same_ids = manifest["tokenizer"]["fingerprint"] == tokenizer["fingerprint"]
        found = {"dataset": manifest["dataset"], "tokenizer": manifest["tokenizer"]["name"]}
        found |= {name: entry["args"][name] for entry in stages.values() for name in names}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} was not written by this version ({type(error).__name__}: {error}); use another --destination_dir"
        ) from None
    wanted = {"dataset": dataset, **{name: getattr(args, name) for name in names}}
    wanted["tokenizer"] = found["tokenizer"] if same_ids else f"{tokenizer['name']} with other ids"
    wrong = [f"{name} {found[name]!r}, now {wanted[name]!r}" for name in found if found[name] != wanted[name]]
    if wrong:
        raise ValueError(
            f"{folder} was prepared with {'; '.join(wrong)}: the stages would overlap or not fit together."
            " Use the same values, or another --destination_dir"
        )
    return stages
