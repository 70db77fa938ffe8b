"""The stages as a user runs them, each through its script's main(), on tiny models."""

import json
import math
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_stages import loop
from rlhf_stages.args import GenerationArgs, ModelArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.data.shards import ShardWriter, open_shard
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, fingerprint, load_tokenizer
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.keeper import Keeper
from rlhf_stages.models import forward, frozen, loading, start
from rlhf_stages.models.actor_critic import policy_of
from rlhf_stages.rewards import learned
from rlhf_stages.rollout import experience as rollout_experience

from helpers import (
    load_script,
    make_tokenizer,
    read_metrics,
    run_stage,
    save_causal,
    toy_rows,
    write_data,
    write_toy_data,
)

CHECKPOINT = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
KEPT = {"manifest.json", *(f"resume/{name}.pt" for name in ("optimizer", "precision", "schedule", "state"))}
SHORT = ["--max_steps=2", "--log_interval=1"]
# rollouts of 5 and 3 prompts, updates of 6 and 2 in micro-batches of 3: nothing divides
PPO = [
    "--rollout_size=8", "--rollout_mini_batch_size=5", "--mini_batch_size=6", "--micro_batch_size=3", "--eval_iters=1",
    "--max_new_tokens=6", "--temperature=0.7",
]  # fmt: skip


def run_ppo(tiny_run, folder, *flags, sft=None, rm=None):
    parents = [f"--sft_experiment_dir={sft or tiny_run.sft}", f"--rm_experiment_dir={rm or tiny_run.rm}"]
    return run_stage("ppo", folder, tiny_run.data, *parents, *SHORT, *PPO, *flags)


def last(column):
    return column[max(column)]


