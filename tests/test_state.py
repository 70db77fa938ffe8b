import random

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training, restore_model, save_model
from rlhf_stages.state import on_host, random_state, read_state, set_random_state, write_state

from helpers import make_tokenizer, save_causal, save_classifier


def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.randn())]


def test_random_numbers_go_on_where_they_were(tmp_path):
    np.random.randn()  # leaves a second number behind, which is part of the state
    write_state(random_state(), "state", tmp_path)
    expected = draws()
    draws()
    set_random_state(read_state(tmp_path, "state"))
    assert draws() == expected


def test_states_are_read_without_running_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (eval, ("1/0",))

    write_state(Evil(), "state", tmp_path)
    with pytest.raises(ValueError, match=r"state\.pt is not a readable state \(UnpicklingError"):
        read_state(tmp_path, "state")


def test_a_missing_state_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no resume/optimizer\.pt: it was saved with other arguments, or damaged"):
        read_state(tmp_path, "optimizer")


def test_a_copy_does_not_follow_the_original():
    layer = nn.Linear(2, 2)
    layer.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    optimizer = torch.optim.Adam([layer.weight])
    model, state = on_host(layer), on_host({"a": [layer.weight], "step": 3})
    kept = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, kept)
    assert torch.equal(model.weight, kept)
    assert torch.equal(state["a"][0], kept)
    assert (state["step"], model.weight.requires_grad, model.bias.requires_grad) == (3, True, False)


def test_tied_weights_stay_tied_in_the_copy(tmp_path):
    model = on_host(load_causal(save_causal(tmp_path, "llama"), make_tokenizer(), ModelArgs()))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def shaken(model, seed=0):
    """Other weights, also where they started at 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
    return model


LORA = ModelArgs(finetune_mode="lora", lora_rank=2)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "args", [ModelArgs(), LORA, ModelArgs(finetune_mode="last_layer")], ids=["all", "lora", "last"]
)
@pytest.mark.parametrize("what", ["causal", "scalar", "actor-critic"])
def test_restored_weights_are_the_saved_ones_to_the_bit(tmp_path, kind, args, what):
    tokenizer = make_tokenizer()

    def build():
        if what == "scalar":
            path = save_classifier(tmp_path / "start", kind)
            return prepare_training(load_scalar(path, tokenizer, args, trained_head=True), args)
        model = prepare_training(load_causal(save_causal(tmp_path / "start", kind), tokenizer, args), args)
        return ActorCritic(model) if what == "actor-critic" else model

    trained, fresh = shaken(build()), build()
    before = trained.state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())
    save_model(trained, tokenizer, tmp_path / "saved")
    restore_model(fresh, tmp_path / "saved")
    after = fresh.state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [p.requires_grad for p in trained.parameters()] == [p.requires_grad for p in fresh.parameters()]
