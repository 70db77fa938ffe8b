"""What `args.json` of a data folder says to the stages."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.tokenizer import fingerprint
from rlhf_stages.files import read_json


@dataclass(frozen=True)
class DataInfo:
    """Facts of a prepared data folder; `raw` is the whole `args.json`."""

    path: Path
    dataset: str
    tokenizer_name: str
    fingerprint: str | None
    chat_template: str | None
    mask_prompt: bool
    ignore_index: int
    raw: dict[str, Any]

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model_name: str) -> None:
        """Refuse a tokenizer that is not the one the shards were made with.

        Raises:
            ValueError: the fingerprints differ. A folder without one (brought along, not prepared here) passes.
        """
        found = fingerprint(tokenizer)
        if self.fingerprint is not None and found != self.fingerprint:
            raise ValueError(
                f"{self.path} was prepared with the tokenizer of {self.tokenizer_name!r} ({self.fingerprint}), but"
                f" {model_name!r} has another ({found}); prepare the data again with --tokenizer_name={model_name}"
            )


def read_data_info(data_dir: str | Path) -> DataInfo:
    """Read the `args.json` that `prepare_data.py`, or whoever brought the shards, left in the data folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a JSON object, it names no tokenizer, or a value is of the wrong type.
    """
    path = Path(data_dir) / "args.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}; --data_dir must be a folder written by data_prep/<dataset>/prepare_data.py"
        )
    raw = read_json(path)
    tokenizer = raw["tokenizer"] if isinstance(raw.get("tokenizer"), dict) else {}
    name = tokenizer.get("name") or raw.get("tokenizer_name")
    if not name:
        raise ValueError(f'{path} names no tokenizer (expected {{"tokenizer": {{"name": ...}}}} or "tokenizer_name")')
    values = {"mask_prompt": True, "ignore_index": -1, "chat_template": None, "dataset": None, **raw}
    dataset = values["dataset"] or Path(data_dir).resolve().parent.name
    for key, is_right, wanted in (
        ("mask_prompt", isinstance(values["mask_prompt"], bool), "true or false"),
        ("ignore_index", _is_integer(values["ignore_index"]), "an integer of 64 bits"),
        ("chat_template", isinstance(values["chat_template"], str | None), "a text or null"),
        ("dataset", not values["dataset"] or is_folder_name(dataset), "a name of letters, digits, spaces, _.+-"),
    ):
        if not is_right:
            raise ValueError(f"{path}: {key} is {values[key]!r:.100}, expected {wanted}")
    return DataInfo(
        path=Path(data_dir),
        dataset=dataset,
        tokenizer_name=str(name),
        fingerprint=tokenizer.get("fingerprint"),
        chat_template=values["chat_template"],
        mask_prompt=values["mask_prompt"],
        ignore_index=values["ignore_index"],
        raw=raw,
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_folder_name(value: Any) -> bool:
    """Whether an experiment folder of this name lies where it should: the name may come from anybody."""
    return isinstance(value, str) and re.fullmatch(r"\w[\w .+-]{0,99}", value) is not None