def weights(folder):
    return load_file(resolve_checkpoint(folder) / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# SFT


@pytest.mark.parametrize("use_targets", [True, False])
def test_sft_checkpoint_has_the_loss_that_was_logged(tiny_run, tmp_path, use_targets):
    flags = [f"--model_name={tiny_run.model}", f"--use_targets={use_targets}", "--learning_rate=1e-2", *SHORT]
    sft = run_stage("sft", tmp_path, tiny_run.data, *flags, "--micro_batch_size=2", "--max_new_tokens=4")
    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(sft)).eval().requires_grad_(False)
    total, tokens = 0.0, 0
    shard = open_shard(tiny_run.data / "finetune_validation.pt")
    for record in (shard[i] for i in range(len(shard))):
        ids = record.sequence()
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
        for place in range(len(record.prompt) if use_targets else 1, len(ids)):
            total -= logprobs[place - 1, ids[place]].item()
            tokens += 1
    metrics = read_metrics(sft)
    assert last(metrics["val/loss"]) == pytest.approx(total / tokens, rel=1e-5)
    assert last(metrics["val/loss"]) < metrics["val/loss"][0]


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_packing_changes_the_padding_and_nothing_else(tiny_run, tmp_path, kind):
    model = save_causal(tmp_path / kind, kind)
    flags = [f"--model_name={model}", "--max_steps=2", "--epochs=2", "--learning_rate=1e-3", "--lr_warmup_steps=0"]
    flags += ["--log_interval=1", "--max_new_tokens=2", "--mini_batch_size=24"]  # a step is all texts, or all rows
    apart = run_stage("sft", tmp_path / "apart", tiny_run.data, *flags, "--micro_batch_size=8")
    packed = run_stage("sft", tmp_path / "packed", tiny_run.data, *flags, "--micro_batch_size=4", "--packing",
                       "--packing_length=64")  # fmt: skip
    one, other = read_metrics(apart), read_metrics(packed)
    assert one.keys() == other.keys()
    for name in ("train/loss", "val/loss", "info/grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-4), name
    assert max(other["info/padding_percentage"].values()) < 15


def test_a_text_longer_than_a_row_is_an_error_before_anything_is_written(tiny_run, tmp_path):
    with pytest.raises(ValueError, match=r"--packing_length 10 is less than the longest text"):
        run_stage("sft", tmp_path, tiny_run.data, f"--model_name={tiny_run.model}", "--packing", "--packing_length=10")
    assert not list(tmp_path.iterdir())


def test_exact_files_of_a_finished_sft_run(tiny_run):
    checkpoint = CHECKPOINT | KEPT
    found = files(tiny_run.sft)
    events = {name for name in found if name.startswith("logs/events.out.tfevents")}
    assert len(events) == 1
    assert found - events == {
        "args.json", "best", "latest", "metrics.csv", "samples.jsonl", "summary.json", "timing.csv",
        *(f"checkpoints/step-000002/{name}" for name in checkpoint),
    }  # fmt: skip
    assert not list(tiny_run.sft.rglob(".*"))
    assert json.loads((tiny_run.sft / "summary.json").read_text())["steps"] == 2


def test_exact_files_of_a_finished_rm_run(tiny_run):
    checkpoint = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", *KEPT}
    found = {name for name in files(tiny_run.rm) if not name.startswith("logs/")}
    assert found == {
        "args.json", "best", "latest", "metrics.csv", "summary.json", "timing.csv",
        *(f"checkpoints/step-000002/{name}" for name in checkpoint),
    }  # fmt: skip
    content = json.loads((tiny_run.rm / "args.json").read_text())
    assert content["stage"] == "rm"
    assert content["parents"]["sft"]["path"] == str(resolve_checkpoint(tiny_run.sft))


def test_checkpoints_follow_the_interval_and_best_is_the_best_of_them(tiny_run, tmp_path):
    flags = [f"--model_name={tiny_run.model}", "--max_steps=5", "--save_interval=2", "--learning_rate=1e-2"]
    flags += ["--max_new_tokens=2", "--lr_warmup_steps=1", "--log_interval=1"]
    sft = run_stage("sft", tmp_path, tiny_run.data, *flags)
    names = sorted(path.name for path in (sft / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004", "step-000005"]
    assert (sft / "latest").read_text().strip() == "step-000005"
    metrics = read_metrics(sft)
    # half the peak while it warms up, the peak, then a cosine over 0, 60, 120 and 180 degrees down to 1e-6
    rates = {1: 5e-3, 2: 1e-2, 3: 1e-6 + 9999e-6 * 0.75, 4: 1e-6 + 9999e-6 * 0.25, 5: 1e-6}
    assert metrics["info/lr"] == pytest.approx(rates)
    losses = metrics["val/loss"]
    best = min((2, 4, 5), key=lambda step: losses[step])
    assert (sft / "best").read_text().strip() == f"step-{best:06d}"


def test_a_run_that_only_gets_worse_still_has_a_best_checkpoint(tiny_run, tmp_path):
    flags = [f"--model_name={tiny_run.model}", "--learning_rate=10", "--gradient_clip_val=100", *SHORT]
    sft = run_stage("sft", tmp_path, tiny_run.data, *flags, "--max_new_tokens=2")
    losses = read_metrics(sft)["val/loss"]
    assert losses[2] > losses[0]
    assert (sft / "best").read_text().strip() == "step-000002"


# Reward model


def prefix_scores(model, ids):
    """Score of every prefix of a text, from the classifier as transformers gives it."""
    return torch.stack([model(ids[None, : end + 1]).logits[0, 0] for end in range(len(ids))])


@pytest.mark.parametrize(
    "loss_type",
    ["per_sample", "last_token", *(pytest.param(name, marks=pytest.mark.slow) for name in ("per_token", "average"))],
)
def test_rm_checkpoint_has_the_loss_and_accuracy_that_were_logged(tiny_run, tmp_path, loss_type):
    flags = [f"--sft_experiment_dir={tiny_run.sft}", f"--loss_type={loss_type}", "--learning_rate=1e-2", *SHORT]
    rm = run_stage("rm", tmp_path, tiny_run.data, *flags, "--micro_batch_size=2")
    model = AutoModelForSequenceClassification.from_pretrained(resolve_checkpoint(rm)).eval().requires_grad_(False)
    shard = open_shard(tiny_run.data / "preference_validation.pt")
    losses, ends = [], []
    for record in (shard[i] for i in range(len(shard))):
        chosen, rejected = (record.sequence(i) for i in (0, 1))
        better, worse = prefix_scores(model, chosen), prefix_scores(model, rejected)
        start = next(i for i in range(len(chosen)) if chosen[i] != rejected[i])
        margins = [
            better[min(t, len(chosen) - 1)] - worse[min(t, len(rejected) - 1)]
            for t in range(start, max(len(chosen), len(rejected)))
        ]
        losses.append(
            {
                "last_token": lambda better=better, worse=worse: -F.logsigmoid(better[-1] - worse[-1]),
                "average": lambda better=better, worse=worse, start=start: (
                    -F.logsigmoid(better[start:].mean() - worse[start:].mean())
                ),
            }.get(loss_type, lambda margins=margins: -F.logsigmoid(torch.stack(margins)).mean())()
        )
        ends.append((better[-1], worse[-1]))
    metrics = {name: last(column) for name, column in read_metrics(rm).items()}
    better, worse = torch.tensor(ends).unbind(1)
    assert metrics["val/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert metrics["val/acc"] == pytest.approx((better > worse).float().mean().item())
    assert metrics["val/choosen_reward"] == pytest.approx(better.mean().item(), rel=1e-4, abs=1e-5)
    assert metrics["val/rejected_reward"] == pytest.approx(worse.mean().item(), rel=1e-4, abs=1e-5)
    assert metrics["val/reward_margin"] == pytest.approx((better - worse).mean().item(), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_rm_starts_from_a_model_too(tiny_run, tmp_path):
    rm = run_stage("rm", tmp_path, tiny_run.data, f"--model_name={tiny_run.model}", *SHORT)
    assert json.loads((rm / "args.json").read_text())["parents"] == {}


# PPO


@contextmanager
def watching():
    """What the script holds: the frozen models as they were at the start, the actor, and every experience."""
    seen = {"frozen": [], "experience": [], "updates": 0}
    load_scalar = learned.load_scalar
    freeze, end_step, make, update = loop.freeze, Keeper.end_step, rollout_experience.make_experience, loop.update

    def freezing(fabric, model, args=None):
        model = freeze(fabric, model, args)
        seen["frozen"].append((model, {name: weight.clone() for name, weight in model.state_dict().items()}))
        return model

    def loading(*args, **more):
        model = load_scalar(*args, **more)
        seen["frozen"].append((model, {name: weight.clone() for name, weight in model.state_dict().items()}))
        return model

    def ending(keeper, *args, **more):
        seen["actor"] = policy_of(keeper._models[""])
        end_step(keeper, *args, **more)

    def making(*args, **more):
        seen["experience"].append(make(*args, **more))
        return seen["experience"][-1]

    def updating(*args, **more):
        seen["updates"] += 1
        return update(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "freeze", freezing)
        patch.setattr(learned, "load_scalar", loading)
        patch.setattr(Keeper, "end_step", ending)
        patch.setattr(loop, "update", updating)
        patch.setattr(rollout_experience, "make_experience", making)
        yield seen


@pytest.fixture
def watch():
    with watching() as seen:
        yield seen


LEARNING = ["--actor_learning_rate=1e-3", "--critic_learning_rate=1e-3", "--adaptive_kl_coeff", "--kl_horizon=80"]


@pytest.fixture(scope="module")
def learning(tiny_run, tmp_path_factory):
    """A short PPO run, and what it held."""
    with watching() as seen:
        return run_ppo(tiny_run, tmp_path_factory.mktemp("learning"), *LEARNING), seen


def test_without_learning_every_ratio_is_one_and_every_loss_is_known(tiny_run, tmp_path, watch):
    """Left padding, dropout in the configs, temperature, ragged micro-batches and several epochs at once."""
    still = ["--actor_learning_rate=0", "--critic_learning_rate=0", "--ppo_epochs=3", "--normalize_advantages=False"]
    ppo = run_ppo(tiny_run, tmp_path, *still, "--vf_coeff=0")
    metrics = read_metrics(ppo)
    assert watch["updates"] == 2 * 3 * 2 * 2  # rollouts, epochs, mini-batches, models
    assert set(metrics["info/critic_grad_norm"].values()) == {0.0}  # vf_coeff scales the gradient, and not the loss
    for step, experience in enumerate(watch["experience"], start=1):
        mask = experience.rollout.response_mask
        assert metrics["info/approx_kl"][step] == pytest.approx(0, abs=1e-9)
        assert metrics["info/clip_fraction"][step] == 0
        assert metrics["train/kl_div_mean"][step] == pytest.approx(0, abs=1e-6)
        # at ratio 1 the policy loss is the mean advantage, and the value loss half the mean squared advantage
        advantages = (experience.returns - experience.rollout.values)[mask]
        assert metrics["train/actor_loss"][step] == pytest.approx(-advantages.mean().item(), rel=1e-4, abs=1e-6)
        assert metrics["train/critic_loss"][step] == pytest.approx(advantages.square().mean().item() / 2, rel=1e-4)
    for name in ("val/kl_div_mean", "val/kl_sequence"):
        assert max(map(abs, metrics[name].values())) < 1e-6
    assert set(metrics["info/kl_coeff"].values()) == {0.1}  # fixed
    assert same(weights(ppo), weights(tiny_run.sft))


def test_only_actor_and_critic_move(tiny_run, learning):
    ppo, seen = learning
    (reward_model, reward_before), (reference, reference_before) = seen["frozen"]
    assert same(reference.state_dict(), reference_before)
    assert same(reward_model.state_dict(), reward_before)
    assert not reference.training
    assert not reward_model.training
    sft, after = weights(tiny_run.sft), weights(ppo)
    assert same({name: reference_before[name] for name in sft}, sft)
    assert not any(torch.equal(sft[name], after[name]) for name in sft)
    metrics = read_metrics(ppo)
    assert max(abs(metrics[name][0]) for name in ("val/kl_div_mean", "val/kl_sequence")) < 1e-6
    assert metrics["val/kl_sequence"][2] != 0
    assert metrics["info/critic_grad_norm"][1] > 0
    assert all(math.isfinite(value) for column in metrics.values() for value in column.values())


def test_every_token_pays_for_its_kl_at_the_coefficient_of_the_step(learning):
    ppo, seen = learning
    # the KL of the first step is 0, far below its target: error clipped to -0.2, eight samples of a horizon of 80
    coefficient = 0.1 * (1 - 0.2 * 8 / 80)
    assert read_metrics(ppo)["info/kl_coeff"] == pytest.approx({1: 0.1, 2: coefficient})
    experience = seen["experience"][1]  # in the first rollout actor and reference are the same
    rollout = experience.rollout
    for row, length in enumerate(rollout.response_mask.sum(1).tolist()):
        for place in range(length - 1):
            kl = (rollout.logprobs - rollout.ref_logprobs)[row, place].item()
            assert experience.rewards[row, place].item() == pytest.approx(-coefficient * kl, rel=1e-5)
    assert (rollout.logprobs != rollout.ref_logprobs)[rollout.response_mask].all()


def test_logged_scores_are_those_of_the_saved_reward_model(tiny_run, learning):
    ppo, seen = learning
    model = AutoModelForSequenceClassification.from_pretrained(resolve_checkpoint(tiny_run.rm)).eval()
    model.requires_grad_(False)
    metrics = read_metrics(ppo)
    for step, experience in enumerate(seen["experience"], start=1):
        rollout = experience.rollout
        texts = [ids[mask] for ids, mask in zip(rollout.texts.ids, rollout.texts.mask, strict=True)]
        scores = torch.stack([model(text[None]).logits[0, 0] for text in texts])
        torch.testing.assert_close(rollout.scores, scores, rtol=0, atol=2e-5)
        assert metrics["train/reward_mean"][step] == pytest.approx(scores.mean().item(), abs=1e-5)
        assert metrics["debug/reward_scores_max"][step] == pytest.approx(scores.max().item(), abs=2e-5)


def test_scores_are_standardized_by_what_the_reward_model_brings(tiny_run, tmp_path, watch):
    plain = ["--normalize_rewards=False", "--clip_rewards=False", "--max_steps=1", "--init_kl_coeff=0"]
    ppo = run_ppo(tiny_run, tmp_path, "--standardize_rewards", *plain)
    config = json.loads((resolve_checkpoint(tiny_run.rm) / "config.json").read_text())
    (experience,) = watch["experience"]
    scores = experience.rollout.scores
    expected = (scores - config["reward_mean"]) / config["reward_std"]
    torch.testing.assert_close(experience.rewards.sum(1), expected)
    assert (expected - scores).abs().max() > 0.1
    assert read_metrics(ppo)["train/reward_mean"][1] == pytest.approx(scores.mean().item(), rel=1e-5)


def test_the_saved_policy_is_the_trained_actor(tiny_run, learning):
    ppo, seen = learning
    loaded, info = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(ppo), output_loading_info=True)
    assert not any(info.values())
    assert same(loaded.state_dict(), seen["actor"].state_dict())
    # the tokenizer went through two stages unchanged
    assert fingerprint(load_tokenizer(str(resolve_checkpoint(ppo)))) == fingerprint(make_tokenizer())
    files_of = [resolve_checkpoint(folder) / "tokenizer.json" for folder in (tiny_run.sft, ppo)]
    assert files_of[0].read_bytes() == files_of[1].read_bytes()
    found = {name for name in files(ppo) if not name.startswith("logs/") and "/resume/" not in name}
    critic = {f"checkpoints/step-000002/critic/{name}" for name in CHECKPOINT - {"generation_config.json"}}
    assert found - critic == {n for n in files(tiny_run.sft) if not n.startswith("logs/") and "/resume/" not in n}
    parts = {f"{model}_{part}" for model in ("actor", "critic") for part in ("optimizer", "schedule")}
    kept = {path.stem for path in (resolve_checkpoint(ppo) / "resume").iterdir()}
    assert kept == parts | {"health", "kl_control", "precision", "rewards", "state"}


def test_the_critic_is_saved_as_a_model_of_its_own(tiny_run, learning):
    ppo, _ = learning
    critic, info = AutoModelForSequenceClassification.from_pretrained(
        resolve_checkpoint(ppo) / "critic", output_loading_info=True
    )
    assert not any(info.values())
    assert not same(critic.state_dict(), weights(tiny_run.rm))  # where it started


def test_the_same_seed_gives_the_same_numbers_texts_and_weights(tiny_run, tmp_path, learning):
    ppo, _ = learning
    again = run_ppo(tiny_run, tmp_path, *LEARNING)
    assert read_metrics(again) == read_metrics(ppo)
    assert same(weights(again), weights(ppo))
    assert (again / "samples.jsonl").read_text() == (ppo / "samples.jsonl").read_text()


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "classifier", "ppo"])
def test_micro_batches_by_tokens_change_nothing_but_rounding_and_padding(tiny_run, tmp_path, stage):
    start = {
        "sft": [f"--model_name={tiny_run.model}", "--max_new_tokens=2"],
        "classifier": [f"--model_name={tiny_run.model}"],
        "rm": [f"--sft_experiment_dir={tiny_run.sft}"],
        "dpo": [f"--sft_experiment_dir={tiny_run.sft}", "--max_new_tokens=2"],
        "ppo": [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}", "--rollout_size=16",
                "--rollout_mini_batch_size=16", "--max_new_tokens=8", "--eval_iters=1", "--actor_learning_rate=1e-3",
                "--ppo_epochs=2"],
    }[stage]  # fmt: skip
    start += ["--mini_batch_size=8", "--log_interval=1", f"--max_steps={1 if stage == 'ppo' else 2}"]
    start += [] if stage == "ppo" else ["--disable_dropout", "--learning_rate=1e-3", "--lr_warmup_steps=0"]
    # two texts of a pair take twice as many places
    tokens = 200 if stage in ("rm", "dpo") else 100
    cuts = {"number": ["--micro_batch_size=8"], "tokens": [f"--micro_batch_tokens={tokens}"]}
    one, other = (
        read_metrics(run_stage(stage, tmp_path / name, tiny_run.data, *start, *cut)) for name, cut in cuts.items()
    )
    assert one.keys() == other.keys()
    for name in one.keys() - {"info/time", "info/tokens_per_seconds", "info/padding_percentage"}:
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    if stage != "ppo":
        for step, share in other["info/padding_percentage"].items():
            assert share < one["info/padding_percentage"][step]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "dpo"])
