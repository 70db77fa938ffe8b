"""Keys and values of texts that each stand at a length of their own, and the attention that reads them.

Legend: S slots, L places of the cache, P prompt tokens, D size of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = "rlhf_stages_slots"


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of transformers; for a single query, the heads of a group share their keys instead of copies of them.

    Args:
        query: (S, heads, 1, D). key, value: (S, key-value heads, L, D). attention_mask: (S, 1, 1, L), True = attend.
    """
    if query.shape[2] > 1:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output
    slots, heads, _, size = query.shape
    grouped = query.reshape(slots, key.shape[1], heads // key.shape[1], size)
    attended = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=kwargs.get("scaling"))
    return attended.reshape(slots, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, slot_attention)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values (S, heads, L, D) of a layer; a step writes each text's at its own place."""

    is_sliding = False

    def __init__(self, places: Tensor, size: int) -> None:
        super().__init__()
        self.places, self.size, self.limit = places, size, size
        self.slots = torch.arange(len(places), device=places.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all slots, in the shape and dtype of what the layer gives."""
        keys, values = (
            states.new_zeros(len(self.places), states.shape[1], self.size, states.shape[3])
            for states in (key_states, value_states)
        )
        self.keys, self.values, self.is_initialized = keys, values, True

    def fill(self, slots: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        """Write whole prompts, (n, heads, P, D), from place 0 on."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[slots, :, : states.shape[2]] = states.to(store.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the states of one token per slot, (S, heads, 1, D); returns those of all places that are looked at."""
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[self.slots, :, self.places] = states[:, :, 0]
        return self.keys[:, :, : self.limit], self.values[:, :, : self.limit]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Places, and the first of them."""
        return self.limit, 0

    def get_seq_length(self) -> int:
        """0: every slot has a length of its own, and positions are given."""
        return 0

    def get_max_length(self) -> int:
        """Places of the cache."""
        return self.size

    get_max_cache_shape = get_max_length  # its name before transformers 5.20
