"""OpenRL's configuration files, of both generations, run `rlhf_ppo.py`; every key of them is explained."""

import re

import pytest
import torch

from rlhf_stages.args import FabricArgs, ModelArgs, PPOArgs, RolloutArgs, SFTArgs
from rlhf_stages.cli import parse
from rlhf_stages.data.shards import ShardWriter
from rlhf_stages.data.tokenizer import encode_prompt, encode_response
from rlhf_stages.kl_control import make_kl_control
from rlhf_stages.openrl import translate
from rlhf_stages.openrl_keys import KEYS
from rlhf_stages.rewards.spec import read_specs

from helpers import ROOT, load_script, make_tokenizer, read_metrics, save_classifier, toy_rows, write_data

CLASSIFIER = "rajkumarrrk/roberta-daily-dialog-intent-classifier"
POLICY = "rajkumarrrk/gpt2-fine-tuned-on-daily-dialog"

# the last configuration of the older tutorial, and that of the newer one with all that it adds on the way
OLD = f"""
wandb_entity: tmarl
experiment_name: ppo
run_dir: ../../../exp_results/
log_interval: 1
seed: 0
lr: 1e-6
critic_lr: 1e-6
episode_length: 128
use_recurrent_policy: true
use_joint_action_loss: false
use_valuenorm: true
use_adv_normalize: true
data_chunk_length: 1
num_mini_batch: 20
ppo_epoch: 5
use_share_model: true
model_path: {POLICY}
data_path: daily_dialog
env:
    args: {{'model_path': 'gpt2'}}
vec_info_class:
    id: "NLPVecInfo"
reward_class:
    id: "NLPReward"
    args: {{
        "reward_path": "{CLASSIFIER}",
        "model_path": "{POLICY}",
    }}
"""
NEW = f"""
reward_class:
    id: NLPReward
    args: {{
        "intent_model": {CLASSIFIER},
        "ref_model": {POLICY},
    }}
vec_info_class:
    id: "NLPVecInfo"
wandb_entity: openrl
experiment_name: train_nlp
run_dir: ./run_results/
log_interval: 1
model_path: {POLICY}
use_share_model: true
ppo_epoch: 5
env:
    args: {{
        "tokenizer_path": gpt2,
        "data_path": daily_dialog
    }}
lr: 1e-6
critic_lr: 1e-6
episode_length: 128
num_mini_batch: 20
use_amp: true
"""
LEAST = "model_path: s\nreward_class: {id: own}\n"


def parsed(tmp_path, text, *argv):
    (tmp_path / "nlp_ppo.yaml").write_text(text)
    groups = (PPOArgs, ModelArgs, RolloutArgs, FabricArgs)
    return parse(*groups, argv=[f"--config={tmp_path / 'nlp_ppo.yaml'}", *argv])


def ppo(tmp_path, text, *argv):
    return parsed(tmp_path, LEAST + text, *argv)[0]


