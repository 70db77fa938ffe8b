"""One trunk under actor, reference, critic and reward model."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import FabricArgs, ModelArgs, PPOArgs
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.forward import text_logits
from rlhf_stages.models.frozen import load_reference
from rlhf_stages.models.loading import load_critic, load_scalar, prepare_training, restore_model, save_model
from rlhf_stages.models.sharing import Backbone, shared_backbone
from rlhf_stages.models.start import start_actor, start_critic
from rlhf_stages.optim import make_optimizer

from helpers import KINDS, make_tokenizer, read_metrics, right_padded, run_stage, save_causal, shake_adapters

LORA = ModelArgs(finetune_mode="lora", lora_rank=2, lora_alpha=8, disable_dropout=True)
PPO = {"sft_experiment_dir": "sft", "rm_experiment_dir": "rm"}
TEXTS = right_padded([[1, 5, 6, 7, 8, 2], [1, 9, 2]], 3)


def storages(*models):
    return {parameter.untyped_storage().data_ptr() for model in models for parameter in model.parameters()}


def pair(folder, kind="gpt2", model_args=LORA, **flags):
    """Actor and critic on one trunk, both of them trained a little."""
    args = PPOArgs(**PPO, share_backbone="critic", critic_init="sft", **flags)
    start = save_causal(folder, kind)
    actor = start_actor(start, make_tokenizer(), args, model_args, longest=8)
    backbone = shared_backbone(args, model_args, FabricArgs(), actor, start)
    critic = start_critic(start, None, make_tokenizer(), args, model_args, 8, backbone)
    shake_adapters(actor)
    shake_adapters(critic, seed=1)
    torch.nn.init.normal_(head(critic).weight)
    return actor.train(), critic.train()


def head(critic):
    return critic.hf.base_model.model.score.modules_to_save["default"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_critic_adds_its_adapters_and_its_head_alone(tmp_path, kind):
    actor, critic = pair(tmp_path, kind)
    reference = load_reference(actor, tmp_path, make_tokenizer(), PPOArgs(**PPO), LORA, None)
    own = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {"lora_" in name or "score" in name for name in own} == {True}
    assert storages(critic.hf.get_base_model().base_model) & storages(actor)
    # `score` twice: peft keeps the one that it found beside the one that trains
    assert len(storages(actor, critic, reference)) == len(storages(actor)) + len(own) + 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_shared_weights_give_the_scores_of_separate_ones(tmp_path, kind):
    _, critic = pair(tmp_path, kind)
    separate = prepare_training(load_critic(tmp_path, make_tokenizer(), LORA, trained_head=False), LORA)
    separate.load_state_dict(critic.state_dict())
    assert storages(separate).isdisjoint(storages(critic))
    assert torch.equal(critic(*TEXTS), separate(*TEXTS))
    assert critic(*TEXTS).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_of_one_leaves_the_other(tmp_path, checkpointing):
    """The forward of each comes before the backward of the other, as it may on one trunk."""
    from dataclasses import replace

    actor, critic = pair(tmp_path, model_args=replace(LORA, gradient_checkpointing=checkpointing))
    fabric = Fabric(accelerator="cpu", devices=1)
    trunk = {name: p.clone() for name, p in actor.named_parameters() if not p.requires_grad}
    optimizers = [make_optimizer(model, PPOArgs(**PPO), 1e-2) for model in (actor, critic)]
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    assert held == [{id(p) for p in model.parameters() if p.requires_grad} for model in (actor, critic)]
    assert held[0].isdisjoint(held[1])
    wrapped = [fabric.setup(model, optimizer) for model, optimizer in zip((actor, critic), optimizers, strict=True)]
    before = text_logits(actor, *TEXTS).detach(), critic(*TEXTS).detach()
    losses = [text_logits(wrapped[0][0], *TEXTS).square().mean(), wrapped[1][0](*TEXTS).square().mean()]
    fabric.backward(losses[1])
    assert all(p.grad is None for p in actor.parameters())
    assert all(p.grad is not None for p in critic.parameters() if p.requires_grad)
    wrapped[1][1].step()
    assert torch.equal(text_logits(actor, *TEXTS), before[0])
    changed = critic(*TEXTS).detach()
    assert not torch.equal(changed, before[1])
    fabric.backward(losses[0])
    wrapped[0][1].step()
    assert not torch.equal(text_logits(actor, *TEXTS), before[0])
    assert torch.equal(critic(*TEXTS), changed)
    assert all(torch.equal(actor.get_parameter(name), weight) for name, weight in trunk.items())


@torch.no_grad()
def test_each_is_saved_and_restored_on_its_own(tmp_path):
    actor, critic = pair(tmp_path / "sft")
    save_model(actor, make_tokenizer(), tmp_path / "saved")
    save_model(critic, make_tokenizer(), tmp_path / "saved" / "critic")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic").eval()
    torch.testing.assert_close(loaded(TEXTS[0][:1]).logits[0, 0], critic(*TEXTS)[0, -1], rtol=0, atol=1e-4)
    again = pair(tmp_path / "sft")
    for model in again:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    restore_model(again[0], tmp_path / "saved")
    restore_model(again[1], tmp_path / "saved" / "critic")
    assert torch.equal(text_logits(again[0], *TEXTS), text_logits(actor, *TEXTS))
    assert torch.equal(again[1](*TEXTS), critic(*TEXTS))
    assert storages(again[1]) & storages(again[0])


def test_other_weights_are_not_shared(tmp_path):
    actor, _ = pair(tmp_path / "sft")
    other = load_critic(save_causal(tmp_path / "other", seed=1), make_tokenizer(), LORA, trained_head=False)
    with pytest.raises(ValueError, match=r"--share_backbone: wte\.weight is not the same in .*sft"):
        Backbone(actor, tmp_path / "sft").carry(other)


@pytest.mark.parametrize(
    ("model_args", "strategy", "message"),
    [
        (ModelArgs(), "auto", "--share_backbone needs --finetune_mode=lora"),
        (ModelArgs(finetune_mode="lora", load_in_8bit=True), "auto", "and no --load_in_8bit"),
        (LORA, "fsdp", "--share_backbone does not go with --strategy=fsdp"),
        (LORA, "deepspeed_stage_3", "--share_backbone does not go with --strategy=deepspeed_stage_3"),
        (LORA, "zero.json", "--share_backbone does not go with --strategy=zero.json"),
    ],
)
def test_what_does_not_go_with_it(tmp_path, model_args, strategy, message):
    with pytest.raises(ValueError, match=message):
        shared_backbone(PPOArgs(**PPO, share_backbone="all"), model_args, FabricArgs(strategy=strategy), None, tmp_path)
    assert shared_backbone(PPOArgs(**PPO), model_args, FabricArgs(strategy=strategy), None, tmp_path) is None


# Reward models


@pytest.fixture(scope="module")
def lora_rm(tiny_run, tmp_path_factory):
    flags = ["--max_steps=3", "--learning_rate=3e-2", "--finetune_mode=lora", "--lora_rank=3", "--lora_alpha=12"]
    sft = f"--sft_experiment_dir={tiny_run.sft}"
    return run_stage("rm", tmp_path_factory.mktemp("rm"), tiny_run.data, sft, *flags, "--lora_dropout=0.3")


@torch.no_grad()
def test_a_reward_model_of_the_same_start_is_its_adapters(tiny_run, lora_rm):
    start, checkpoint = resolve_checkpoint(tiny_run.sft), resolve_checkpoint(lora_rm)
    actor = start_actor(start, make_tokenizer(), PPOArgs(**PPO), LORA, longest=8)
    model = Backbone(actor, start).load_adapted(checkpoint, make_tokenizer(), LORA, trains=False).train()
    merged = load_scalar(checkpoint, make_tokenizer(), LORA, trained_head=True)
    base = load_scalar(start, make_tokenizer(), LORA, trained_head=False)
    base.hf.score.weight.copy_(merged.hf.score.weight)
    torch.testing.assert_close(model(*TEXTS), merged(*TEXTS), rtol=0, atol=1e-4)
    assert (model(*TEXTS) - base(*TEXTS)).abs().max() > 0.01
    assert not any(parameter.requires_grad for parameter in model.parameters())
    critic = Backbone(actor, start).load_adapted(checkpoint, make_tokenizer(), LORA, trains=True).train()
    assert torch.equal(critic(*TEXTS), model(*TEXTS))  # its dropout is off
    assert {"score" in n for n, p in critic.named_parameters() if p.requires_grad and "lora_" not in n} == {True}
    assert sum("lora_" in n for n, p in critic.named_parameters() if p.requires_grad) == 4  # 2 layers, A and B


def test_a_reward_model_of_another_kind_or_start_is_refused(tiny_run, lora_rm, tmp_path):
    start, actor = resolve_checkpoint(tiny_run.sft), SimpleNamespace()
    for checkpoint, policy_start in (
        (resolve_checkpoint(tiny_run.rm), start),  # all its weights trained
        (resolve_checkpoint(lora_rm), save_causal(tmp_path / "other")),
    ):
        with pytest.raises(ValueError, match=f"{checkpoint} was not trained with --finetune_mode=lora from"):
            Backbone(actor, policy_start).load_adapted(checkpoint, make_tokenizer(), LORA, trains=False)


def test_a_run_with_one_trunk(tiny_run, lora_rm, tmp_path):
    flags = [
        f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={lora_rm}", "--standardize_rewards",
        "--finetune_mode=lora", "--lora_rank=2", "--rollout_size=8", "--rollout_mini_batch_size=8", "--max_steps=2",
        "--mini_batch_size=8", "--max_new_tokens=4", "--log_interval=1",
        "--actor_learning_rate=1e-2", "--critic_learning_rate=1e-2",
    ]  # fmt: skip
    runs = [
        run_stage("ppo", tmp_path / kind, tiny_run.data, *flags, f"--share_backbone={kind}")
        for kind in ("none", "critic", "all")
    ]
    first = [read_metrics(run) for run in runs]
    for name in ("val/reward_rm", "val/reward_mean", "reward/rm_std"):  # the same reward model, merged and not
        step = min(first[1][name])
        assert first[2][name][step] == pytest.approx(first[1][name][step], abs=1e-4), name
    assert first[2]["train/critic_loss"][1] == pytest.approx(first[1]["train/critic_loss"][1], rel=1e-3)
    assert all(run["info/critic_grad_norm"][2] > 0 for run in first)
    for run in runs:
        checkpoint = resolve_checkpoint(run)
        assert (checkpoint / "adapter").is_dir()
        assert (checkpoint / "critic" / "adapter").is_dir()
        AutoModelForSequenceClassification.from_pretrained(checkpoint / "critic")
    assert json.loads((runs[2] / "args.json").read_text())["train_args"]["share_backbone"] == "all"
