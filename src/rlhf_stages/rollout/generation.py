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
        model: a Hugging Face causal model, in evaluation mode, not wrapped for distribution.
    """
    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.do_sample,
        num_beams=args.num_beams,
        num_return_sequences=args.num_return_sequences,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_token_id,
        # every field that bends the distribution is set: generate() fills what is unset from the model's own config
        **({"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p} if args.do_sample else {}),
        min_p=None,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        repetition_penalty=1.0,
        encoder_repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        bad_words_ids=None,
        min_length=0,
        min_new_tokens=None,
        length_penalty=1.0,
        renormalize_logits=False,
        remove_invalid_values=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        forced_bos_token_id=None,
        forced_eos_token_id=None,
        use_cache=True,
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
