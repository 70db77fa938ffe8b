"""Our functions and stages beside what the peers computed on the same weights and ids, in fp32.

benchmarks/record_parity.py wrote tests/golden/parity: Hugging Face's `model(labels=)`, TRL 1.16.0's RewardTrainer and
DPOTrainer, and the PPO of TRL 1.12.0. docs/parity.md says where TRL and we differ on purpose.
"""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_stages.args import PPOArgs
from rlhf_stages.data.collate import PromptBatch, collate_finetune, collate_preference
from rlhf_stages.data.shards import atomic_save, open_shard
from rlhf_stages.functional.advantages import gae, token_rewards
from rlhf_stages.functional.dpo import dpo_loss
from rlhf_stages.functional.losses import centering_loss, last_token_reward_loss, score_at
from rlhf_stages.functional.masking import length_mask, masked_mean, moments, whiten
from rlhf_stages.functional.tokens import sft_loss
from rlhf_stages.loop import accumulate
from rlhf_stages.models.forward import sequence_logprobs, text_logits
from rlhf_stages.models.scalar import ScalarModel
from rlhf_stages.optim import make_optimizer
from rlhf_stages.rollout.collect import policy_outputs, response_values, score_responses
from rlhf_stages.rollout.experience import Experience, make_experience, policy_objective, value_objective
from rlhf_stages.rollout.generation import Sampler, cut_at_stop
from rlhf_stages.rollout.statistics import rollout_metrics

from conftest import ROOT
from helpers import model_scorer, read_metrics, run_stage, write_data

GOLDEN = ROOT / "tests" / "golden" / "parity"
EOS, PAD, IGNORE = 2, 3, -1
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
kinds = pytest.mark.parametrize("kind", ["gpt2", "llama"])


@cache
def golden(stage, kind):
    return json.loads((GOLDEN / f"{stage}-{kind}.json").read_text())


def build(kind, name):
    """A fresh copy of one of the stored models: causal, reference, reward or critic."""
    auto = AutoModelForCausalLM if name in ("causal", "reference") else AutoModelForSequenceClassification
    with safe_open(GOLDEN / f"{kind}.safetensors", framework="pt") as file:
        config = AutoConfig.for_model(**json.loads(file.metadata()["config"]))
        mine = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
        weights = {key.removeprefix(f"{name}."): file.get_tensor(key).float() for key in mine}
    model = auto.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    model.tie_weights()
    return model


def word_tokenizer():
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(4, 32)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def close(ours, theirs, **tolerance):
    torch.testing.assert_close(
        torch.as_tensor(ours, dtype=torch.float64),
        torch.as_tensor(theirs, dtype=torch.float64),
        **(tolerance or TOLERANCE),
    )


