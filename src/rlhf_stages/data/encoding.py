"""Many texts to ids, as `encode_text` gives them, several times as fast where the tokenizer allows it.

A byte-level BPE such as GPT-2's, OPT's or SmolLM2's parts a text into words before it merges, and none of them reaches
over a space between two others. So a text is the sum of its stretches from one such space to the next, and what becomes
of a stretch need be found only once: of the last of 4,366 dialogues, 94 % of the stretches have been seen before.
"""

import copy
import json
import re
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

# Before a single space with a printable character of ASCII on both sides; what else is space or letter is left to the
# tokenizer, whose own idea of both may differ from Python's.
_CUT = re.compile(r"(?<=[!-~])(?= [!-~])")
_MOST_STRETCHES = 2**18  # About 60 MB


class TextEncoder:
    """Ids of texts, as int32 arrays: nothing added, and special tokens spelled out in a text stay plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = None
        if parts_at_spaces(tokenizer):
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True
        self._known: dict[str, bytes] = {}

    def __call__(self, texts: Sequence[str]) -> "list[array[int]]":
        """Ids of each text."""
        if not texts:
            return []
        if self._backend is None:
            # the options of encode_text, for many texts at once
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            rows = self._tokenizer(list(texts), **options, return_attention_mask=False)["input_ids"]
            return [array("i", row) for row in rows]
        stretches = list(map(_CUT.split, texts))
        if len(self._known) > _MOST_STRETCHES:
            self._known.clear()
        new = [stretch for stretch in set(chain.from_iterable(stretches)) if stretch not in self._known]
        for stretch, encoded in zip(new, self._backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._known[stretch] = array("i", encoded.ids).tobytes()
        return [array("i", b"".join(map(self._known.__getitem__, of_text))) for of_text in stretches]


def parts_at_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the ids of a text are those of its stretches: no rule of the tokenizer reaches over such a space.

    True for a BPE after the byte-level words of GPT-2, with or without digits on their own, and nothing before it.
    """
    if not tokenizer.is_fast:
        return False
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    words, added = content["pre_tokenizer"] or {}, content["added_tokens"]
    steps = words["pretokenizers"] if words.get("type") == "Sequence" else [words]
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        content["normalizer"] is None
        and content["model"]["type"] == "BPE"
        and not content["model"]["dropout"]
        and all(token["special"] for token in added)
        and all(step.get("type") in ("ByteLevel", "Digits") for step in steps)
        and any(step["use_regex"] for step in byte_level)
        and not any(step["add_prefix_space"] for step in byte_level)
    )
