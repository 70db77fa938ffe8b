"""Models without their weights: what saves and loads a model whose weights are cut into pieces."""

import copy
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_SKELETONS: "WeakKeyDictionary[nn.Module, nn.Module]" = WeakKeyDictionary()


def keep_skeleton(model: nn.Module) -> None:
    """Remember what a model is like before its weights are cut into pieces; its configuration stays shared with it."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    _SKELETONS[model] = copy.deepcopy(model, memo)


def with_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model as it was when its skeleton was kept, with weights by the names of its parameters."""
    skeleton = _SKELETONS[model]
    memo: dict[int, object] = {
        id(p): nn.Parameter(weights[name], p.requires_grad) for name, p in skeleton.named_parameters()
    }
    return copy.deepcopy(skeleton, memo)