def test_same_seed_same_run_other_seed_other_run(tiny_run, tmp_path, stage):
    flags = {
        "sft": [f"--model_name={tiny_run.model}", "--max_new_tokens=4"],
        "rm": [f"--sft_experiment_dir={tiny_run.sft}"],
        "ppo": [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}", *PPO],
        "dpo": [f"--sft_experiment_dir={tiny_run.sft}", *DPO],
    }[stage]
    runs = [
        run_stage(stage, tmp_path / name, tiny_run.data, *flags, *SHORT, f"--seed={seed}")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, again, other = runs
    assert read_metrics(first) == read_metrics(again)
    assert same(weights(first), weights(again))
    assert read_metrics(first) != read_metrics(other)
    assert not same(weights(first), weights(other))
    if stage != "rm":
        texts = [(run / "samples.jsonl").read_text() for run in runs]
        assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_several_responses_per_prompt(tiny_run, tmp_path, watch):
    run_ppo(tiny_run, tmp_path, "--num_return_sequences=2")
    for experience in watch["experience"]:
        rollout = experience.rollout
        assert len(rollout.scores) == 16
        texts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
        assert texts[0::2] == texts[1::2]  # each prompt twice in a row
        assert any(len(set(map(tuple, pair))) == 2 for pair in rollout.response_ids.reshape(8, 2, -1).tolist())


@pytest.mark.slow
def test_an_epoch_rolls_out_every_prompt_once(tiny_run, tmp_path, watch):
    run_ppo(tiny_run, tmp_path, "--max_steps=99", "--rollout_size=10", "--rollout_mini_batch_size=4")
    sizes = [len(experience.rollout.scores) for experience in watch["experience"]]
    assert sizes == [10, 10, 4]  # 24 prompts
    shard = open_shard(tiny_run.data / "finetune_train.pt")
    expected = sorted(shard[i].prompt.tolist() for i in range(len(shard)))
    rollouts = [experience.rollout for experience in watch["experience"]]
    prompts = [row[mask].tolist() for r in rollouts for row, mask in zip(r.prompt_ids, r.prompt_mask, strict=True)]
    assert sorted(prompts) == expected


def edited(experiment, folder, edit):
    """A copy of an experiment whose model was changed."""
    shutil.copytree(experiment, folder)
    checkpoint = resolve_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    edit(model)
    model.save_pretrained(checkpoint)
    (checkpoint / "manifest.json").unlink()
    return folder


@torch.no_grad()
def says_eos_only(model):
    eos = model.transformer.wte.weight[2]
    eos *= 10 / eos.norm()
    model.transformer.ln_f.weight.zero_()
    model.transformer.ln_f.bias.copy_(10 * eos)


def test_a_policy_that_says_nothing(tiny_run, tmp_path, watch, capsys):
    """Every response is EOS alone: finite numbers, said in the metrics and in a warning, and no crash."""
    sft = edited(tiny_run.sft, tmp_path / "mute" / "sft", says_eos_only)
    ppo = run_ppo(tiny_run, tmp_path / "runs", sft=sft)
    assert all((experience.rollout.response_ids == 2).all() for experience in watch["experience"])
    metrics = read_metrics(ppo)
    assert set(metrics["train/empty_percentage"].values()) == {100.0}
    assert "warning: step 1: 100 % of the responses are empty" in capsys.readouterr().out
    assert set(metrics["train/response_length"].values()) == {1.0}
    assert all(math.isfinite(value) for column in metrics.values() for value in column.values())
    assert all(torch.isfinite(weight).all() for weight in weights(ppo).values())


@pytest.mark.slow
def test_responses_that_never_end_are_cut_off_and_can_be_penalized(tiny_run, tmp_path, watch):
    @torch.no_grad()
    def never_ends(model):
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(-10 * model.transformer.wte.weight[2])

    sft = edited(tiny_run.sft, tmp_path / "endless" / "sft", never_ends)
    ppo = run_ppo(tiny_run, tmp_path / "runs", "--missing_eos_penalty=1000", "--clip_rewards=False", sft=sft)
    assert set(read_metrics(ppo)["train/cut_off_percentage"].values()) == {100.0}
    returns = watch["experience"][0].returns
    assert returns.mean() < -500  # gamma 1: the penalty reaches every token
    assert read_metrics(ppo)["train/reward_mean"][1] > -100  # the score itself is logged as the model gave it


@pytest.mark.slow
def test_bf16_starts_without_kl(tiny_run, tmp_path):
    ppo = run_ppo(tiny_run, tmp_path, "--precision=bf16-mixed", "--actor_learning_rate=1e-3", "--ppo_epochs=2")
    metrics = read_metrics(ppo)
    assert metrics["val/kl_sequence"][0] == pytest.approx(0, abs=1e-6)
    assert {weight.dtype for weight in weights(ppo).values()} == {torch.float32}
    assert not same(weights(ppo), weights(tiny_run.sft))


@pytest.mark.slow
def test_prompts_of_their_own(tiny_run, tmp_path, watch):
    shutil.copytree(tiny_run.data, tmp_path / "toy" / "own")
    prompts = {split: [prompt for prompt, _ in toy_rows(8, seed)] for split, seed in (("train", 7), ("validation", 8))}
    data = write_data(tmp_path / "toy" / "own", make_tokenizer(), prompt=prompts)
    parents = [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}"]
    run_stage("ppo", tmp_path / "runs", data, *parents, *PPO, "--max_steps=1")
    rollout = watch["experience"][0].rollout
    tokenizer = make_tokenizer()
    seen = {tokenizer.decode(ids[mask][1:]) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)}
    assert seen == set(prompts["train"])


