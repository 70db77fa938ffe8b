"""Attention of texts that are padded on the right: causal, and no mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# transformers makes no masks for an attention function that it knows none for
AttentionInterface.register("causal", sdpa_attention_forward)


@contextmanager
def without_mask(model: Any) -> Iterator[None]:
    """While it lasts a model makes no attention mask where it would need none.

    To see whether one is needed transformers asks the device, for which the host waits, and while a CUDA graph is
    recorded it makes one in any case, with which attention is slower. Models that attend to a window are left alone.

    Args:
        model: of transformers, peft's wrapper of one, or one without a config, which is left alone.
    """
    config = model.config.get_text_config() if hasattr(model, "config") else None
    if config is None or config._attn_implementation != "sdpa" or _is_local(config):
        yield
        return
    config._attn_implementation = "causal"
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _is_local(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or []
    sizes = ("sliding_window", "attention_chunk_size", "window_size")
    return any(kind != "full_attention" for kind in kinds) or any(getattr(config, size, None) for size in sizes)
