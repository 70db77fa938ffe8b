"""Records as other projects write them: a list with one dictionary of numbers and 1-D integer tensors per record."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_stages.data.metadata import pack


class Parsed(NamedTuple):
    """A record: ids of the prompt and of each response, ratings (none: not rated), targets (T,) if any, metadata."""

    prompt: list[int]
    responses: list[list[int]]
    ratings: list[float]
    targets: Tensor | None
    metadata: dict[str, Any]


def parse_dictionaries(rows: list[Any], path: Path) -> Iterator[Parsed]:
    """The records of a list of dictionaries.

    Raises:
        ValueError: one of them is not such a dictionary, or its lengths do not fit each other.
    """
    for number, row in enumerate(rows):
        try:
            prompt_len = int(row["prompt_len"])
            names = ["chosen_input_ids", "rejected_input_ids"] if "chosen_input_ids" in row else ["input_ids"]
            sequences = [_flat_integers(row[name]) for name in names]
            target = _flat_integers(row["targets"]).long() if "targets" in row else None
            ratings = [float(row["margin"]), 0.0] if "margin" in row and len(sequences) == 2 else []
            metadata = row.get("metadata", {})
            pack(metadata)  # or it raises
        except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"{path}: record {number} is not a dictionary with prompt_len and input_ids, or prompt_len,"
                f" chosen_input_ids and rejected_input_ids ({type(error).__name__}: {error})"
            ) from None
        shortest = min(len(sequence) for sequence in sequences)
        if not 0 <= prompt_len <= shortest:
            raise ValueError(f"{path}: record {number} has prompt_len {prompt_len}, expected 0 to {shortest}")
        if target is not None and len(target) != len(sequences[0]):
            raise ValueError(f"{path}: record {number} has {len(target)} targets for {len(sequences[0])} ids")
        # texts tokenized as a whole may part within the prompt (a merge across its end): what both share is the prompt
        parted = (sequences[0][:prompt_len] != sequences[-1][:prompt_len]).nonzero()
        prompt_len = int(parted[0]) if len(parted) else prompt_len
        responses = [sequence[prompt_len:].tolist() for sequence in sequences]
        yield Parsed(sequences[0][:prompt_len].tolist(), responses, ratings, target, metadata)


def is_whole(tensor: Tensor) -> bool:
    """Whether each element is there: one that a stride of 0 repeats can look like terabytes."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()


def _flat_integers(values: Any) -> Tensor:
    """The ids of a record as (T,) int32."""
    given = torch.as_tensor(values)
    if not is_whole(given):
        raise ValueError("its tensors are views, sparse or without content")
    ids = given.int()
    if given.dim() != 1 or not bool((ids == given).all()):
        raise ValueError(f"expected a flat tensor of 32-bit integers, got {given.dtype} of shape {tuple(given.shape)}")
    return ids
