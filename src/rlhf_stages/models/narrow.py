"""A copy of a model in a narrower dtype, which follows the weights that learn."""

import copy
from typing import Any

import torch

from rlhf_stages.models.forward import without_adapters


def narrow_copy(model: Any, dtype: torch.dtype) -> Any:
    """The model without adapters in another dtype, to be filled by `refresh`."""
    made = copy.deepcopy(model)
    if hasattr(made, "merge_and_unload"):
        made = made.merge_and_unload()
    return made.to(dtype).requires_grad_(False)


def refresh(target: Any, source: Any) -> None:
    """Bring the copy to the weights as they are now."""
    merged = {f"{name}.weight": module for name, module in without_adapters(source).named_modules() if _adapted(module)}
    targets, sources = [], []
    plain = {name.replace(".base_layer.", "."): p for name, p in without_adapters(source).named_parameters()}
    for name, parameter in target.named_parameters():
        module = merged.get(name)
        value = plain[name].detach()
        if module is not None:
            value = value + sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
        targets.append(parameter)
        sources.append(value)
    torch._foreach_copy_(targets, sources)


def _adapted(module: Any) -> bool:
    return hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