def refused(tmp_path, capsys, text, *argv):
    with pytest.raises(SystemExit) as stop:
        parsed(tmp_path, text, *argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


# Whole files


@pytest.mark.parametrize("text", [OLD, NEW], ids=["old", "new"])
def test_a_tutorials_file_means_the_same_here(tmp_path, text, capsys):
    args, _, rollout, fabric = parsed(tmp_path, text)
    assert (args.sft_experiment_dir, args.data_dir, args.seed) == (POLICY, "daily_dialog", 0 if text == OLD else 42)
    assert (args.actor_learning_rate, args.share_actor_critic, args.ppo_epochs) == (1e-6, True, 5)
    assert (args.log_interval, args.wandb_entity, args.loggers) == (1, None, ["tensorboard"])
    # 128 tokens of each of 10 environments are 1280, or 64 replies of 20; a twentieth of them is 3.2
    assert (rollout.max_new_tokens, args.rollout_size, args.mini_batch_size, args.micro_batch_size) == (20, 64, 3, 3)
    assert args.rollout_mini_batch_size == 32
    assert fabric.precision == ("32-true" if text == OLD else "16-mixed")
    assert (args.normalize_values, args.normalize_advantages) == (text == OLD, True)
    # 0.5 METEOR + 0.5 intent; the two utterances follow each other without anything between them
    meteor, intent = read_specs(args.reward_config, args.reward)
    assert (meteor.kind, meteor.weight(0), intent.kind, intent.weight(0)) == ("meteor", 0.5, "classifier", 0.5)
    names = "inform|question|directive|commissive"  # acts 1 to 4
    assert intent.options == {
        "model": CLASSIFIER, "label_key": "act", "text": "turn", "separator": "", "labels": names
    }  # fmt: skip
    assert not args.normalize_rewards
    # ten rollouts with too large a KL take the coefficient from 0.2 to 0.244
    control = make_kl_control(args.kl_control, args.init_kl_coeff, args.target_kl_coeff, args.kl_horizon)
    for _ in range(10):
        control.update(1.0, 64)
    assert control.coeff == pytest.approx(0.2 * 1.02**10)
    assert (args.target_kl_coeff, args.kl_target_per) == (0.05, "token")
    line = capsys.readouterr().err.strip()
    assert line.count("\n") == 0
    expected = {"wandb_entity", "vec_info_class.id"}
    expected |= {
        OLD: {"env.args.model_path", "use_recurrent_policy", "data_chunk_length", "use_joint_action_loss"},
        NEW: {"env.args.tokenizer_path"},
    }[text]
    named = re.search(r"no effect here: (.*) \(docs/from-openrl.md\)$", line)[1].split(", ")
    assert set(named) == expected
    assert len(named) == len(expected)


def test_the_command_line_wins(tmp_path):
    argv = ["--data_dir=d", "--sft_experiment_dir=s", "--actor_learning_rate=1e-5", "--no_share_actor_critic"]
    args, *_ = parsed(tmp_path, NEW, *argv, "--rollout_size=8", "--micro_batch_size=1", "--reward", "length=1")
    assert (args.data_dir, args.sft_experiment_dir, args.actor_learning_rate) == ("d", "s", 1e-5)
    assert (args.share_actor_critic, args.critic_learning_rate) == (False, 1e-6)
    assert (args.rollout_size, args.rollout_mini_batch_size, args.mini_batch_size, args.micro_batch_size) == (
        8,
        8,
        1,
        1,
    )
    assert args.reward == ["length=1"]
    assert parsed(tmp_path, NEW, "--reward_config=r.yaml")[0].reward == []


def test_keys_that_the_command_line_leaves_without_effect_are_left_out(tmp_path, capsys):
    args = ppo(tmp_path, "lr: 1e-5\ncritic_lr: 2e-5\nhidden_size: 1\n", "--advantage_estimator=rloo")
    assert (args.actor_learning_rate, args.critic) == (1e-5, "none")
    err = capsys.readouterr().err
    assert "left out of the config file: --critic_learning_rate only acts with" in err
    assert err.count("no effect here: hidden_size") == 1


def test_flags_of_ours_may_stand_in_the_same_file(tmp_path):
    args, _, rollout, fabric = parsed(tmp_path, f"{NEW}max_new_tokens: 64\nprecision: bf16-mixed\nmax_steps: 3\n")
    assert (rollout.max_new_tokens, args.rollout_size, args.max_steps) == (64, 20, 3)  # 1280 tokens in replies of 64
    assert fabric.precision == "bf16-mixed"


# Keys


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: 2e-6\ncritic_lr: 3e-6", {"actor_learning_rate": 2e-6, "critic_learning_rate": 3e-6}),
        ("clip_param: 0.3\ngamma: 0.9\ngae_lambda: 0.8", {"clip_coeff": 0.3, "gae_gamma": 0.9, "gae_lambd": 0.8}),
        ("entropy_coef: 0.01\nvalue_loss_coef: 0.5", {"entropy_coeff": 0.01, "vf_coeff": 0.5}),
        ("max_grad_norm: 10\nopti_eps: 1e-5\nweight_decay: 0.1", {
            "gradient_clip_val": 10, "optimizer_eps": 1e-5, "weight_decay": 0.1}),
        ("dual_clip_ppo: true", {"dual_clip": 3}),
        ("dual_clip_ppo: true\ndual_clip_coeff: 4", {"dual_clip": 4}),
        ("dual_clip_ppo: false\ndual_clip_coeff: 4", {"dual_clip": 0}),
        ("huber_delta: 5.0", {"value_loss": "huber", "huber_delta": 5}),
        ("use_huber_loss: false\nhuber_delta: 5.0", {"value_loss": "mse", "huber_delta": 10}),
        ("use_huber_loss: true", {"value_loss": "huber", "huber_delta": 10}),
        ("use_clipped_value_loss: false", {"value_clip_coeff": 1e12}),
        ("use_clipped_value_loss: true", {"value_clip_coeff": None}),
        ("use_valuenorm: true\nuse_adv_normalize: false", {"normalize_values": True, "normalize_advantages": False}),
        ("use_linear_lr_decay: true", {"actor_lr_schedule": "linear", "critic_lr_schedule": "linear"}),
        ("use_linear_lr_decay: true\nuse_share_model: true", {
            "actor_lr_schedule": "linear", "critic_lr_schedule": "constant"}),
        ("use_linear_lr_decay: false", {"actor_lr_schedule": "constant"}),
        # 30 tokens of each of 4 environments: 6 replies, two of them at a time
        ("episode_length: 30\nenv_num: 4\nnum_mini_batch: 3\nnormalize_rewards: false", {
            "rollout_size": 6, "rollout_mini_batch_size": 6, "mini_batch_size": 2, "micro_batch_size": 2}),
        ("episode_length: 200", {"rollout_size": 100, "mini_batch_size": 100}),
        ("num_mini_batch: 8", {"rollout_size": 128, "mini_batch_size": 16, "micro_batch_size": 16}),
        ("env.args.data_path: d", {"data_dir": "d"}),
        ("data_path: d\nenv: {args: {data_path: d}}", {"data_dir": "d"}),
        ("loggers: [wandb]\nwandb_entity: team", {"wandb_entity": "team"}),
        ("env: null\nvec_info_class: {id: null, args: {}}\nenv_num: 3", {"rollout_size": 128}),
        ("use_deepspeed: false\nuse_fp16: false\nuse_offload: false\nlocal_rank: -1\ndeepspeed_config: x.json", {}),
    ],
)  # fmt: skip
def test_a_key_by_hand(tmp_path, text, expected):
    args = ppo(tmp_path, f"{text}\n")
    assert {name: getattr(args, name) for name in expected} == expected


