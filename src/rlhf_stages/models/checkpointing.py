"""Gradient checkpointing: less memory for the backward pass, for one more forward."""

from typing import Any


def checkpoint_layers(hf: Any, dropout: bool = True) -> None:
    """Keep of each layer only its input for the backward pass, which computes the rest a second time.

    It acts where gradients are recorded in training mode, so `generate` in evaluation mode keeps its cache. Dropout
    comes out the same the second time; without any, there is no state of it to keep.

    Raises:
        ValueError: the architecture does not offer it.
    """
    # the newer name of the same method; the older one warns where both are there
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    try:
        # not the reentrant kind: it loses the gradients of layers whose input needs none, as all of LoRA's do
        enable({"use_reentrant": False, "preserve_rng_state": dropout})
    except ValueError:
        raise ValueError(f"--gradient_checkpointing: {type(hf).__name__} does not support it") from None
