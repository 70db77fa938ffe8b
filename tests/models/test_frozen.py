from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric

from rlhf_stages.args import DPOArgs, FrozenArgs, ModelArgs, PPOArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.models import frozen
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

PPO = PPOArgs(sft_experiment_dir="sft", rm_experiment_dir="rm")
CPU = torch.device("cpu")
LORA = ModelArgs(finetune_mode="lora", disable_dropout=True)


def to_cpu(model):
    return freeze(model, CPU)


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
    reference = load_reference(actor, tmp_path / "sft", make_tokenizer(), PPO, LORA, to_cpu)
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
    assert isinstance(load_reference(policy, tmp_path, make_tokenizer(), PPO, LORA, to_cpu), AdaptersOff)
    mine = replace(PPO, actor_class="mine")
    for args, model_args in ((mine, LORA), (PPO, ModelArgs()), (PPO, ModelArgs(finetune_mode="last_layer"))):
        reference = load_reference(policy, tmp_path, make_tokenizer(), args, model_args, to_cpu)
        assert storages(reference).isdisjoint(storages(policy))
        assert not any(parameter.requires_grad for parameter in reference.parameters())


# Where the weights are, and how large


OFFLOADED = FrozenArgs(offload_frozen=True)
HALVED = FrozenArgs(frozen_dtype="bf16")


def loaded(folder, kind):
    """A reference, or a reward model of one of the kinds that have another head."""
    if kind == "causal":
        return load_causal(save_causal(folder, "llama"), make_tokenizer(), LORA)
    return load_scalar(save_classifier(folder, kind), make_tokenizer(), LORA, trained_head=True)


TEXTS = dict(zip(("input_ids", "attention_mask"), right_padded([[1, 5, 6, 7, 2], [1, 9, 2]], 3), strict=True))


def read(model):
    output = model(**TEXTS)
    return getattr(output, "logits", output)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["causal", "gpt2", "bert"])
@torch.no_grad()
def test_offloaded_weights_come_before_they_are_used_and_go_afterwards(tmp_path, monkeypatch, kind, fails):
    """With a device that is another place in the same memory, and a record of who was where."""
    model = freeze(loaded(tmp_path, kind), CPU, OFFLOADED)
    home = storages(model)
    events = []

    def move(host, device):
        events.append("in")
        assert host.untyped_storage().data_ptr() in home
        return host.clone()

    def use(module, *_):
        events.append("use")
        assert all(p.untyped_storage().data_ptr() not in home for p in model.parameters())
        if fails and events.count("use") == 3:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(frozen, "to_device", move)
    parts = [module for module in model.modules() if [*module.parameters(recurse=False)]]
    for module in parts:
        module.register_forward_pre_hook(use)
    for calls in (1, 2):
        with pytest.raises(RuntimeError) if fails else nullcontext():
            read(model)
        assert storages(model) == home
        weights = len(list(model.parameters()))
        assert events[:weights] == ["in"] * weights  # all, before anything is computed
        assert set(events[weights:]) == {"use"}
        assert events.count("use") >= (3 if fails else len(parts)), calls
        events.clear()


@torch.no_grad()
def test_a_move_that_fails_half_way_leaves_nothing_there(tmp_path, monkeypatch):
    model = freeze(loaded(tmp_path, "gpt2"), CPU, OFFLOADED)
    home, moves = storages(model), []

    def move(host, device):
        moves.append(1)
        if len(moves) == 3:
            raise RuntimeError("out of memory")
        return host.clone()

    monkeypatch.setattr(frozen, "to_device", move)
    with pytest.raises(RuntimeError, match="out of memory"):
        read(model)
    assert storages(model) == home


@pytest.mark.parametrize("kind", ["causal", "gpt2", "bert", "roberta"])
@torch.no_grad()
def test_offloading_changes_no_bit(tmp_path, kind):
    expected = read(freeze(loaded(tmp_path, kind), CPU))
    model = freeze(loaded(tmp_path, kind), CPU, OFFLOADED)
    assert torch.equal(read(model), expected)
    assert torch.equal(read(model), expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["causal", "gpt2", "opt", "bert", "roberta"])
@torch.no_grad()
def test_bf16_weights_with_an_fp32_head(tmp_path, kind, precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = freeze(loaded(tmp_path, kind), CPU, HALVED)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    heads = {"causal": set(), "bert": {"classifier"}, "roberta": {"classifier"}}.get(kind, {"score"})
    assert {name.split(".")[1] for name in kept} == heads
    assert {p.dtype for n, p in model.named_parameters() if n not in kept} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()}.isdisjoint({torch.bfloat16})
    with fabric.autocast():
        found = read(model)
    if kind != "causal":
        assert found.dtype == torch.float32
    # weights and activations have 8 bits: the outputs, of size 1, are off in the second or third digit
    expected = read(freeze(loaded(tmp_path, kind), CPU))
    error = (found.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("args", [OFFLOADED, HALVED, FrozenArgs(offload_frozen=True, frozen_dtype="bf16")])
def test_without_frozen_weights_the_flags_are_refused(tmp_path, args):
    policy, flags = adapted(tmp_path), {"offload_frozen": args.offload_frozen, "frozen_dtype": args.frozen_dtype}
    for stage in (
        DPOArgs(**flags),
        PPOArgs(sft_experiment_dir="sft", reward=["length"], share_backbone="all", **flags),
        PPOArgs(sft_experiment_dir="sft", rm_experiment_dir="rm", share_backbone="all", **flags),
    ):
        with pytest.raises(ValueError, match=r"^--(offload_frozen|frozen_dtype).*: with LoRA the reference is the pol"):
            load_reference(policy, tmp_path, make_tokenizer(), stage, LORA, to_cpu)
    load_reference(policy, tmp_path, make_tokenizer(), replace(PPO, **flags), LORA, to_cpu)
    policy.base_model.model.is_quantized = True
    with pytest.raises(ValueError, match="does not go with --load_in_8bit"):
        freeze(policy.base_model.model, CPU, args)
