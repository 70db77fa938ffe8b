"""Calling models.

Legend: B sequences, T tokens, R response tokens, V vocabulary.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from rlhf_stages.data.shards import Records
from rlhf_stages.functional.masking import length_mask, masked_sum, packed_mask
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.attention import without_mask
from rlhf_stages.models.compiling import eager

SHORTER = "lower --max_new_tokens, or prepare the data with a smaller --max_prompt_length"
_ENDLESS = 2**30

# GPT-2 warns where padding comes without a mask, which `text_logits` explains
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "may be padded" not in record.getMessage())


def unwrap(model: nn.Module) -> Any:
    """The module that was given to `fabric.setup`."""
    return model.module if is_wrapped(model) else model


def without_adapters(model: Any) -> Any:
    """The Hugging Face model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def context_size(model: Any) -> int:
    """Tokens of the longest text that a model has positions for; more than any text has where it sets no bound.

    Args:
        model: of transformers, or what this project or `fabric.setup` made of one.
    """
    model = unwrap(model)
    hf = without_adapters(getattr(model, "hf", model))
    for name, module in hf.named_modules():
        # RoBERTa and its kin count from the place after their padding id
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.num_embeddings - module.padding_idx - 1)
    return int(getattr(hf.config.get_text_config(), "max_position_embeddings", None) or _ENDLESS)


def check_context(model: Any, tokens: int, what: str = "prompts and responses", remedy: str = SHORTER) -> None:
    """Refuse texts that are longer than the model has positions for.

    Args:
        what: the texts are, and what makes them shorter.

    Raises:
        ValueError: they are longer.
    """
    size = context_size(model)
    if tokens > size:
        raise ValueError(f"{what} take up to {tokens} tokens, and the model has positions for {size}; {remedy}")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its LoRA adapters: what they were trained from, without a second copy of it."""
    with unwrap(model).disable_adapter():
        yield


class AdaptersOff(nn.Module):
    """A causal model with its LoRA adapters off whenever it is called: the reference of the policy that it is, too.

    Args:
        model: peft's wrapper of a causal model, or what `fabric.setup` made of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """What the causal model gives."""
        with adapters_off(self.model):
            return self.model(**inputs)

    @property
    def config(self) -> Any:
        """Of the causal model."""
        return unwrap(self.model).config

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, which the two share."""
        layer: nn.Module = unwrap(self.model).get_output_embeddings()
        return layer


def check_texts(model: Any, *shards: Records[Any] | None) -> None:
    """Refuse data with texts that are longer than the model has positions for.

    Raises:
        ValueError: there are such.
    """
    longest = max(longest for shard in shards if shard is not None for _, longest in shard.sizes)
    check_context(model, longest, "texts of the data", "prepare them with a smaller --max_length")


def text_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits at every token of right-padded texts, (B, T) -> (B, T, V); what stands at padding means nothing.

    Causal models need no mask for padding on the right: no token that counts looks at it, and positions are those of
    the text alone. Without one, attention takes its fastest kernels.
    """
    with without_mask(unwrap(model)):
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def packed_logits(model: nn.Module, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Logits at every token of rows that several texts share, each as it would be alone, (B, T) x 2 -> (B, T, V).

    Positions start at 0 with each text. The mask is spelled out, since not every model of transformers makes one from
    the positions (OPT does not). On an H200 a training step with it takes as long as with FlashAttention over texts
    of different lengths (opt-350m, rows of 1,024 tokens, torch 2.11: 127 and 130 ms; compiled 97 and 99 ms).
    """
    mask = packed_mask(position_ids)
    logits: Tensor = model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
    return logits


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Try whether a model reads two texts in one row as it reads each alone.

    Raises:
        ValueError: it does not. Some take no positions, and some no mask but their own.
    """
    device, was_training = next(model.parameters()).device, model.training
    texts = [torch.arange(length, device=device)[None] % 5 for length in (4, 6)]
    model.eval()
    try:
        with eager():
            alone = torch.cat([text_logits(model, ids, torch.ones_like(ids)) for ids in texts], dim=1)
            positions = torch.cat([torch.arange(ids.shape[1], device=device) for ids in texts])[None]
            packed = packed_logits(model, torch.cat(texts, dim=1), positions)
        agrees = torch.allclose(alone.float(), packed.float(), rtol=1e-3, atol=1e-3)
    except (TypeError, ValueError, RuntimeError):
        agrees = False
    finally:
        model.train(was_training)
    if not agrees:
        raise ValueError(
            f"--packing: {type(without_adapters(model)).__name__} reads texts in one row other than each alone; leave"
            " it out, and use --micro_batch_tokens against padding"
        )


def logits_at(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, places: Tensor) -> Tensor:
    """Logits at some places of right-padded texts, (B, T), (B, R) -> (B, R, V).

    Only these places reach the output layer: a V-sized row for every prompt token would be most of the memory.
    """

    def pick(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0].gather(1, places[..., None].expand(-1, -1, inputs[0].shape[-1])),)

    hook = unwrap(model).get_output_embeddings().register_forward_pre_hook(pick)
    try:
        return text_logits(model, input_ids, attention_mask)
    finally:
        hook.remove()


def sequence_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, starts: Tensor, ends: Tensor, size: int | None = None
) -> Tensor:
    """Log-probability of a stretch of each right-padded text given all before it, (B, T) -> (B,) fp32, in nats.

    Args:
        starts, ends: (B,) the first token that counts, and the one after the last; an empty stretch gives 0. The first
            token of a text is never predicted, so it counts nowhere.
        size: tokens of the longest stretch, or more; where it is not given the host has to ask the device.
    """
    starts = starts.clamp(min=1)
    lengths = (ends - starts).clamp(min=0)
    mask = length_mask(lengths, int(lengths.max()) if size is None else size)  # (B, R)
    places = torch.where(mask, starts[:, None] + torch.arange(mask.shape[1], device=starts.device), 1)
    # what predicts a token stands at the one before it
    logprobs = gather_logprobs(logits_at(model, input_ids, attention_mask, places - 1), input_ids.gather(1, places))
    return masked_sum(logprobs, mask, dim=1)
