import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config

from rlhf_stages.models.attention import without_mask
from rlhf_stages.models.forward import text_logits

SIZES = {"vocab_size": 100, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**LLAMA),
        Qwen2Config(**LLAMA),
        OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
        GPT2Config(vocab_size=100, n_layer=2, n_embd=32, n_head=4),
    ],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_a_model_that_attends_to_all_makes_no_mask_and_says_the_same(config):
    model, ids = model_of(config), torch.randint(0, 100, (2, 12))
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    kinds = []
    attention = next(m for name, m in model.named_modules() if name.endswith((".self_attn", ".attn")))
    attention.register_forward_pre_hook(
        lambda m, args, kwargs: kinds.append(m.config._attn_implementation), with_kwargs=True
    )
    assert torch.equal(text_logits(model, ids, torch.ones_like(ids)), expected)
    model(input_ids=ids, use_cache=False)
    assert kinds == ["causal", "sdpa"]


@torch.no_grad()
def test_a_model_that_attends_to_a_window_keeps_its_mask():
    model, ids = model_of(MistralConfig(**LLAMA, sliding_window=4)), torch.randint(0, 100, (1, 12))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 100
    logits, others = (text_logits(model, each, torch.ones_like(each)) for each in (ids, changed))
    # two layers that see three tokens back each: what stands at 0 reaches 6 and no further
    assert not torch.equal(logits[0, 6], others[0, 6])
    assert torch.equal(logits[0, 7:], others[0, 7:])


def test_the_attention_is_the_old_one_after_an_error():
    model = model_of(LlamaConfig(**LLAMA))
    with pytest.raises(ZeroDivisionError), without_mask(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_eager_attention_and_what_is_no_model_of_transformers_are_left_alone():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), attn_implementation="eager")
    with without_mask(model):
        assert model.config._attn_implementation == "eager"
    with without_mask(torch.nn.Linear(1, 1)):
        pass