# DPO


DPO = [
    *SHORT,
    "--max_new_tokens=4",
    "--learning_rate=1e-2",
    "--mini_batch_size=6",
    "--micro_batch_size=3",
    "--beta=0.5",
]
LORA = ["--finetune_mode=lora", "--lora_rank=4", "--lora_alpha=16"]


def run_dpo(tiny_run, folder, *flags):
    return run_stage("dpo", folder, tiny_run.data, f"--sft_experiment_dir={tiny_run.sft}", *DPO, *flags)


@torch.no_grad()
def text_logprobs(run, shard, first=None):
    """Log-probability of both responses of every record under a run's checkpoint, text by text, (N, 2).

    The EOS of a truncated response does not count.
    """
    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(run)).eval()

    def logprob(record, response):
        ids = record.sequence(response)
        logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
        places = range(first or len(record.prompt), len(ids) - record.truncated[response])
        return sum(logprobs[t - 1, ids[t]].item() for t in places)

    return torch.tensor([[logprob(shard[i], j) for j in (0, 1)] for i in range(len(shard))], dtype=torch.float64)


@contextmanager
def counting_loads():
    """How many causal models the script loads."""
    loads, load = [], loading.load_causal

    def counted(*args):
        loads.append(args)
        return load(*args)

    with pytest.MonkeyPatch.context() as patch:
        for module in (loading, frozen, start):
            patch.setattr(module, "load_causal", counted)
        yield loads


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--use_masked_targets=False"], marks=pytest.mark.slow),
        ["--label_smoothing=0.1", "--use_masked_targets=False", "--reference_free"],
    ],
)
def test_dpo_checkpoint_has_the_loss_and_rewards_that_were_logged(tiny_run, tmp_path, flags):
    dpo = run_dpo(tiny_run, tmp_path, *flags)
    models = [AutoModelForCausalLM.from_pretrained(resolve_checkpoint(run)).eval() for run in (dpo, tiny_run.sft)]
    shard = open_shard(tiny_run.data / "preference_validation.pt")

    @torch.no_grad()
    def logprob(model, record, response):
        ids = record.sequence(response)
        logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
        first = 1 if "--use_masked_targets=False" in flags else len(record.prompt)
        return sum(logprobs[place - 1, ids[place]].item() for place in range(first, len(ids)))

    rows = [[logprob(model, shard[i], response) for model in models for response in (0, 1)] for i in range(len(shard))]
    better, worse, ref_better, ref_worse = torch.tensor(rows, dtype=torch.float64).unbind(1)
    if "--reference_free" in flags:
        ref_better = ref_worse = 0
    chosen, rejected = 0.5 * (better - ref_better), 0.5 * (worse - ref_worse)
    expected = {
        # validation is without smoothing, so that runs compare
        "val/loss": -(chosen.exp() / (chosen.exp() + rejected.exp())).log().mean(),
        "val/acc": (chosen > rejected).double().mean(),
        "val/choosen_reward": chosen.mean(),
        "val/rejected_reward": rejected.mean(),
        "val/reward_margin": (chosen - rejected).mean(),
        "val/choosen_logprobs": better.mean(),
        "val/rejected_logprobs": worse.mean(),
    }
    metrics = {name: last(column) for name, column in read_metrics(dpo).items()}
    assert {name for name in metrics if name.startswith("val/")} == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-3, abs=1e-4), name
    assert metrics["val/choosen_logprobs"] < (-20 if "--use_masked_targets=False" in flags else -5)