def gradient_agrees(model, theirs):
    """Norm by norm, and no parameter left out."""
    norms = {name: parameter.grad.norm() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert norms.keys() == theirs.keys()
    for name, norm in norms.items():
        # the keys' bias cannot change an attention: its gradient is rounding
        torch.testing.assert_close(
            norm, torch.tensor(theirs[name]), rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def trajectory_agrees(stage, kind, case, model, folder, *flags):
    """Run the stage's script on the recorded weights and ids: loss, gradient norm and rate of each step."""
    theirs = golden(stage, kind)[case]["trajectory"]
    tokenizer, data = word_tokenizer(), write_shards(folder / "data", golden(stage, kind)["data"])
    build(kind, model).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    epochs = len(theirs["loss"])
    run = run_stage(
        stage,
        folder,
        data,
        f"--model_name={folder / 'model'}",
        *("--learning_rate=3e-3", "--lr_warmup_steps=0", f"--epochs={epochs}", "--log_interval=1"),
        *("--mini_batch_size=4", "--micro_batch_size=1"),  # one step is all four records
        *flags,
    )
    metrics = read_metrics(run)
    for ours, name in {"train/loss": "loss", "info/grad_norm": "grad_norm", "info/lr": "lr"}.items():
        close([metrics[ours][step + 1] for step in range(epochs)], theirs[name], rtol=1e-5, atol=1e-7)


def write_shards(folder, rows):
    """The recorded ids as a data folder, in the form in which people bring their own."""
    write_data(folder, word_tokenizer())
    records = []
    for row in rows:
        texts = {key: row["prompt"] + row[key] for key in ("response", "chosen", "rejected") if key in row}
        names = {"response": "input_ids", "chosen": "chosen_input_ids", "rejected": "rejected_input_ids"}
        record = {names[key]: torch.tensor(text) for key, text in texts.items()}
        records.append({**record, "prompt_len": len(row["prompt"]), "margin": row.get("margin", 0.0)})
    name = "finetune" if "response" in rows[0] else "preference"
    for split in ("train", "validation"):
        atomic_save(records, folder / f"{name}_{split}.pt")
    return folder


def read_records(folder, name):
    shard = open_shard(folder / f"{name}_train.pt")
    return [shard[i] for i in range(len(shard))]


# --- SFT: Hugging Face's model(input_ids, attention_mask, labels)


@kinds
def test_sft_loss_and_gradient_are_those_of_transformers(kind, tmp_path):
    content, model = golden("sft", kind), build(kind, "causal")
    records = read_records(write_shards(tmp_path, content["data"]), "finetune")
    batch = collate_finetune(records, pad_token_id=PAD, ignore_index=IGNORE, use_targets=True, mask_prompt=True)
    loss, count = sft_loss(text_logits(model, batch.input_ids, batch.attention_mask), batch.targets, IGNORE)
    (loss / count).backward()
    close(loss / count, content["response"]["loss"])
    gradient_agrees(model, content["response"]["gradient"])


@kinds
def test_sft_stage_learns_as_transformers_with_adamw_does(kind, tmp_path):
    trajectory_agrees("sft", kind, "response", "causal", tmp_path, "--use_targets", "--max_new_tokens=1")


# --- Reward model: TRL's RewardTrainer


@kinds
@pytest.mark.parametrize("case", ["plain", "margin", "center", "margin_center"])
def test_reward_loss_and_gradient_are_those_of_trl(kind, case, tmp_path):
    content, model = golden("rm", kind), ScalarModel(build(kind, "reward"))
    records = read_records(write_shards(tmp_path, content["data"]), "preference")
    batch = collate_preference(records, pad_token_id=PAD, use_margin="margin" in case)
    scores, better, worse = model(batch.input_ids, batch.attention_mask), batch.better, batch.worse
    loss, count = last_token_reward_loss(
        scores[better], scores[worse], batch.starts, batch.lengths[better], batch.lengths[worse], batch.margins
    )
    if "center" in case:
        ends = score_at(scores, batch.lengths)
        loss = loss + content["center_rewards_coefficient"] * centering_loss(ends[better], ends[worse])[0]
    (loss / count).backward()
    close(loss / count, content[case]["loss"])
    gradient_agrees(model.hf, content[case]["gradient"])


@pytest.mark.parametrize(("kind", "case"), [("gpt2", "plain"), ("llama", "margin_center")])
def test_reward_stage_learns_as_trl_does(kind, case, tmp_path):
    margin = ["--use_margin"] if "margin" in case else []
    center = [f"--center_rewards_coeff={golden('rm', kind)['center_rewards_coefficient']}"] if "center" in case else []
    trajectory_agrees("rm", kind, case, "reward", tmp_path, "--loss_type=last_token", *margin, *center)


# --- DPO: TRL's DPOTrainer


@kinds
@pytest.mark.parametrize("case", ["plain", "smoothing", "reference_free"])
def test_dpo_loss_and_gradient_are_those_of_trl(kind, case, tmp_path):
    content, model = golden("dpo", kind), build(kind, "causal")
    batch = collate_preference(read_records(write_shards(tmp_path, content["data"]), "preference"), pad_token_id=PAD)
    texts = batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_ends
    logprobs = sequence_logprobs(model, *texts)
    with torch.no_grad():
        reference = sequence_logprobs(build(kind, "reference"), *texts)
    if case == "reference_free":
        reference = torch.zeros_like(reference)
    better, worse = batch.better, batch.worse
    loss, count = dpo_loss(
        *(logprobs[better], logprobs[worse], reference[better], reference[worse]),
        beta=content["beta"],
        label_smoothing=content["label_smoothing"] if case == "smoothing" else 0.0,
    )
    (loss / count).backward()
    close(loss / count, content[case]["loss"])
    gradient_agrees(model, content[case]["gradient"])


@pytest.mark.parametrize(("kind", "case"), [("gpt2", "plain"), ("llama", "smoothing"), ("gpt2", "reference_free")])
def test_dpo_stage_learns_as_trl_does(kind, case, tmp_path):
    smoothing = f"--label_smoothing={golden('dpo', kind)['label_smoothing']}"
    extra = {"plain": [], "smoothing": [smoothing], "reference_free": ["--reference_free"]}[case]
    beta = f"--beta={golden('dpo', kind)['beta']}"
    trajectory_agrees("dpo", kind, case, "causal", tmp_path, beta, "--max_new_tokens=1", *extra)


# --- PPO: trl.experimental.ppo


def rollout_of(kind, case):
    """TRL's prompts and responses, read by our four models."""
    settings, recorded = golden("ppo", kind)["settings"], golden("ppo", kind)[case]
    queries, responses = torch.tensor(recorded["queries"]), torch.tensor(recorded["responses"])
    models = SimpleNamespace(
        actor=build(kind, "causal"),
        reference=build(kind, "reference"),
        critic=ScalarModel(build(kind, "critic")),
        reward_model=ScalarModel(build(kind, "reward")),
    )
    rollout = score_responses(
        PromptBatch(queries, queries != PAD),
        cut_at_stop(responses, [EOS], PAD),
        **{name: model for name, model in vars(models).items() if name != "reward_model"},
        scorer=model_scorer(models.reward_model),
        sampler=sampler_of(settings),
    )
    return settings, recorded, models, rollout


def sampler_of(settings):
    return Sampler(settings["temperature"], min_new_tokens=1, stop_ids=(EOS,), vocab_size=32)


def ppo_args(settings):
    return PPOArgs(
        sft_experiment_dir="",
        rm_experiment_dir="",
        gae_gamma=settings["gamma"],
        gae_lambd=settings["lam"],
        missing_eos_penalty=settings["missing_eos_penalty"],
        clip_coeff=settings["cliprange"],
        value_clip_coeff=settings["cliprange_value"],
        normalize_rewards=False,
        clip_rewards=False,
    )


def bessel(mask):
    """TRL whitens with the unbiased variance, we with that of the tokens at hand."""
    count = mask.sum().double()
    return (count / (count - 1)).sqrt()


def live(recorded, extra=0):
    """Response tokens as TRL counts them, or with the one place more that it gives to the terminal reward."""
    lengths = torch.tensor(recorded["sequence_lengths"])
    return length_mask(lengths + 1 + extra, len(recorded["logprobs"][0]))


def agree_on(mask, ours, theirs):
    close(ours[mask], torch.as_tensor(theirs)[mask])


@kinds
@pytest.mark.parametrize("case", ["full", "ragged"])
def test_rollout_is_read_as_trl_reads_it(kind, case):
    settings, recorded, _, rollout = rollout_of(kind, case)
    mask = rollout.response_mask
    assert mask.equal(live(recorded))
    assert mask.all() == (case == "full")
    for name in ("logprobs", "ref_logprobs", "values"):
        agree_on(mask, getattr(rollout, name), recorded[name])
    penalty = torch.where(rollout.ended, 0, settings["missing_eos_penalty"])
    close(rollout.scores - penalty, recorded["scores"])
    close(rollout_metrics(rollout, "train")["train/kl_sequence"], recorded["metrics"]["kl_sequence"])


@kinds
def test_rewards_and_advantages_of_full_responses_are_those_of_trl(kind):
    settings, recorded, _, rollout = rollout_of(kind, "full")
    experience = make_experience(rollout, ppo_args(settings), kl_coeff=settings["kl_coef"])
    close(experience.rewards, recorded["rewards"])
    close(experience.returns, recorded["returns"])
    close(experience.returns - rollout.values, recorded["raw_advantages"])
    close(experience.advantages, torch.tensor(recorded["advantages"]) * bessel(rollout.response_mask))


@kinds
def test_padded_responses_differ_from_trl_only_in_where_the_score_goes(kind):
    """TRL pays the score one place behind the last token where there is one; before it all rewards are the same."""
    settings, recorded, _, rollout = rollout_of(kind, "ragged")
    mask, wider = live(recorded), live(recorded, extra=1)
    rewards, kl = torch.tensor(recorded["rewards"]), torch.tensor(recorded["kl"])
    ours = make_experience(rollout, ppo_args(settings), kl_coeff=settings["kl_coef"])
    scores = torch.tensor(recorded["scores"])
    close(token_rewards(scores, kl, wider, settings["kl_coef"]), torch.where(wider, rewards, 0))
    close(ours.rewards.sum(1), rewards.sum(1))
    # on TRL's own rewards and values, GAE is GAE
    advantages, returns = gae(rewards, torch.tensor(recorded["values"]), wider, settings["gamma"], settings["lam"])
    agree_on(wider, advantages, recorded["raw_advantages"])
    agree_on(wider, returns, recorded["returns"])
    whitened = whiten(advantages, mask, moments(advantages, mask), shift_mean=True)
    agree_on(mask, whitened, torch.tensor(recorded["advantages"]) * bessel(mask))


@kinds
def test_whitening_is_that_of_trl_but_for_the_variance(kind):
    recorded, whitening = golden("ppo", kind)["ragged"], golden("ppo", kind)["whitening"]
    values, mask = torch.tensor(recorded["raw_advantages"]), live(recorded)
    mean = masked_mean(values, mask)
    for name, shift_mean in (("shifted", True), ("kept_mean", False)):
        kept = 0 if shift_mean else mean
        ours = whiten(values, mask, moments(values, mask), shift_mean=shift_mean)
        agree_on(mask, ours - kept, (torch.tensor(whitening[name]) - kept) * bessel(mask))


@kinds
@pytest.mark.parametrize("case", ["full", "ragged"])
def test_two_updates_are_those_of_trl(kind, case):
    """Losses and gradients on TRL's advantages and returns: at a ratio of 1, and after a step of AdamW, clipped."""
    settings, recorded, models, rollout = rollout_of(kind, case)
    args, fabric = ppo_args(settings), Fabric(accelerator="cpu", devices=1)
    actor, critic = (
        fabric.setup(model, make_optimizer(model, args, golden("ppo", kind)["optimizer"]["lr"]))
        for model in (models.actor, models.critic)
    )
    rewards, advantages, returns = (torch.tensor(recorded[name]) for name in ("rewards", "advantages", "returns"))
    old = {name: torch.tensor(recorded[name]) for name in ("logprobs", "values")}
    mask, value_mask = live(recorded), live(recorded, extra=1)
    policy_batch = Experience(replace(rollout, **old), rewards, advantages, returns)
    value_batch = Experience(replace(rollout, **old, response_mask=value_mask), rewards, advantages, returns)
    entropies, ratios, clipped = [], [], []

    def policy_loss_sum(batch):
        ids, sampler = rollout.response_ids, sampler_of(settings)
        logprobs, entropy, _ = policy_outputs(actor[0], rollout.texts, ids, sampler, entropies=True)
        loss, statistics = policy_objective(batch, logprobs, entropy, args)
        entropies.append(masked_mean(entropy.detach(), mask))
        ratios.append(statistics["ratio_mean"])
        clipped.append(statistics["clip_fraction"])
        return loss

    def value_loss_sum(batch):
        return value_objective(batch, response_values(critic[0], rollout.texts), args)

    def count(batch):
        return batch.rollout.response_mask.sum()

    for theirs in recorded["updates"]:
        loss, _, _ = accumulate(fabric, actor[0], [policy_batch], policy_loss_sum, count)
        close(loss, theirs["policy_loss"])
        loss, _, _ = accumulate(fabric, critic[0], [value_batch], value_loss_sum, count, weight=settings["vf_coef"])
        close(loss, theirs["value_loss"])
        gradient_agrees(models.actor, theirs["actor_gradient"])
        gradient_agrees(models.critic.hf, theirs["critic_gradient"])
        for model, optimizer in (actor, critic):
            fabric.clip_gradients(model, optimizer, max_norm=1e9)  # TRL's does not clip
            optimizer.step()
            optimizer.zero_grad()
    assert clipped[0] == 0
    assert clipped[1] > 0.2  # so the clip was put to the test
    if case == "full":  # TRL averages the padding in
        close(torch.stack(entropies).mean(), recorded["metrics"]["entropy"])
        close(torch.stack(ratios).mean(), recorded["metrics"]["ratio"])
