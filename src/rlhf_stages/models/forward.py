"""Calling models.

Legend: B sequences, T tokens, R response tokens, V vocabulary.
"""

from typing import Any

from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn


def unwrap(model: nn.Module) -> Any:
    """The module that was given to `fabric.setup`."""
    return model.module if is_wrapped(model) else model


def without_adapters(model: Any) -> Any:
    """The Hugging Face model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_context(model: Any, tokens: int) -> None:
    """Refuse texts that are longer than the model has positions for.

    Raises:
        ValueError: they are.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"prompts and responses take up to {tokens} tokens, and the model has positions for {positions}; lower"
            " --max_new_tokens, or prepare the data with a smaller --max_prompt_length"
        )


def text_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits at every token of right-padded texts, (B, T) -> (B, T, V)."""
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    return logits


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