def test_dpo_trains_on_the_smoothed_loss(tiny_run, tmp_path):
    """The first step of a run over all 24 pairs, before any update: the SFT model itself, compared with nothing."""
    flags = ["--reference_free", "--label_smoothing=0.2", "--mini_batch_size=24", "--micro_batch_size=8"]
    metrics = read_metrics(run_dpo(tiny_run, tmp_path, *flags, "--max_steps=1"))
    better, worse = text_logprobs(tiny_run.sft, open_shard(tiny_run.data / "preference_train.pt")).unbind(1)
    right = 1 / (1 + (0.5 * (worse - better)).exp())
    expected = -(0.8 * right.log() + 0.2 * (1 - right).log()).mean()
    assert metrics["train/loss"][1] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["train/acc"][1] == pytest.approx((better > worse).double().mean().item())
    assert metrics["info/choosen_logprobs"][1] == pytest.approx(better.mean().item(), rel=1e-4)


def test_the_eos_of_a_cut_response_counts_nowhere_in_dpo(tiny_run, tmp_path):
    data, tokenizer, writer = shutil.copytree(tiny_run.data, tmp_path / "toy" / "cut"), make_tokenizer(), ShardWriter()
    for prompt, replies in toy_rows(4):
        responses = [encode_response(tokenizer, reply) for reply in replies[:2]]
        writer.add(encode_prompt(tokenizer, prompt), responses, truncated=[True, False])
    writer.save(data / "preference_validation.pt")
    sft = f"--sft_experiment_dir={tiny_run.sft}"
    metrics = read_metrics(run_stage("dpo", tmp_path / "runs", data, sft, *DPO, "--max_steps=1"))
    better, worse = text_logprobs(tiny_run.sft, open_shard(data / "preference_validation.pt")).unbind(1)
    assert metrics["val/choosen_logprobs"][0] == pytest.approx(better.mean().item(), rel=1e-4)
    assert metrics["val/rejected_logprobs"][0] == pytest.approx(worse.mean().item(), rel=1e-4)


