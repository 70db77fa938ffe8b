"""Calling models whose forward functions take different arguments.

Legend: B sequences, T tokens, R response tokens, V vocabulary.
"""

import inspect
from typing import Any

from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn

from rlhf_stages.functional.masking import position_ids


def unwrap(model: nn.Module) -> Any:
    """The module that was given to `fabric.setup`."""
    return model.module if is_wrapped(model) else model


def without_adapters(model: Any) -> Any:
    """The Hugging Face model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def accepted_inputs(model: nn.Module, **inputs: Any) -> dict[str, Any]:
    """Those of the inputs that the model's forward takes by name (some compute their own positions)."""
    parameters = inspect.signature(without_adapters(unwrap(model)).forward).parameters
    return {name: value for name, value in inputs.items() if name in parameters}


def text_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits at every token of right-padded texts, (B, T) -> (B, T, V)."""
    logits: Tensor = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    return logits


def response_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, response_size: int) -> Tensor:
    """Logits that predict the last `response_size` tokens of each row, (B, T) -> (B, R, V).

    The prompt in front may be padded on the left. Those that predict token t stand at t - 1.
    """
    inputs = accepted_inputs(
        model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        use_cache=False,
        logits_to_keep=response_size + 1,  # no V-sized row for a prompt token, where the model can do that
    )
    logits: Tensor = model(**inputs).logits
    return logits[:, -response_size - 1 : -1]  # (B, R, V)
