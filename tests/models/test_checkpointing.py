from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric

from rlhf_stages.args import ModelArgs, RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.checkpointing import checkpoint_layers
from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training
from rlhf_stages.rollout.samples import sample

from helpers import (
    ENCODERS,
    KINDS,
    left_padded,
    make_tokenizer,
    right_padded,
    save_causal,
    save_encoder,
    shake_adapters,
)

TEXTS = right_padded([[1, 5, 6, 7, 8, 2], [1, 9, 2]], 3)


def prepared(folder, kind, mode, what, *, checkpointing):
    args = ModelArgs(finetune_mode=mode, gradient_checkpointing=checkpointing)
    torch.manual_seed(0)
    save = save_encoder if kind in ENCODERS else save_causal
    save(folder, kind, dropout=0.2)
    if what == "policy":
        model = load_causal(folder, make_tokenizer(), args)
    else:
        model = load_scalar(folder, make_tokenizer(), args, trained_head=False)
    model = prepare_training(model, args)
    return (shake_adapters(model) if mode == "lora" else model).train()


def gradients(model):
    """Of a loss over every output, with dropout, and how often the first feed-forward module was called."""
    calls = []
    name = next(n for n, _ in model.named_modules() if n.endswith((".mlp", ".fc1", ".intermediate")))
    hook = model.get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    output = model(input_ids=TEXTS[0], attention_mask=TEXTS[1])
    output = getattr(output, "logits", output)
    (output.float() ** 2).sum().backward()
    hook.remove()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(calls)


@pytest.mark.parametrize("mode", ["all", "lora"])
@pytest.mark.parametrize(
    ("kind", "what"), [*((kind, "policy") for kind in KINDS), ("gpt2", "critic"), ("opt", "critic"), ("bert", "critic")]
)
def test_gradients_are_those_of_without(tmp_path, kind, what, mode):
    expected, once = gradients(prepared(tmp_path, kind, mode, what, checkpointing=False))
    found, twice = gradients(prepared(tmp_path, kind, mode, what, checkpointing=True))
    assert (once, twice) == (1, 2)  # the layers were computed a second time
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=name)
    assert any("lora_A" in name and gradient.any() for name, gradient in found.items()) == (mode == "lora")


def test_actor_and_critic_on_one_trunk(tmp_path):
    found = []
    for checkpointing in (False, True):
        model = ActorCritic(prepared(tmp_path, "gpt2", "all", "policy", checkpointing=checkpointing)).train()
        torch.nn.init.ones_(model.value_head.weight)
        torch.manual_seed(1)
        logits, values = model(*TEXTS, torch.tensor([[2, 3, 4], [0, 1, 1]]))
        (logits.square().sum() + values.sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["all", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_keeps_its_cache(tmp_path, kind, mode):
    """A model that is being trained samples with a cache: after the prompt, one token at a time."""
    prompts = PromptBatch(*left_padded([[1, 5, 6], [1, 8, 9, 10, 11]], 3))
    widths, sampled, args = [], [], RolloutArgs(max_new_tokens=4, min_new_tokens=4)
    for checkpointing in (False, True):
        model = prepared(tmp_path, kind, mode, "policy", checkpointing=checkpointing)
        model.get_input_embeddings().register_forward_hook(lambda module, ids, out: widths.append(ids[0].shape[1]))
        torch.manual_seed(1)
        sampled.append(sample(model, prompts, make_tokenizer(), args, Fabric(accelerator="cpu", devices=1)).ids)
        assert model.training
    assert widths == [5, 1, 1, 1] * 2
    assert torch.equal(*sampled)  # a layer that lost its cache would see the last token alone


def test_an_architecture_that_cannot():
    def refuse(kwargs):
        raise ValueError("no")

    with pytest.raises(ValueError, match="--gradient_checkpointing: SimpleNamespace does not support it"):
        checkpoint_layers(SimpleNamespace(activation_checkpointing_enable=refuse))