@pytest.mark.parametrize("mode", ["all", "lora", "last_layer"])
def test_dpo_starts_at_log_2_with_every_reward_0(tiny_run, tmp_path, mode):
    """Dropout in the config, ragged texts: policy and reference are the same to the last bit."""
    flags = LORA if mode == "lora" else [f"--finetune_mode={mode}"]
    metrics = read_metrics(run_dpo(tiny_run, tmp_path, *flags, "--label_smoothing=0.1"))
    start = {name: column[0] for name, column in metrics.items() if name.startswith("val/")}
    assert start["val/loss"] == metrics["train/loss"][1] == pytest.approx(math.log(2), rel=1e-6)
    for name in ("acc", "choosen_reward", "rejected_reward", "reward_margin"):
        assert start[f"val/{name}"] == metrics[f"{'train' if name == 'acc' else 'info'}/{name}"][1] == 0  # ties
    assert metrics["val/loss"][2] < math.log(2)
    assert metrics["val/reward_margin"][2] > 0
    names = {"train/loss", "train/acc", *(f"info/{name}" for name in ("grad_norm", "lr", "padding_percentage"))}
    names |= {f"info/{kind}_{what}" for kind in ("choosen", "rejected") for what in ("reward", "logprobs")}
    assert names | {"info/reward_margin"} == {n for n in metrics if not n.startswith("val/")}


def test_only_the_policy_of_dpo_moves(tiny_run, tmp_path, watch):
    dpo = run_dpo(tiny_run, tmp_path)
    ((reference, before),) = watch["frozen"]
    assert same(reference.state_dict(), before)
    assert not reference.training
    sft, after = weights(tiny_run.sft), weights(dpo)
    assert same({name: before[name] for name in sft}, sft)
    assert not any(torch.equal(sft[name], after[name]) for name in sft)
    content = json.loads((dpo / "args.json").read_text())
    assert content["stage"] == "dpo"
    assert content["parents"]["sft"]["path"] == str(resolve_checkpoint(tiny_run.sft))
    loaded, info = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(dpo), output_loading_info=True)
    assert not any(info.values())
    assert same(loaded.state_dict(), watch["actor"].state_dict())
    assert fingerprint(load_tokenizer(str(resolve_checkpoint(dpo)))) == fingerprint(make_tokenizer())
    found = {name for name in files(dpo) if not name.startswith("logs/")}
    assert found == {name for name in files(tiny_run.sft) if not name.startswith("logs/")}


def test_dpo_with_lora_has_no_second_model(tiny_run, tmp_path, watch):
    with counting_loads() as loads:
        dpo = run_dpo(tiny_run, tmp_path, *LORA, "--max_steps=1")
    assert (len(loads), watch["frozen"]) == (1, [])
    adapter = load_file(resolve_checkpoint(dpo) / "adapter" / "adapter_model.safetensors")
    assert all(weight.any() for name, weight in adapter.items() if "lora_B" in name)
    assert sum("lora_B" in name for name in adapter) == 2
    sft, after = weights(tiny_run.sft), weights(dpo)
    assert {name for name in sft if not torch.equal(sft[name], after[name])} == {
        f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1)
    }
    # off means off: the base below the adapters is what it was
    base = watch["actor"].state_dict()
    assert all(torch.equal(base[f"base_model.model.{n}".replace("c_attn.", "c_attn.base_layer.")], sft[n]) for n in sft)


def test_ppo_with_lora_has_one_policy(tiny_run, tmp_path, watch):
    """And the KL to what it was before its adapters is that to a second copy of it."""
    with counting_loads() as loads:
        run_ppo(tiny_run, tmp_path, *LORA, "--actor_learning_rate=1e-2")
    assert len(loads) == 1
    kls = [read_metrics(tmp_path / "toy" / "tiny" / "ppo")["train/kl_div_mean"]]
    with pytest.MonkeyPatch.context() as patch, counting_loads() as loads:
        separate = frozen.load_reference
        patch.setattr(frozen, "load_reference", lambda *given: separate(*given[:4], ModelArgs(), given[5]))
        run_ppo(tiny_run, tmp_path / "two", *LORA, "--actor_learning_rate=1e-2")
    assert len(loads) == 2
    kls.append(read_metrics(tmp_path / "two" / "toy" / "tiny" / "ppo")["train/kl_div_mean"])
    assert kls[0] == kls[1]
    assert last(kls[0]) > 1e-3


def test_frozen_models_in_host_memory_change_no_number_and_in_bf16_little(tiny_run, tmp_path):
    for stage in (run_ppo, run_dpo):
        plain, away, half = (
            read_metrics(stage(tiny_run, tmp_path / f"{stage.__name__}{i}", "--log_interval=1", *flags))
            for i, flags in enumerate(([], ["--offload_frozen"], ["--offload_frozen", "--frozen_dtype=bf16"]))
        )
        assert away == plain
        loss = "val/loss" if stage is run_dpo else "val/reward_mean"
        assert half[loss][0] != plain[loss][0]
        assert half[loss][0] == pytest.approx(plain[loss][0], rel=0.1)


def test_dpo_without_a_reference_loads_and_runs_none(tiny_run, tmp_path, watch, monkeypatch):
    def refuse(model):
        raise AssertionError("adapters were switched off")

    monkeypatch.setattr(forward, "adapters_off", refuse)
    with counting_loads() as loads:
        for name, flags in (("all", []), ("lora", LORA)):
            metrics = read_metrics(run_dpo(tiny_run, tmp_path / name, *flags, "--reference_free"))
            for kind in ("choosen", "rejected"):
                logprobs, rewards = metrics[f"val/{kind}_logprobs"], metrics[f"val/{kind}_reward"]
                assert {step: 0.5 * value for step, value in logprobs.items()} == pytest.approx(rewards)
    assert (len(loads), watch["frozen"]) == (2, [])


def test_the_prompt_changes_no_step_of_dpo(tiny_run, tmp_path):
    runs = [read_metrics(run_dpo(tiny_run, tmp_path / str(m), f"--use_masked_targets={m}")) for m in (True, False)]
    for name in ("train/loss", "info/reward_margin", "info/grad_norm", "val/loss", "val/reward_margin"):
        assert runs[1][name] == pytest.approx(runs[0][name], rel=1e-3, abs=1e-5), name
    for step in (0, 2):
        gap = [run["val/choosen_logprobs"][step] - run["val/rejected_logprobs"][step] for run in runs]
        assert gap[1] == pytest.approx(gap[0], abs=1e-3)
        assert runs[1]["val/choosen_logprobs"][step] < runs[0]["val/choosen_logprobs"][step] - 10


