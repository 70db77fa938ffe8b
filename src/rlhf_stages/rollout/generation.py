"""Sampling responses.

Legend: B sequences, P prompt tokens, R response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.masking import length_mask


@dataclass(frozen=True)
class Responses:
    """Sampled responses: ids (B, R) int64 right-padded, mask (B, R) bool with the stop token inside, ended (B,) bool.

    `ended` is False for a response that was cut off at the token limit before a stop token came.
    """

    ids: Tensor
    mask: Tensor
    ended: Tensor


@torch.no_grad()
def generate(
    model: Any, prompts: PromptBatch, args: GenerationArgs, *, stop_ids: Sequence[int], pad_token_id: int
) -> Responses:
    """Continue each prompt until a stop token or `max_new_tokens`; B is prompts x num_return_sequences.

    Args:
        model: a causal model as `load_causal` gives it (transformers fills what is not set here from the generation
            config of the model, which that function has cleared), in evaluation mode, not wrapped for distribution.
    """
    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.do_sample,
        num_beams=args.num_beams,
        num_return_sequences=args.num_return_sequences,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_token_id,
        **({"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p} if args.do_sample else {}),
    )
    sequences = model.generate(
        input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, generation_config=config
    )
    return cut_at_stop(sequences[:, prompts.input_ids.shape[1] :], stop_ids, pad_token_id)


def cut_at_stop(ids: Tensor, stop_ids: Sequence[int], pad_token_id: int) -> Responses:
    """Keep each response (B, R) up to and with its first stop token, and pad the rest.

    A stop token in the very last place ends the response like any other.
    """
    is_stop = torch.isin(ids, torch.tensor(list(stop_ids), device=ids.device))
    ended = is_stop.any(1)
    lengths = torch.where(ended, is_stop.long().argmax(1) + 1, ids.shape[1])
    mask = length_mask(lengths, ids.shape[1])
    return Responses(torch.where(mask, ids, pad_token_id), mask, ended)