def test_an_entity_counts_where_wandb_is_asked_for(tmp_path):
    assert ppo(tmp_path, "wandb_entity: team\n", "--loggers", "console", "wandb").wandb_entity == "team"


def test_own_rewards_get_their_settings(tmp_path):
    text = "model_path: s\nreward_class: {id: CustomReward, args: {words: 15, how: fast}}\n"
    (spec,) = read_specs(None, parsed(tmp_path, text)[0].reward)
    assert (spec.kind, spec.weight(0), spec.options) == ("CustomReward", 1.0, {"words": 15, "how": "fast"})


def test_a_classifier_of_ours_reads_what_it_was_trained_on(tmp_path):
    text = f"model_path: s\nreward_class: {{id: NLPReward, args: {{intent_model: {tmp_path}}}}}\n"
    _, intent = read_specs(None, parsed(tmp_path, text)[0].reward)
    assert not {"separator", "labels"} & intent.options.keys()  # the reward's own: a line break; the classifier's names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "unknown flag 'lrr'; did you mean lr?"),
        ("num_minibatch: 1", "unknown flag 'num_minibatch'; did you mean num_mini_batch?"),
        ("ppo_epoches: 1", "did you mean ppo_epoch"),
        ("env: {args: {datapath: d}}", "unknown key 'env.args.datapath'; did you mean env.args.data_path?"),
        ("env: {num: 3}", "unknown key 'env.num'"),
        ("env: [1]", "env is a block of `name: value` lines, got list"),
        ("vec_info_class: {id: NLPVecInfo, args: {a: 1}}", "unknown key 'vec_info_class.args.a'"),
        ("lr: [1, 2]", "lr is nested, expected a value"),
        ("lr: 1e-6\nactor_learning_rate: 1e-6", "actor_learning_rate and lr both set --actor_learning_rate"),
        ("data_path: a\nenv: {args: {data_path: b}}", "data_path and env.args.data_path both set --data_dir"),
        ("lr: 1e-6\ncritic_lr: 2e-6\nuse_share_model: true", "critic_lr: with use_share_model there is one network"),
        ("use_valuenorm: 1", "use_valuenorm: expected true or false, got 1"),
        ("episode_length: 1.5", "episode_length: episode_length is a whole number above 0, got 1.5"),
        ("use_joint_action_loss: true", "use_joint_action_loss: True asks for the loss of several agents"),
        ("use_deepspeed: true", "use_deepspeed: True needs DeepSpeed"),
        ("use_fp16: true", "use_fp16: True needs DeepSpeed"),
        ("use_offload: true", "use_offload: True needs DeepSpeed"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, capsys, text, message):
    assert message in refused(tmp_path, capsys, f"{LEAST}{text}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{}", "reward_class.id: NLPReward needs the intent classifier"),
        ("{intent_model: a, reward_path: b}", "both name the intent classifier"),
        ("{intent_model: a, ref_model: other}", "cannot be another, 'other'"),
        ("{intent_model: a, use_deepspeed: true}", "reward_class.args.use_deepspeed: True needs DeepSpeed"),
        ("{intent_modell: a}", "did you mean reward_class.args.intent_model?"),
    ],
)
def test_what_nlp_reward_cannot_do(tmp_path, capsys, args, message):
    assert message in refused(tmp_path, capsys, f"model_path: s\nreward_class: {{id: NLPReward, args: {args}}}\n")