def test_dpo_on_ranked_lists(tiny_run, tmp_path):
    """Three replies of one kind are three pairs; the loss is over all pairs, 24 to a step."""
    tokenizer = make_tokenizer()
    rows = {
        split: [(p, *replies) for p, replies in toy_rows(8, seed)] for split, seed in (("train", 1), ("validation", 2))
    }
    data = write_data(tmp_path / "toy" / "lists", tokenizer, preference=rows)
    sft = f"--sft_experiment_dir={tiny_run.sft}"
    eight = ["--mini_batch_size=8", "--micro_batch_size=4", "--epochs=12", "--max_steps=12", "--lr_warmup_steps=0"]
    metrics = read_metrics(run_stage("dpo", tmp_path / "runs", data, sft, *DPO, *eight))
    assert metrics["train/loss"][1] == pytest.approx(math.log(2), rel=1e-6)
    assert last(metrics["val/acc"]) > 0.9


def test_best_of_dpo_has_the_least_validation_loss(tiny_run, tmp_path):
    """Held-out preferences are the other way round: the more it learns, the more it loses."""
    data = shutil.copytree(tiny_run.data, tmp_path / "toy" / "turned")
    turned = [(prompt, replies[1], replies[0]) for prompt, replies in toy_rows(8, seed=1)]
    write_data(data, make_tokenizer(), preference={"validation": turned})
    flags = [f"--sft_experiment_dir={tiny_run.sft}", *DPO, "--max_steps=3", "--save_interval=1", "--lr_warmup_steps=0"]
    dpo = run_stage("dpo", tmp_path / "runs", data, *flags)
    losses = read_metrics(dpo)["val/loss"]
    assert losses[1] < losses[2] < losses[3]
    assert (dpo / "best").read_text().strip() == "step-000001"
    assert (dpo / "latest").read_text().strip() == "step-000003"


def test_dpo_is_a_policy_to_chat_with_and_to_evaluate(tiny_run, tmp_path):
    dpo = run_dpo(tiny_run, tmp_path, *LORA)
    session = ChatSession.load(dpo, device="cpu")
    session.reply("name the price of the tea.", GenerationArgs(max_new_tokens=4))
    assert [turn["role"] for turn in session.history] == ["user", "assistant"]
    argv = [f"--data_dir={tiny_run.data}", "--num_prompts=3", "--max_new_tokens=4", "--accelerator=cpu"]
    results = load_script("scripts/evaluate.py").main([*argv, "--experiment_dirs", str(tiny_run.sft), str(dpo)])
    kl = {name: summary["KL to the reference (nats)"]["value"] for name, summary in results["summary"].items()}
    assert kl.keys() == {"sft", "dpo"}
    assert kl["sft"] == 0 != kl["dpo"]


def test_dpo_learns_toy_preferences(tmp_path):
    """From random weights: good before bad, also for prompts that it has not seen."""
    data = write_toy_data(tmp_path / "toy" / "words", train=32, held_out=24)
    model = save_causal(tmp_path / "model", "llama", initializer_range=0.1)
    flags = [
        "--mini_batch_size=16",
        "--micro_batch_size=16",
        "--epochs=15",
        "--learning_rate=1e-2",
        "--lr_warmup_steps=2",
    ]
    dpo = run_stage("dpo", tmp_path, data, f"--model_name={model}", *flags, "--max_new_tokens=2", "--log_interval=1")
    metrics = read_metrics(dpo)
    assert last(metrics["train/acc"]) > 0.95
    assert last(metrics["val/acc"]) > 0.95
    assert last(metrics["val/loss"]) < 0.1


# Evaluation


def test_evaluate_compares_policies_on_the_same_prompts(tiny_run, tmp_path, learning, capsys):
    ppo, _ = learning
    (tmp_path / "gold.py").write_text("def score(prompt, response):\n    return float(len(response))\n")
    gold = f"--gold_score={tmp_path / 'gold.py'}:score"
    results = load_script("scripts/evaluate.py").main(
        [
            f"--data_dir={tiny_run.data}", f"--rm_experiment_dir={tiny_run.rm}", "--num_prompts=5", "--num_samples=2",
            "--max_new_tokens=6", "--mini_batch_size=2", "--accelerator=cpu", gold,
            f"--output={tmp_path / 'out.json'}", "--experiment_dirs", str(tiny_run.sft), str(ppo),
        ]
    )  # fmt: skip
    assert list(results["summary"]) == ["sft", "ppo"]
    assert results["summary"]["sft"]["KL to the reference (nats)"]["value"] == 0
    assert results["summary"]["ppo"]["KL to the reference (nats)"]["value"] != 0
    shard = open_shard(tiny_run.data / "finetune_test.pt")
    prompts = [make_tokenizer().decode(shard[i].prompt[1:]) for i in range(5)]
    for name, summary in results["summary"].items():
        replies = results["replies"][name]
        assert [reply["prompt"] for reply in replies] == prompts
        assert summary["gold score"]["value"] == pytest.approx(sum(len(reply["text"]) for reply in replies) / 5)
    assert {split: rows["all pairs"]["n"] for split, rows in results["reward_accuracy"].items()} == {
        "train": 24,
        "validation": 8,
        "test": 8,
    }
    output = capsys.readouterr().out
    assert "toy: 5 held-out prompts (test split)" in output
    assert "test: all pairs" in output
    assert json.loads((tmp_path / "out.json").read_text())["summary"] == results["summary"]


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "llama", "neox"])
def test_pipeline_of_other_architectures(tiny_run, tmp_path, kind):
    model = save_causal(tmp_path / "model", kind, dropout=0.1)
    sft = run_stage("sft", tmp_path, tiny_run.data, f"--model_name={model}", *SHORT, "--max_new_tokens=4")
    rm = run_stage("rm", tmp_path, tiny_run.data, f"--sft_experiment_dir={sft}", *SHORT)
    still = ["--actor_learning_rate=0", "--critic_learning_rate=0", "--ppo_epochs=2"]
    metrics = read_metrics(run_ppo(tiny_run, tmp_path, *still, sft=sft, rm=rm))
    assert max(map(abs, metrics["info/approx_kl"].values())) < 1e-9
    assert max(map(abs, metrics["val/kl_sequence"].values())) < 1e-6


