"""Dropout, off."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0, whatever its config calls it; the config itself keeps its values."""
    zeroed: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_dropouts(module)
        # layers of Falcon and others read the rate from the config in each forward: theirs becomes a copy
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and not isinstance(module, PreTrainedModel):
            if id(config) not in zeroed:
                zeroed[id(config)] = copy.deepcopy(config)
                _zero_dropouts(zeroed[id(config)])
            module.config = zeroed[id(config)]


def _zero_dropouts(owner: Any) -> None:
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)