def test_other_stages_do_not_know_these_keys(tmp_path, capsys):
    (tmp_path / "sft.yaml").write_text("lr: 1e-6\n")
    with pytest.raises(SystemExit):
        parse(SFTArgs, argv=[f"--config={tmp_path / 'sft.yaml'}"])
    assert "unknown flag 'lr'" in capsys.readouterr().err


def test_only_the_first_process_says_what_has_no_effect(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    ppo(tmp_path, "hidden_size: 1\n")
    assert capsys.readouterr().err == ""


# The document


def rows():
    """{key: cell that says what it becomes} of docs/from-openrl.md."""
    text = (ROOT / "docs" / "from-openrl.md").read_text(encoding="utf-8")
    found = {}
    for cells in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|[^|]*\|[^|]*\|$", text, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", cells[0]):
            assert name not in found
            found[name] = cells[1]
    return found


def test_the_document_has_every_key_and_no_other():
    assert rows().keys() == KEYS.keys()


@pytest.mark.parametrize("name", KEYS)
def test_the_document_says_what_a_key_becomes(name):
    assert tuple(re.findall(r"`--(\w+)", rows()[name])) == KEYS[name].flags


def test_each_key_sets_no_other_flags_than_the_table_says():
    """With a value of each kind; true and false for switches."""
    for name, key in KEYS.items():
        for value in (True, False, 3, "NLPReward"):
            config = {name: value, "reward_class.args.intent_model": "i", "episode_length": 9}
            try:
                tokens = translate(config, {}).tokens
            except ValueError:
                continue
            others = translate({n: v for n, v in config.items() if n != name}, {}).tokens
            flags = {token[2:].partition("=")[0] for token in tokens if token.startswith("--") and token not in others}
            assert flags <= set(key.flags), name


# A run


ACTS = ("inform", "question", "directive", "commissive")


@pytest.fixture
def dialogues(tmp_path):
    """A data folder whose records say what a reply does, and a classifier that knows such acts."""
    tokenizer = make_tokenizer()
    folder = write_data(tmp_path / "daily_dialog" / "tiny", tokenizer, dataset="daily_dialog")
    for seed, split in enumerate(("train", "validation")):
        writer = ShardWriter()
        for i, (prompt, replies) in enumerate(toy_rows(24, seed=seed)):
            metadata = {"act": ACTS[i % 4], "emotion": "none", "last_turn": prompt}
            responses = [encode_response(tokenizer, replies[i % 3])]
            writer.add(encode_prompt(tokenizer, prompt), responses, metadata=metadata)
        writer.save(folder / f"finetune_{split}.pt")
    names = {"id2label": dict(enumerate(ACTS)), "label2id": {name: i for i, name in enumerate(ACTS)}}
    save_classifier(tmp_path / "intent", "gpt2", num_labels=4, **names)
    return folder


@pytest.mark.slow
def test_a_tutorials_file_runs(tmp_path, dialogues, tiny_run, wordnet):
    text = NEW.replace("use_amp: true", "use_valuenorm: true").replace("daily_dialog\n", f"{dialogues}\n")
    text = text.replace(CLASSIFIER, str(tmp_path / "intent")).replace(POLICY, str(tiny_run.sft))
    text = text.replace("./run_results/", str(tmp_path / "runs")).replace("128", "16")  # 160 tokens: 8 replies
    (tmp_path / "nlp_ppo.yaml").write_text(text)
    argv = [f"--config={tmp_path / 'nlp_ppo.yaml'}", "--max_steps=2", "--actor_learning_rate=1e-3"]
    folder = load_script("scripts/rlhf_ppo.py").main([*argv, "--accelerator=cpu", "--devices=1"])
    assert folder == tmp_path / "runs" / "daily_dialog" / "train_nlp" / "ppo"
    metrics = read_metrics(folder)
    assert set(metrics["reward/meteor_weight"].values()) | set(metrics["reward/intent_weight"].values()) == {0.5}
    for step in (1, 2):
        parts = (metrics["reward/meteor_mean"][step] + metrics["reward/intent_mean"][step]) / 2
        assert metrics["train/reward_mean"][step] == pytest.approx(parts, rel=1e-5)
    assert metrics["info/kl_coeff"][1] == 0.2
    assert metrics["info/kl_coeff"][2] != 0.2
    assert torch.load(folder / "checkpoints" / "step-000002" / "resume" / "value_norm.pt", weights_only=True)