@pytest.mark.slow
def test_lora_through_all_stages_without_a_step_by_hand(tiny_run, tmp_path, watch):
    lora = ["--finetune_mode=lora", "--lora_rank=4", "--lora_alpha=16", "--lora_dropout=0.1"]
    fast = ["--learning_rate=3e-2", "--max_steps=4", "--lr_warmup_steps=0", "--log_interval=1"]
    sft = run_stage(
        "sft", tmp_path, tiny_run.data, f"--model_name={tiny_run.model}", *lora, *fast, "--max_new_tokens=4"
    )
    rm = run_stage("rm", tmp_path, tiny_run.data, f"--sft_experiment_dir={sft}", *lora, *fast)
    ppo = run_ppo(tiny_run, tmp_path, *lora, "--actor_learning_rate=3e-2", "--ppo_epochs=2", sft=sft, rm=rm)
    metrics = read_metrics(ppo)
    # the reference is the merged SFT model, adapters included, and so is the actor at first
    assert max(abs(metrics[name][0]) for name in ("val/kl_div_mean", "val/kl_sequence")) < 1e-6
    assert metrics["val/kl_sequence"][2] != 0
    base = load_file(tiny_run.model / "model.safetensors")
    changed = [{name for name in base if not torch.equal(base[name], weights(run)[name])} for run in (sft, ppo)]
    assert changed[0] == changed[1] != set()
    assert all("c_attn.weight" in name for name in changed[0])
    trunk = {name: weight for name, weight in weights(rm).items() if name != "score.weight"}
    assert {name for name in trunk if not torch.equal(trunk[name], weights(sft)[name])} == changed[0]
    ids = torch.tensor([[1, 5, 6, 7, 8, 9]])
    merged = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(ppo)).eval()
    torch.testing.assert_close(merged(ids).logits, watch["actor"](input_ids=ids).logits, rtol=0, atol=1e-5)
    assert files(resolve_checkpoint(ppo)) >= {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}


@pytest.mark.slow
def test_last_layer_through_all_stages(tiny_run, tmp_path):
    flags = ["--finetune_mode=last_layer", "--learning_rate=1e-2", *SHORT]
    sft = run_stage("sft", tmp_path, tiny_run.data, f"--model_name={tiny_run.model}", *flags, "--max_new_tokens=4")
    rm = run_stage("rm", tmp_path, tiny_run.data, f"--sft_experiment_dir={sft}", *flags)
    ppo = run_ppo(tiny_run, tmp_path, "--finetune_mode=last_layer", "--actor_learning_rate=1e-2", sft=sft, rm=rm)
    base = load_file(tiny_run.model / "model.safetensors")
    for run, changed in ((sft, {"transformer.wte.weight"}), (ppo, {"transformer.wte.weight"})):
        assert {name for name in base if not torch.equal(base[name], weights(run)[name])} == changed
    sft_weights, rm_weights = weights(sft), weights(rm)
    assert all(torch.equal(sft_weights[name], rm_weights[name]) for name in rm_weights if name != "score.weight")


@pytest.mark.slow
def test_sft_learns_a_text_by_heart_and_stops_by_itself(tmp_path):
    tokenizer = make_tokenizer()
    rows = [("Human: name the tea. Assistant:", " red tea."), ("Human: name the bike. Assistant:", " blue.")]
    data = write_data(tmp_path / "toy" / "two", tokenizer, finetune={"train": rows, "validation": rows})
    model = save_causal(tmp_path / "model", "llama", hidden_size=32, initializer_range=0.1)
    flags = [
        "--epochs=60",
        "--learning_rate=1e-2",
        "--lr_warmup_steps=2",
        "--mini_batch_size=2",
        "--micro_batch_size=1",
    ]
    sft = run_stage(
        "sft", tmp_path, data, f"--model_name={model}", *flags, "--use_targets=True", "--eval_interval=1000",
        "--max_new_tokens=4",
    )  # fmt: skip
    assert last(read_metrics(sft)["val/loss"]) < 0.01
    trained = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(sft)).eval()
    for prompt, response in rows:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]])
        output = trained.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        reply = output[0, ids.shape[1] :].tolist()
        assert reply[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(reply[:-1]) == response


@pytest.mark.slow
def test_the_toy_pipeline_learns(tmp_path):
    """SFT imitates replies of every kind, the reward model tells good from bad, and PPO then says good."""
    data = write_toy_data(tmp_path / "toy" / "words", train=64, held_out=24)
    model = save_causal(tmp_path / "model", "llama", hidden_size=32, intermediate_size=64, initializer_range=0.1)
    eight = ["--mini_batch_size=8", "--micro_batch_size=8", "--lr_warmup_steps=4"]
    sft = run_stage(
        "sft", tmp_path, data, f"--model_name={model}", "--epochs=8", "--learning_rate=1e-2", *eight,
        "--use_targets=True", "--max_new_tokens=12",
    )  # fmt: skip
    rm = run_stage("rm", tmp_path, data, f"--sft_experiment_dir={sft}", "--epochs=4", "--learning_rate=5e-3", *eight)
    assert last(read_metrics(rm)["val/acc"]) > 0.95
    ppo = run_stage(
        "ppo", tmp_path, data, f"--sft_experiment_dir={sft}", f"--rm_experiment_dir={rm}", "--epochs=6",
        "--rollout_size=32", "--rollout_mini_batch_size=32", "--mini_batch_size=16", "--micro_batch_size=16",
        "--actor_learning_rate=2e-3", "--critic_learning_rate=2e-3", "--init_kl_coeff=0.05", "--ppo_epochs=2",
        "--max_new_tokens=12", "--log_interval=1",
    )  # fmt: skip
    metrics = read_metrics(ppo)
    rewards, kl = metrics["val/reward_mean"], metrics["val/kl_sequence"]
    assert abs(kl[0]) < 1e-6
    assert last(rewards) > rewards[0] + 3  # good and bad are about ten apart
    assert 0 < last(kl) < 20
    assert last(metrics["info/explained_variance"]) > metrics["info/explained_variance"][1]
