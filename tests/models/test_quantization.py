"""Quantized weights below adapters. What needs bitsandbytes runs on a CPU too, once no GPU is asked for."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import quantization_config as transformers_config

from rlhf_stages.args import ModelArgs
from rlhf_stages.models import loading, quantization
from rlhf_stages.models.forward import adapters_off, text_logits
from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training, restore_model, save_model
from rlhf_stages.state import on_host

from helpers import make_tokenizer, right_padded, save_causal, shake_adapters

TEXTS = right_padded([[1, 5, 6, 7, 8, 2], [1, 9, 2]], 3)
FOUR = ModelArgs(finetune_mode="lora", load_in_4bit=True, lora_rank=2, lora_alpha=8, disable_dropout=True)
EIGHT = ModelArgs(finetune_mode="lora", load_in_8bit=True)
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra memory")


@pytest.mark.parametrize(("args", "flag"), [(EIGHT, "--load_in_8bit"), (FOUR, "--load_in_4bit")])
@pytest.mark.parametrize(("gpu", "package"), [(False, True), (True, False)])
def test_without_a_gpu_or_the_package(tmp_path, monkeypatch, args, flag, gpu, package):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(quantization, "find_spec", lambda name: object() if package else None)
    with pytest.raises(ValueError, match=rf"^{flag} needs a CUDA device and bitsandbytes: pip install 'rlhf_stages\["):
        load_causal(save_causal(tmp_path), make_tokenizer(), args)


@pytest.fixture
def pretended(monkeypatch):
    """As if there were a GPU and bitsandbytes, while the config is made; transformers asks for the version of it."""
    monkeypatch.setattr(quantization, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transformers_config.importlib.metadata, "version", lambda name: "0.50.0")


def test_what_transformers_is_told(tmp_path, monkeypatch, pretended):
    told = []

    def from_pretrained(name, **kwargs):
        told.append(kwargs.get("quantization_config"))
        raise OSError("that is all")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    folder = save_causal(tmp_path)
    for args in (FOUR, EIGHT, ModelArgs()):
        with pytest.raises(ValueError, match="that is all"):
            load_causal(folder, make_tokenizer(), args)
    four, eight, nothing = told
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert (four.bnb_4bit_compute_dtype, four.load_in_8bit) == (torch.bfloat16, False)
    assert (eight.load_in_8bit, eight.load_in_4bit) == (True, False)
    assert set(four.llm_int8_skip_modules) == set(eight.llm_int8_skip_modules) == {"score", "classifier", "lm_head"}
    assert nothing is None


@pytest.fixture
def on_cpu(monkeypatch):
    """bitsandbytes without a GPU: the config of the flag alone."""
    from transformers import BitsAndBytesConfig

    def config(args):
        if not args.load_in_4bit:
            return {}
        kept = ["score", "classifier", "lm_head"]
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": kept}
        return {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **settings
            )
        }

    monkeypatch.setattr(loading, "quantization", config)


def close(found, expected, tolerance=0.03):
    """Up to the rounding of bf16, in which the quantized layers compute."""
    return (found - expected).norm() / expected.norm() < tolerance


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_a_policy_in_4_bit_trains_and_is_saved_as_what_it_computes(tmp_path, on_cpu, kind):
    folder = save_causal(tmp_path / "base", kind)
    model = prepare_training(load_causal(folder, make_tokenizer(), FOUR), FOUR)
    model = shake_adapters(model)
    names = {name for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    assert names
    assert not any("lm_head" in name or "lora" in name for name in names)
    text_logits(model, *TEXTS).square().mean().backward()
    assert {"lora_" in n for n, p in model.named_parameters() if p.grad is not None} == {True}
    with torch.no_grad():
        logits = text_logits(model.eval(), *TEXTS)
        with adapters_off(model):
            base = text_logits(model, *TEXTS)
    copied = on_host(model)
    save_model(copied, make_tokenizer(), tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert not hasattr(loaded.config, "quantization_config")
    with torch.no_grad():
        assert close(text_logits(loaded.eval(), *TEXTS), logits)
        assert not close(base, logits)  # the adapters count
        exact = load_causal(folder, make_tokenizer(), ModelArgs()).eval()
        assert not close(text_logits(exact, *TEXTS), base)  # and so does what 4 bits make of the weights
        assert torch.equal(text_logits(model, *TEXTS), logits)  # saving only reads
        again = prepare_training(load_causal(folder, make_tokenizer(), FOUR), FOUR).eval()
        restore_model(again, tmp_path / "saved")
        assert torch.equal(text_logits(again, *TEXTS), logits)


@needs_bitsandbytes
@torch.no_grad()
def test_a_critic_in_4_bit_keeps_its_head(tmp_path, on_cpu):
    folder = save_causal(tmp_path / "base", "llama")
    model = load_scalar(folder, make_tokenizer(), FOUR, trained_head=False)
    model = shake_adapters(prepare_training(model, FOUR)).eval()
    model.hf.base_model.model.score.modules_to_save["default"].weight.normal_()
    scores = model(*TEXTS)
    assert scores.dtype == torch.float32
    save_model(on_host(model), make_tokenizer(), tmp_path / "saved")
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    again = load_scalar(tmp_path / "saved", make_tokenizer(), ModelArgs(), trained_head=True).eval()
    assert close(again(*TEXTS)[TEXTS[1]], scores[TEXTS[1]])
