"""Frozen weights in 8 or 4 bit below LoRA adapters, by bitsandbytes.

QLoRA (Dettmers et al. 2023): 4-bit NormalFloat with scales that are quantized once more, computed in bf16.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_stages.args import ModelArgs

# heads and output layers keep their precision: all logits and scores come from them
_KEPT = ["score", "classifier", "lm_head"]


def quantization(args: ModelArgs) -> dict[str, Any]:
    """What `from_pretrained` is told besides: a config of bitsandbytes, or nothing.

    Raises:
        ValueError: there is no GPU, or no bitsandbytes.
    """
    flag = "--load_in_8bit" if args.load_in_8bit else "--load_in_4bit" if args.load_in_4bit else None
    if flag is None:
        return {}
    if not torch.cuda.is_available() or find_spec("bitsandbytes") is None:
        raise ValueError(f"{flag} needs a CUDA device and bitsandbytes: pip install 'rlhf_stages[memory]'")
    from transformers import BitsAndBytesConfig

    if args.load_in_8bit:
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=_KEPT)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=_KEPT,
        )
    return {"quantization_config": config}


@torch.no_grad()
def merge_quantized(model: Any) -> Any:
    """The model inside peft's wrapper with ordinary fp32 weights: what the quantized ones stand for, and the adapters.

    The given model is used up.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper
    from peft.utils.integrations import dequantize_bnb_weight

    base = model.get_base_model()
    for name, layer in list(base.named_modules()):
        is_adapted = isinstance(layer, LoraLayer)
        inner = layer.get_base_layer() if is_adapted else layer
        if name.endswith(".base_layer"):
            continue  # went with the adapters around it
        if hasattr(inner, "source_cls"):  # transformers notes there what it replaced
            weight = dequantize_bnb_weight(inner.weight, getattr(inner, "state", None)).float()
            if is_adapted:
                weight = weight + sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
            base.set_submodule(name, _ordinary(inner, weight))
        elif is_adapted:
            layer.merge()
            base.set_submodule(name, inner)
        elif isinstance(layer, ModulesToSaveWrapper):
            base.set_submodule(name, layer.modules_to_save[layer.active_adapters[0]])
    del base.config.quantization_config
    base.hf_quantizer, base.is_quantized = None, False
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False
    return base


def _ordinary(layer: Any, weight: Tensor) -> Any:
    """The layer that a quantized one took the place of; weight (out, in)."""
    if issubclass(layer.source_cls, Conv1D):  # GPT-2's linear layer, whose weight is (in, out)
        made: Any = Conv1D(*weight.shape)
        weight = weight.T.contiguous()
    else:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.float(), requires_grad=False)
    return made
