"""torch.compile, layer by layer: one layer is compiled, and all layers of a model run its kernels.

A whole model takes half a minute or more to compile, its layer some seconds, and nearly all that can be fused is in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: nn.Module) -> None:
    """Let each layer of a transformers model compile itself when it is first called."""
    # a layer is compiled anew for training and evaluation, with and without gradients, for each model of a stage, and
    # once more when a size turns out to vary; 8, the default, is less than that
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile()


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled layers as they were written: for shapes that occur once, as in decoding with a growing cache."""
    with torch.compiler.set_stance("force_eager"):
        yield
