"""Actor and critic on one trunk.

Legend: B sequences, T tokens, R places, V vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_stages.models.forward import logits_at, unwrap


class ActorCritic(nn.Module):
    """A causal model with a value head beside its output layer.

    `hf` is the causal model itself (or peft's wrapper of it): it samples, and it is what is saved. The head is fp32 and
    starts at 0, so that before its first update it says nothing.
    """

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf
        self.value_head = nn.Linear(hf.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, R, V) and values (B, R) fp32 at some places of right-padded texts; one pass for both."""
        seen: list[Tensor] = []
        # called after the hook that picks the places: what it sees is (B, R, H)
        hook = self.hf.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
        try:
            logits = logits_at(self.hf, input_ids, attention_mask, places)
        finally:
            hook.remove()
        with torch.autocast(logits.device.type, enabled=False):
            values: Tensor = self.value_head(seen[0].float()).squeeze(-1)
        return logits, values


def policy_of(model: nn.Module) -> Any:
    """The causal model that samples and is saved: what `fabric.setup` was given, without a value head."""
    inner = unwrap(model)
    return inner.hf if isinstance(inner, ActorCritic) else inner
