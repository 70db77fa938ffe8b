"""The tables of docs/scaling.md, against arithmetic by hand and models that transformers builds."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from helpers import ROOT, load_script

scaling = load_script("benchmarks/scaling.py")
LLAMA = scaling.GEOMETRIES["llama-7b"]


@pytest.mark.parametrize("name", ["memory", "speed"])
def test_the_document_shows_what_the_script_prints(name):
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", page, re.DOTALL)
    assert found[1] == getattr(scaling, f"{name}_table")()


def test_states_by_hand():
    # 6.738 billion parameters x 16 bytes; over 8 GPUs a part each of what the engine divides
    p = 6_738_415_616
    assert scaling.trained(LLAMA, "ddp", 8) == 107_814_649_856 == 16 * p
    assert scaling.trained(LLAMA, "fsdp", 8) == scaling.trained(LLAMA, "deepspeed_stage_3", 8) == 2 * p
    assert scaling.trained(LLAMA, "deepspeed_stage_2", 8) == 4 * p + 2 * p
    assert scaling.trained(LLAMA, "deepspeed_stage_2_offload", 8) == 4.5 * p
    assert scaling.frozen(LLAMA, "fsdp", 8) == 0.5 * p
    assert scaling.frozen(LLAMA, "deepspeed_stage_3", 8) == 4 * p


def test_what_comes_to_the_states_by_hand():
    # keys and values: 2 x 2 bytes x 32 layers x 4096 per token; 1,000 tokens are half a gigabyte
    assert scaling.cache(LLAMA, 2, 500) == 524_288_000
    # 4 bytes x 32 layers + 34 = 162 bytes x 4096 x 10 tokens
    assert scaling.activations(LLAMA, 10) == 6_635_520
    assert scaling.logits(LLAMA, 10) == 3_200_000
    # layers in bf16, embeddings in fp32
    assert scaling.whole(LLAMA, "fsdp") == 2 * (6_738_415_616 - 262_144_000) + 4 * 262_144_000
    assert scaling.whole(LLAMA, "ddp") == 0


def test_efficiency_by_hand():
    # 6 x 16,384 operations per parameter at 395.6 TFLOPS are 0.2485 ns; 8 bytes x 1/2 at 450 GB/s 0.00889 ns
    assert scaling.efficiency(LLAMA, 16_384, 2, 450e9) == pytest.approx(0.2485 / (0.2485 + 0.00889), rel=1e-3)
    assert scaling.efficiency(LLAMA, 16_384, 1, 450e9) == 1


@pytest.mark.parametrize("name", scaling.GEOMETRIES)
def test_geometries_are_those_of_the_models(name):
    g = scaling.GEOMETRIES[name]
    heads = {"opt-350m": 16, "opt-1.3b": 32, "llama-7b": 32, "llama-13b": 40, "llama-70b": 64}[name]
    common = {"vocab_size": g.vocab, "hidden_size": g.hidden, "num_hidden_layers": 1, "num_attention_heads": heads}
    if name.startswith("opt"):
        narrow = {"word_embed_proj_dim": 512, "do_layer_norm_before": False} if name == "opt-350m" else {}
        narrow = narrow or {"word_embed_proj_dim": g.hidden}
        config = OPTConfig(**common, ffn_dim=4 * g.hidden, **narrow)
    else:
        width = {"llama-7b": 11_008, "llama-13b": 13_824, "llama-70b": 28_672}[name]
        config = LlamaConfig(**common, intermediate_size=width, num_key_value_heads=heads * g.kv // g.hidden)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = {id(m.weight): m.weight.numel() for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    assert sum(embeddings.values()) == g.embeddings
    (layer,) = [m for m in model.modules() if type(m).__name__ in ("OPTDecoderLayer", "LlamaDecoderLayer")]
    of_layer = sum(p.numel() for p in layer.parameters())
    every = sum(p.numel() for p in model.parameters())
    assert every + (g.layers - 1) * of_layer == g.params
