"""What a rollout says, as text: for rewards, metrics and people.

Legend: B sequences, R response tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.collate import PromptBatch


@dataclass(frozen=True)
class Samples:
    """B prompts with their responses, special tokens left out.

    Attributes:
        references: the response that the data have to each prompt, None where they have none.
        metadata: what the data say about each record.
        pieces: the tokens of each response as the model chose them, a stop token included.
    """

    prompts: Sequence[str] = ()
    responses: Sequence[str] = ()
    references: Sequence[str | None] = ()
    metadata: Sequence[Mapping[str, Any]] = ()
    pieces: Sequence["_Pieces"] = ()

    names = ("prompts", "responses", "references", "metadata", "tokens")

    @cached_property
    def tokens(self) -> list[list[str]]:
        """The text of each token of each response; a part of a character is a replacement character."""
        return [piece.texts() for piece in self.pieces]

    def __len__(self) -> int:
        return len(self.responses)

    def __add__(self, other: "Samples") -> "Samples":
        fields = [f.name for f in dataclasses.fields(self)]
        return Samples(**{name: [*getattr(self, name), *getattr(other, name)] for name in fields})

    def row(self, index: int) -> "Samples":
        """One of them."""
        return Samples(**{f.name: [getattr(self, f.name)[index]] for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class _Pieces:
    ids: list[int]
    tokenizer: PreTrainedTokenizerBase

    def texts(self) -> list[str]:
        return [str(self.tokenizer.decode([i], clean_up_tokenization_spaces=False)) for i in self.ids]


def text_of(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, mask: torch.Tensor) -> str:
    """The text of one row of ids, special tokens left out."""
    return _decode(tokenizer, ids[mask].tolist())


def samples_of(
    tokenizer: PreTrainedTokenizerBase, prompts: PromptBatch, response_ids: torch.Tensor, response_mask: torch.Tensor
) -> Samples:
    """The texts of a batch of prompts and their responses, (B, R); references and metadata come from the records."""
    rows = [ids[kept].tolist() for ids, kept in zip(response_ids.cpu(), response_mask.cpu(), strict=True)]
    pairs = zip(prompts.input_ids.cpu(), prompts.attention_mask.cpu(), strict=True)
    references = [
        _decode(tokenizer, record.responses[0].tolist()) if record.responses else None for record in prompts.records
    ]
    return Samples(
        prompts=[_decode(tokenizer, ids[kept].tolist()) for ids, kept in pairs],
        responses=[_decode(tokenizer, row) for row in rows],
        references=references or [None] * len(rows),
        metadata=[record.metadata for record in prompts.records] or [{}] * len(rows),
        pieces=[_Pieces(row, tokenizer) for row in rows],
    )


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
