import pytest
import torch
from lightning.fabric import Fabric

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.forward import AdaptersOff
from rlhf_stages.models.frozen import freeze, load_reference
from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training
from rlhf_stages.rollout.collect import score_responses
from rlhf_stages.rollout.generation import Responses

from helpers import (
    KINDS,
    left_padded,
    make_tokenizer,
    model_scorer,
    plain_sampler,
    right_padded,
    save_causal,
    save_classifier,
    shake_adapters,
)

CPU = torch.device("cpu")
LORA = ModelArgs(finetune_mode="lora", disable_dropout=True)


def adapted(folder, kind="gpt2"):
    """A policy whose adapters have learned something."""
    folder = save_causal(folder, kind, dropout=0.1)
    return shake_adapters(prepare_training(load_causal(folder, make_tokenizer(), LORA), LORA)).train()


def storages(*models):
    return {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}


def scored(actor, reference, reward_model):
    prompts = PromptBatch(*left_padded([[1, 5, 6, 7], [1, 8]], 3))
    responses = Responses(*right_padded([[9, 2], [10, 11, 12]], 3), torch.tensor([True, False]))
    readers = {"actor": actor, "reference": reference, "critic": None, "scorer": model_scorer(reward_model)}
    return score_responses(prompts, responses, **readers, sampler=plain_sampler(temperature=0.7))


def test_freeze_is_for_reading_only(tmp_path):
    model = freeze(load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()).train(), CPU)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_a_policy_with_adapters_is_the_policy_without(tmp_path, kind, shared, precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    actor = adapted(tmp_path / "sft", kind)
    actor = fabric.setup_module(ActorCritic(actor) if shared else actor)
    rm = load_scalar(save_classifier(tmp_path / "rm"), make_tokenizer(), ModelArgs(), trained_head=True)
    reference = load_reference(actor, tmp_path / "sft", make_tokenizer(), LORA, CPU)
    separate = freeze(load_causal(tmp_path / "sft", make_tokenizer(), LORA), CPU)
    trains = [parameter.requires_grad for parameter in actor.parameters()]
    with fabric.autocast():
        expected, found = scored(actor, separate, rm), scored(actor, reference, rm)
    assert torch.equal(found.ref_logprobs, expected.ref_logprobs)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert (found.logprobs - found.ref_logprobs).abs().max() > 1e-3
    assert [parameter.requires_grad for parameter in actor.parameters()] == trains
    assert storages(actor, reference) == storages(actor)
    assert len(storages(actor, separate)) == len(storages(actor)) + len(storages(separate))


def test_a_policy_of_ones_own_has_a_reference_of_its_own(tmp_path):
    policy = adapted(tmp_path)
    assert isinstance(load_reference(policy, tmp_path, make_tokenizer(), LORA, CPU), AdaptersOff)
    for args, own_class in ((LORA, "mine"), (ModelArgs(), None), (ModelArgs(finetune_mode="last_layer"), None)):
        reference = load_reference(policy, tmp_path, make_tokenizer(), args, CPU, own_class)
        assert storages(reference).isdisjoint(storages(policy))
        assert not any(parameter.requires_grad for parameter in reference.parameters())
