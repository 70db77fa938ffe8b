import dataclasses
import json
import threading
import warnings

import pytest
from simple_parsing.conflicts import ConflictResolutionError

from rlhf_stages import args as module
from rlhf_stages.args import (
    AnnotateArgs,
    ChatArgs,
    ClassifierArgs,
    CompareArgs,
    DailyDialogArgs,
    DemoArgs,
    DPOArgs,
    EvaluateArgs,
    FabricArgs,
    FrozenArgs,
    GenerationArgs,
    ImportGgufArgs,
    ModelArgs,
    NltkDataArgs,
    PageArgs,
    PPOArgs,
    ReportArgs,
    RMArgs,
    RolloutArgs,
    SamplerArgs,
    ScoreAndStepArgs,
    SFTArgs,
    TextDataArgs,
    TrainArgs,
    ZhSentimentArgs,
)
from rlhf_stages.cli import Finished, Interrupted, parse, run

# What each group needs to be parsed at all
REQUIRED = {
    TextDataArgs: ["--destination_dir=d", "--tokenizer_name=t"],
    DailyDialogArgs: ["--destination_dir=d", "--tokenizer_name=t"],
    ZhSentimentArgs: ["--destination_dir=d", "--tokenizer_name=t", "--source=s", "--rank_lists=r"],
    ModelArgs: [],
    FabricArgs: [],
    GenerationArgs: [],
    RolloutArgs: [],
    TrainArgs: [],
    FrozenArgs: [],
    SFTArgs: [],
    RMArgs: [],
    PPOArgs: ["--sft_experiment_dir=s", "--rm_experiment_dir=r"],
    DPOArgs: [],
    ClassifierArgs: [],
    ChatArgs: ["model"],
    AnnotateArgs: [],
    DemoArgs: [],
    ScoreAndStepArgs: [],
    CompareArgs: ["--models", "a", "b", "--prompts=p"],
    ImportGgufArgs: ["--gguf=g", "--destination_dir=d"],
    ReportArgs: ["e"],
    EvaluateArgs: ["--experiment_dirs", "e"],
    NltkDataArgs: [],
    PageArgs: [],
    SamplerArgs: [],
}
FLAGS = [
    (group, name)
    for group in REQUIRED
    for name, kind in group.__annotations__.items()  # those that the group itself declares
    if kind in (bool, "bool")
]


def parsed(group, *argv):
    (result,) = parse(group, argv=[*REQUIRED[group], *argv])
    return result


def refused(capsys, *argv, groups=(SFTArgs,)):
    """The one-line reason with which a command line is refused."""
    with pytest.raises(SystemExit) as stop:
        parse(*groups, argv=[token for group in groups for token in REQUIRED[group]] + list(argv))
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "error: " in lines[-1]
    return lines[-1].partition("error: ")[2]


def config(tmp_path, text):
    path = tmp_path / "flags.yaml"
    path.write_text(text, encoding="utf-8")
    return f"--config={path}"


def test_every_group_is_tested_here():
    groups = {value for value in vars(module).values() if dataclasses.is_dataclass(value)} - {module.Args}
    assert groups == REQUIRED.keys()


# --- spellings ---


@pytest.mark.parametrize(("group", "name"), FLAGS, ids=lambda value: getattr(value, "__name__", value))
def test_a_boolean_takes_every_spelling(group, name):
    needs = {
        "load_in_8bit": "--finetune_mode=lora",
        "load_in_4bit": "--finetune_mode=lora",
        "resume_override": "--resume",
        "keep_best": "--keep_last=2",
    }
    needed = [needs[name]] if name in needs else []
    spellings = {
        (f"--{name}",): True,
        (f"--{name}=True",): True,
        (f"--{name}=1",): True,
        (f"--{name}", "true"): True,
        (f"--{name}=False",): False,
        (f"--{name}", "false"): False,
        (f"--{name}=0",): False,
        (f"--no_{name}",): False,
    }
    for spelling, expected in spellings.items():
        assert getattr(parsed(group, *needed, *spelling), name) is expected, spelling


def test_a_boolean_with_another_value_is_refused(capsys):
    assert "received 'maybe'" in refused(capsys, "--use_targets=maybe")


def test_model_name_or_path_is_another_name_of_model_name():
    assert parsed(ModelArgs, "--model_name=a").model_name == "a"
    assert parsed(ModelArgs, "--model_name_or_path=a").model_name == "a"
    assert parsed(ModelArgs, "--model_name_or_path", "a", "--model_name", "b").model_name == "b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        ("q_proj, v_proj", ["q_proj", "v_proj"]),
        ("('q_proj','v_proj')", ["q_proj", "v_proj"]),
        ('["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
        ("('q_proj',)", ["q_proj"]),
        ("('q_proj')", ["q_proj"]),
        (" c_attn ", ["c_attn"]),
        ("all-linear", "all-linear"),
    ],
)
def test_lora_targets_takes_every_spelling(text, expected):
    assert parsed(ModelArgs, "--finetune_mode=lora", f"--lora_targets={text}").lora_target_modules == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h", 10_800), ("90m", 5_400), ("1h30m", 5_400), ("45", 45), ("45s", 45), ("1d2h3m4s", 93_784), ("0", 0)],
)
def test_a_time_limit_by_hand(text, seconds):
    assert parsed(SFTArgs, f"--max_time={text}").max_seconds == seconds


@pytest.mark.parametrize("text", ["", "h", "3 hours", "-1h", "1.5h", "30m1h", "1h 30m"])
def test_a_time_limit_that_cannot_be_read(capsys, text):
    assert f"--max_time takes a time such as 3h, 90m or 1h30m, got {text!r}" in refused(capsys, f"--max_time={text}")


@pytest.mark.parametrize(
    ("flags", "resume", "step"),
    [
        ([], None, None),
        (["--resume"], "latest", None),
        (["--resume", "--seed=1"], "latest", None),
        (["--resume=True"], "True", None),
        (["--resume=500"], "500", 500),
        (["--resume", "500"], "500", 500),
    ],
)
def test_resume_takes_a_step_or_nothing(flags, resume, step):
    args = parsed(SFTArgs, *flags)
    assert (args.resume, args.resume_step) == (resume, step)


@pytest.mark.parametrize("text", ["0", "-5", "best", "5.5"])
def test_resume_from_what_is_no_step(capsys, text):
    assert f"--resume takes a step, got {text!r}" in refused(capsys, f"--resume={text}")


def test_lora_targets_may_be_left_to_peft():
    assert parsed(ModelArgs, "--finetune_mode=lora").lora_target_modules is None


def test_per_token_is_per_sample():
    assert parsed(RMArgs, "--loss_type=per_token").reward_loss == "per_sample"
    for name in ("per_sample", "last_token", "average"):
        assert parsed(RMArgs, f"--loss_type={name}").reward_loss == name


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--text_column=review", "--columns=a,b"], "--text_column --columns only act with --source"),
        (["--source=x", "--label_kind=emotion"], "--label_kind only acts without --source"),
        (["--source=x", "--data_dir=y"], "--data_dir only acts without --source"),
        (["--labels=one"], "--labels takes 2 or more different names with commas between them, got 'one'"),
        (["--labels=a,b,a"], "--labels takes 2 or more different names"),
        (["--labels=a,,b"], "--labels takes 2 or more different names"),
        (["--source=x", "--columns=text"], "--columns takes 2 or more different names"),
        (["--max_length=0"], "--max_length lies between 1 and"),
        (["--label_kind=../act"], "--label_kind is the name of files without the split, such as act, got '../act'"),
    ],
)
def test_flags_of_the_classifier_that_cannot_be(capsys, flags, reason):
    assert reason in refused(capsys, *flags, groups=[ClassifierArgs])


def test_names_of_a_source(tmp_path, monkeypatch):
    (tmp_path / "sst 2").mkdir()
    file = tmp_path / "sst 2" / "reviews.jsonl.gz"
    file.touch()
    names = {
        str(tmp_path / "sst 2"): ("sst_2", "sst_2"), str(file): ("sst_2", "reviews"), "owner/imdb": ("imdb", "imdb")
    }  # fmt: skip
    for source, expected in names.items():
        args = ClassifierArgs(source=source)
        assert (args.source_names, args.run_name) == (expected, expected[1])
    assert ClassifierArgs(source=str(file), experiment_name="mine").run_name == "mine"
    assert ClassifierArgs(data_dir="data/toy/tiny").run_name == "tiny"
    monkeypatch.chdir(file.parent)
    assert ClassifierArgs(source="reviews.jsonl.gz").source_names == ("sst_2", "reviews")
    assert ClassifierArgs(source=".").source_names == ("sst_2", "sst_2")
    assert ClassifierArgs(labels=" a, b c").names("labels") == ("a", "b c")


@pytest.mark.parametrize("group", [AnnotateArgs, DemoArgs])
def test_a_page_that_others_can_reach_needs_users(capsys, group):
    for host in ("192.168.0.7", "example.org", "0.0.0.0"):
        assert "--auth_file" in refused(capsys, f"--host={host}", groups=(group,))
        assert parsed(group, f"--host={host}", "--auth_file=users").host == host
    for host in ("127.0.0.1", "localhost", "::1"):
        assert parsed(group, f"--host={host}").auth_file is None


def test_what_a_page_to_annotate_refuses(capsys):
    assert "--add_user needs --auth_file" in refused(capsys, "--add_user=ann", groups=(AnnotateArgs,))
    assert "nothing to rank" in refused(capsys, "--do_sample=False", groups=(AnnotateArgs,))
    assert "--num_replies lies between 2 and 9" in refused(capsys, "--num_replies=10", groups=(AnnotateArgs,))


def test_a_comparison_has_two_models_and_what_its_judge_needs(capsys):
    for argv, message in (
        (["--models", "a"], "two models to compare, got 1"),
        (["--judge=reward_model"], "needs --rm_experiment_dir"),
        (["--judge=classifier", "--classifier=c"], "needs --classifier and --label"),
        (["--judge=length", "--label=good"], "--label only acts with --judge=classifier"),
        (["--judge=length", "--port=1"], "--port only acts with --judge=people"),
        (["--host=0.0.0.0"], "--auth_file"),
    ):
        assert message in refused(capsys, *argv, groups=(CompareArgs,))
    assert parsed(CompareArgs, "--judge=classifier", "--classifier=c", "--label=good").label == "good"


def test_scores_of_a_terminal(capsys):
    assert "--resume goes on" in refused(capsys, "--resume", "--overwrite", groups=(ScoreAndStepArgs,))
    refusal = refused(capsys, "--adaptive_kl_coeff=False", "--kl_horizon=5", groups=(ScoreAndStepArgs,))
    assert "--kl_horizon only acts with --adaptive_kl_coeff" in refusal
    ppo = parsed(ScoreAndStepArgs, "--scores_per_step=3", "--adaptive_kl_coeff=False").ppo
    assert (ppo.rollout_size, ppo.mini_batch_size, ppo.kl_control) == (3, 3, "fixed")
    assert {ppo.normalize_advantages, ppo.normalize_rewards, ppo.clip_rewards} == {False}


def test_the_model_to_chat_with_is_named_once(capsys):
    assert parsed(ChatArgs).source == "model"
    assert parse(ChatArgs, argv=["--model=x"])[0].source == "x"
    assert "name one model: chat.py PATH" in refused(capsys, "--model=x", groups=[ChatArgs])
    with pytest.raises(SystemExit):
        parse(ChatArgs, argv=[])
    assert "name one model" in capsys.readouterr().err


# --- defaults ---


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (
            TextDataArgs,
            {
                "stage": "finetune", "max_length": 512, "max_prompt_length": 256, "num_samples": None,
                "mask_prompt": True, "ignore_index": -1, "remove_same_responses": True, "remove_same_inputs": True,
                "minimum_response_length": 2, "save_skipped_examples": False, "shuffle": True, "seed": 42,
                "validation_percentage": 0.1,
            },
        ),
        (
            ModelArgs,
            {
                "trust_remote_code": False, "load_in_8bit": False, "disable_dropout": False, "finetune_mode": "all",
                "lora_targets": None, "lora_rank": 8, "lora_alpha": 1.0, "lora_dropout": 0.0,
            },
        ),
        (
            SFTArgs,
            {
                "data_dir": "data", "seed": 42, "epochs": 1, "save_interval": 500, "eval_interval": 100,
                "log_interval": 5, "eval_iters": None, "mini_batch_size": 4, "micro_batch_size": 4,
                "gradient_clip_val": 1.0, "weight_decay": 0.0, "optimizer": "AdamW", "optimizer_eps": 1e-6,
                "optimizer_beta1": 0.9, "optimizer_beta2": 0.95, "label_smoothing": 0.0, "use_targets": False,
                "learning_rate": 1e-4, "lr_warmup_steps": 100,
            },
        ),
        (
            RMArgs,
            {
                "sft_experiment_dir": None, "learning_rate": 1e-4, "lr_warmup_steps": 100,
                "loss_type": "per_sample", "use_margin": False, "center_rewards_coeff": 0.0,
            },
        ),
        (
            PPOArgs,
            {
                "rollout_size": 128, "rollout_mini_batch_size": 32, "ppo_epochs": 1, "normalize_rewards": True,
                "normalize_advantages": True, "adaptive_kl_coeff": False, "clip_rewards": True,
                "reward_clip_value": 5.0, "init_kl_coeff": 0.1, "target_kl_coeff": 0.1, "clip_coeff": 0.2,
                "vf_coeff": 0.1, "gae_gamma": 1.0, "gae_lambd": 0.95, "actor_learning_rate": 1e-6,
                "critic_learning_rate": 1e-6, "standardize_rewards": False,
            },
        ),
        (
            DPOArgs,
            {
                "sft_experiment_dir": None, "use_masked_targets": True, "learning_rate": 1e-6,
                "lr_warmup_steps": 150, "reference_free": False, "beta": 0.1,
            },
        ),
        (
            GenerationArgs,
            {
                "max_new_tokens": 128, "num_beams": 1, "do_sample": True, "top_k": 50, "top_p": 1.0,
                "temperature": 1.0, "num_return_sequences": 1,
            },
        ),
        (RolloutArgs, {"max_new_tokens": 128, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_defaults_are_those_of_the_first_rlhf_scripts(group, expected):
    result = parsed(group)
    assert {name: getattr(result, name) for name in expected} == expected


def test_values_arrive_with_their_types_and_groups_stay_apart():
    sft, model, generation, fabric = parse(
        SFTArgs, ModelArgs, GenerationArgs, FabricArgs,
        argv=["--learning_rate", "3e-5", "--max_steps=7", "--lora_alpha=2", "--finetune_mode=lora", "--top_k=0",
              "--devices=2", "--precision=bf16-mixed"],
    )  # fmt: skip
    assert (sft.learning_rate, sft.max_steps, model.lora_alpha, model.finetune_mode) == (3e-5, 7, 2.0, "lora")
    assert (generation.top_k, fabric.devices, fabric.precision) == (0, "2", "bf16-mixed")
    assert parsed(EvaluateArgs, "f", "g").experiment_dirs == ["e", "f", "g"]


def test_groups_that_share_a_flag_are_refused_and_not_renamed():
    with pytest.raises(ConflictResolutionError, match="--seed"):
        parse(SFTArgs, TextDataArgs, argv=REQUIRED[TextDataArgs])


def test_arguments_are_facts():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed(SFTArgs).seed = 1


def test_help_names_every_flag_with_its_comment(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(PPOArgs, ModelArgs, RolloutArgs, FabricArgs, argv=["--help"], description="What it does.")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in (PPOArgs, ModelArgs, RolloutArgs, FabricArgs):
        for field in dataclasses.fields(group):
            assert f"--{field.name}" in text
    assert "What it does." in text
    assert "Prompts per rollout and device (default: 128)" in text
    assert "--model_name_or_path" in text
    assert "--config" in text


# --- derived values ---


def test_run_name_is_that_of_the_experiment_or_else_of_the_data():
    assert parsed(SFTArgs, "--experiment_name=mine", "--data_dir=data/hh/opt").run_name == "mine"
    assert parsed(SFTArgs, "--data_dir=data/hh/opt/").run_name == "opt"


def test_stage_shares_sum_to_1():
    assert parsed(TextDataArgs).stage_shares == {"finetune": 0.5, "preference": 0.5, "prompt": 0.0}
    result = parsed(TextDataArgs, "--stage_split=2,4,4", "--stage=prompt")
    assert result.stage_shares == pytest.approx({"finetune": 0.2, "preference": 0.4, "prompt": 0.4})


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--sed=1"], "error: unrecognized arguments: --sed=1; did you mean --seed?"),
        (["--xyzzy"], "error: unrecognized arguments: --xyzzy; --help lists all flags"),
        (["--epochs=many"], "error: argument --epochs: invalid int value: 'many'"),
    ],
)
def test_a_wrong_flag_is_said_in_one_line(capsys, argv, line):
    with pytest.raises(SystemExit):
        parse(SFTArgs, argv=[*REQUIRED[SFTArgs], *argv])
    assert capsys.readouterr().err == f"{line}\n"


# --- config file ---


def test_a_config_file_gives_flags_and_the_command_line_wins(tmp_path):
    file = config(
        tmp_path,
        "learning_rate: 1e-5\nmini_batch_size: 8\nuse_targets: yes\noptimizer: Adam\nmax_steps: null\nseed: 0\n"
        "experiment_name: 'a b'\n",
    )
    result = parsed(SFTArgs, file)
    assert (result.learning_rate, result.mini_batch_size, result.use_targets) == (1e-5, 8, True)
    assert (result.optimizer, result.max_steps, result.seed, result.experiment_name) == ("Adam", None, 0, "a b")
    for argv in ([file, "--seed=3", "--no_use_targets"], ["--seed=3", "--use_targets", "false", file]):
        result = parsed(SFTArgs, *argv)
        assert (result.seed, result.use_targets, result.mini_batch_size) == (3, False, 8)


def test_a_config_file_may_be_named_as_two_words_and_supplies_required_flags(tmp_path):
    path = config(tmp_path, "sft_experiment_dir: s\nrm_experiment_dir: r\nmodel_name_or_path: m\n").partition("=")[2]
    ppo, model = parse(PPOArgs, ModelArgs, argv=["--config", path])
    assert (ppo.sft_experiment_dir, ppo.rm_experiment_dir, model.model_name) == ("s", "r", "m")


def test_a_config_list_names_lora_targets(tmp_path):
    result = parsed(ModelArgs, config(tmp_path, "finetune_mode: lora\nlora_targets: [q_proj, v_proj]\n"))
    assert result.lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("group", "text", "flag", "left_out"),
    [
        (ModelArgs, "finetune_mode: lora\nlora_rank: 4\nlora_dropout: 0\n", "--finetune_mode=all", "lora_rank"),
        (SFTArgs, "micro_batch_size: 2\n", "--micro_batch_tokens=512", "micro_batch_size"),
        (GenerationArgs, "top_k: 3\ntemperature: 2\n", "--do_sample=False", "top_k temperature"),
        (PPOArgs, "adaptive_kl_coeff: true\nkl_horizon: 5\n", "--no_adaptive_kl_coeff", "kl_horizon"),
        (PPOArgs, "critic_init: sft\nvf_coeff: 1\n", "--advantage_estimator=rloo", "critic_init vf_coeff"),
    ],
)
def test_what_the_command_line_leaves_without_effect_is_left_out_of_the_file(
    tmp_path, capsys, group, text, flag, left_out
):
    assert parsed(group, config(tmp_path, text), flag) == parsed(group, flag)
    err = capsys.readouterr().err
    assert err.startswith(f"left out of the config file: --{' --'.join(left_out.split())} only act")
    assert err.count("\n") == 1


def test_what_else_a_config_file_says_stays(tmp_path):
    text = "finetune_mode: lora\nlora_rank: 4\ndisable_dropout: true\n"
    assert parsed(ModelArgs, config(tmp_path, text), "--finetune_mode=all") == ModelArgs(disable_dropout=True)


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("lora_rank: 4\n", []),
        ("lora_rank: 4\n", ["--disable_dropout"]),
        ("finetune_mode: lora\nlora_rank: 4\n", ["--finetune_mode=all", "--lora_rank=2"]),
        ("finetune_mode: all\n", ["--lora_rank=2"]),
    ],
)
def test_a_flag_without_effect_is_refused_where_the_command_line_did_not_decide_so(tmp_path, capsys, text, argv):
    reason = refused(capsys, config(tmp_path, text), *argv, groups=[ModelArgs])
    assert reason == "--lora_rank only acts with --finetune_mode=lora"


def test_an_empty_config_file_changes_nothing(tmp_path):
    assert parsed(SFTArgs, config(tmp_path, "# nothing yet\n")) == parsed(SFTArgs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1\n", "unknown flag 'learning_rat'; did you mean learning_rate?"),
        ("xyzzy: 1\n", "unknown flag 'xyzzy'"),
        ("1: 2\n", "unknown flag 1"),
        ("- seed\n", "expected `flag: value` lines, got list"),
        ("seed\n", "expected `flag: value` lines, got str"),
    ],
)
def test_a_config_file_of_something_else_is_refused(tmp_path, capsys, text, message):
    reason = refused(capsys, config(tmp_path, text))
    assert reason.startswith(f"--config {tmp_path / 'flags.yaml'}: ")
    assert reason.endswith(message)


@pytest.mark.parametrize("content", [b"seed: [1\n", b"a: b: c\n", b"\xff\xfe\x00", b"\tseed: 1\n"])
def test_a_config_file_that_is_no_yaml_is_refused(tmp_path, capsys, content):
    (tmp_path / "flags.yaml").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        parse(SFTArgs, argv=[f"--config={tmp_path / 'flags.yaml'}"])
    assert stop.value.code == 2
    assert f"error: --config {tmp_path / 'flags.yaml'}: " in capsys.readouterr().err


def test_a_config_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert "No such file" in refused(capsys, f"--config={tmp_path / 'none.yaml'}")


def test_a_wrong_value_in_a_config_file_is_refused_like_one_on_the_command_line(tmp_path, capsys):
    assert "--epochs: invalid int value: 'many'" in refused(capsys, config(tmp_path, "epochs: many\n"))
    assert "--epochs lies between 1" in refused(capsys, config(tmp_path, "epochs: 0\n"))


# --- refusals ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--epochs=x", "argument --epochs: invalid int value: 'x'"),
        ("--epochs", "argument --epochs: expected one argument"),
        ("--optimizer=SGD", "invalid choice: 'SGD'"),
        ("--nope=1", "unrecognized arguments: --nope=1"),
        ("--epoch=3", "unrecognized arguments: --epoch=3"),  # no abbreviations: a flag added later would break them
        ("--epochs=0", "--epochs lies between"),
        ("--max_steps=0", "--max_steps lies between"),
        ("--eval_iters=0", "--eval_iters lies between"),
        ("--gradient_clip_val=-1", "--gradient_clip_val lies between"),
        ("--save_interval=0", "--save_interval lies between"),
        ("--eval_interval=-1", "--eval_interval lies between"),
        ("--log_interval=0", "--log_interval lies between"),
        ("--mini_batch_size=0", "--mini_batch_size lies between"),
        ("--micro_batch_size=0", "--micro_batch_size lies between"),
        ("--micro_batch_tokens=0", "--micro_batch_tokens lies between"),
        ("--micro_batch_tokens=512 --micro_batch_size=2", "--micro_batch_size only acts without --micro_batch_tokens"),
        ("--mini_batch_size=8 --micro_batch_size=3", "--micro_batch_size 3 must divide --mini_batch_size 8"),
        ("--mini_batch_size=2 --micro_batch_size=4", "--micro_batch_size 4 must divide --mini_batch_size 2"),
    ],
)
def test_training_refuses(capsys, argv, message):
    for group in (SFTArgs, RMArgs, PPOArgs, DPOArgs):
        assert message in refused(capsys, *argv.split(), groups=[group])


def test_length_of_packed_rows(capsys):
    assert "--packing_length only acts with --packing" in refused(capsys, "--packing_length=512", groups=[SFTArgs])
    assert "--packing_length lies between" in refused(capsys, "--packing", "--packing_length=0", groups=[SFTArgs])


def test_a_negative_weight_of_centering_is_refused(capsys):
    assert "--center_rewards_coeff lies between 0" in refused(capsys, "--center_rewards_coeff=-1", groups=[RMArgs])


def test_micro_batches_that_divide_are_taken():
    result = parsed(SFTArgs, "--mini_batch_size=8", "--micro_batch_size=2")
    assert (result.mini_batch_size, result.micro_batch_size, result.validation_batch_size) == (8, 2, 2)
    by_tokens = parsed(SFTArgs, "--mini_batch_size=6", "--micro_batch_tokens=512")  # 4, the default, does not divide 6
    assert (by_tokens.micro_batch_tokens, by_tokens.validation_batch_size) == (512, 6)


@pytest.mark.parametrize("flag", ["--lora_targets=q_proj", "--lora_rank=4", "--lora_alpha=16", "--lora_dropout=0.1"])
@pytest.mark.parametrize("mode", ["all", "last_layer"])
def test_lora_flags_are_refused_without_lora(capsys, flag, mode):
    name = flag.partition("=")[0]
    reason = refused(capsys, f"--finetune_mode={mode}", flag, groups=[ModelArgs])
    assert reason == f"{name} only acts with --finetune_mode=lora"
    parsed(ModelArgs, "--finetune_mode=lora", flag)


def test_several_lora_flags_are_named_together(capsys):
    reason = refused(capsys, "--lora_rank=4", "--lora_alpha=16", groups=[ModelArgs])
    assert reason.startswith("--lora_rank --lora_alpha only act")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lora_rank=0 --finetune_mode=lora", "--lora_rank lies between 1"),
        ("--load_in_8bit", "--load_in_8bit only acts with --finetune_mode=lora"),
        ("--load_in_4bit", "--load_in_4bit only acts with --finetune_mode=lora: 4-bit weights cannot train"),
        ("--finetune_mode=lora --load_in_8bit --load_in_4bit", "--load_in_8bit or --load_in_4bit, not both"),
        ("--finetune_mode=head", "invalid choice: 'head'"),
        (
            "--finetune_mode=last_layer --gradient_checkpointing",
            "--gradient_checkpointing only acts where layers",
        ),
    ],
)
def test_model_refuses(capsys, argv, message):
    assert message in refused(capsys, *argv.split(), groups=[ModelArgs])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--max_new_tokens=0", "--max_new_tokens lies between"),
        ("--temperature=0", "--temperature lies between"),
        ("--temperature=nan", "--temperature lies between"),
        ("--top_p=0", "--top_p lies between"),
        ("--top_p=1.1", "--top_p lies between"),
        ("--top_k=-1", "--top_k lies between"),
    ],
)
def test_generation_refuses(capsys, argv, message):
    for group in (GenerationArgs, RolloutArgs, ChatArgs):
        assert message in refused(capsys, argv, groups=[group])


@pytest.mark.parametrize("argv", ["--top_k=50", "--top_p=0.9", "--do_sample=False", "--no_do_sample", "--num_beams=2"])
def test_rollouts_refuse_what_bends_the_distribution(capsys, argv):
    assert "in PPO: rollouts must come from the actor's own distribution" in refused(capsys, argv, groups=[RolloutArgs])
    parsed(GenerationArgs, argv)
    parsed(RolloutArgs, "--temperature=0.7", "--num_return_sequences=2", "--max_new_tokens=3")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--rollout_size=16 --rollout_mini_batch_size=17",
            "--rollout_mini_batch_size 17 is more than --rollout_size 16; lower it, too",
        ),
        ("--rollout_mini_batch_size=0", "--rollout_mini_batch_size lies between"),
        ("--ppo_epochs=0", "--ppo_epochs lies between"),
        ("--clip_coeff=-1", "--clip_coeff lies between"),
        ("--init_kl_coeff=-1", "--init_kl_coeff lies between"),
        ("--gae_gamma=7", "--gae_gamma lies between"),
        ("--adaptive_kl_coeff --target_kl_coeff=0", "--target_kl_coeff lies between"),
        ("--target_kl_coeff=1", "--target_kl_coeff only acts with --adaptive_kl_coeff"),
        ("--clip_rewards=False --reward_clip_value=1", "--reward_clip_value only acts with --clip_rewards"),
        ("--kl_controller=error", "--kl_controller only acts with --adaptive_kl_coeff"),
        ("--adaptive_kl_coeff --kl_controller=error --kl_horizon=5", "--kl_horizon only acts with --kl_controller=hor"),
        ("--huber_delta=1", "--huber_delta only acts with --value_loss=huber"),
        ("--advantage_estimator=rloo --vf_coeff=1", "--vf_coeff only acts with --advantage_estimator=gae"),
        ("--advantage_estimator=grpo --critic_init=sft", "--critic_init only acts with --advantage_estimator=gae"),
        ("--share_backbone=all --actor_class=mine", "--share_backbone shares the weights of the SFT model, not those"),
        ("--share_backbone=critic --share_actor_critic", "--share_backbone=critic only acts where there is a critic"),
        ("--share_backbone=critic --advantage_estimator=rloo", "--share_backbone=critic only acts where there is a"),
        ("--share_actor_critic --critic_warmup_steps=1", "--critic_warmup_steps only acts with --share_actor_critic=F"),
        ("--dual_clip=0.5", "--dual_clip is 0 or more than 1, got 0.5"),
    ],
)
def test_ppo_refuses(capsys, argv, message):
    assert message in refused(capsys, *argv.split(), groups=[PPOArgs])


def test_ppo_takes_what_is_just_allowed():
    parsed(PPOArgs, "--rollout_size=8", "--rollout_mini_batch_size=8", "--mini_batch_size=8", "--micro_batch_size=8")


def test_a_standard_deviation_is_taken_over_all_devices():
    few = ["--rollout_size=1", "--rollout_mini_batch_size=1", "--mini_batch_size=1", "--micro_batch_size=1"]
    args = parsed(PPOArgs, *few)
    args.check_rollout(1, devices=8)
    with pytest.raises(
        ValueError, match=r"^--normalize_rewards needs --rollout_size of at least 8 over .*, got 7; raise"
    ):
        args.check_rollout(1, devices=7)
    parsed(PPOArgs, *few, "--normalize_rewards=False").check_rollout(1, devices=1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--beta=0", "--beta lies between"),
        ("--beta=-0.1", "--beta lies between"),
        ("--beta=nan", "--beta lies between"),
        ("--label_smoothing=0.5", "--label_smoothing 0.5 takes no less than half of the preferences to be wrong"),
        ("--label_smoothing=-0.1", "--label_smoothing lies between"),
    ],
)
def test_dpo_refuses(capsys, argv, message):
    assert message in refused(capsys, argv, groups=[DPOArgs])


def test_dpo_takes_what_is_just_allowed():
    parsed(DPOArgs, "--label_smoothing=0.49", "--beta=1e-6", "--reference_free")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("--sft_experiment_dir", "the following arguments are required: --sft_experiment_dir"),
        ("--rm_experiment_dir", "nothing gives a reward: pass --rm_experiment_dir, --reward_config or --reward"),
    ],
)
def test_ppo_needs_a_start_and_a_reward(capsys, missing, message):
    with pytest.raises(SystemExit) as stop:
        parse(PPOArgs, argv=[token for token in REQUIRED[PPOArgs] if not token.startswith(missing)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_rewards_come_from_file_and_command_line(tmp_path):
    (tmp_path / "ppo.yaml").write_text("reward: [length=1, repetition=2]\nreward_config: r.yaml\n")
    from_file = parsed(PPOArgs, *REQUIRED[PPOArgs], f"--config={tmp_path}/ppo.yaml")
    assert from_file.reward == ["length=1", "repetition=2"]
    both = parsed(PPOArgs, *REQUIRED[PPOArgs], f"--config={tmp_path}/ppo.yaml", "--reward", "a", "b", "--reward=c")
    assert (both.reward, both.reward_config) == (["a", "b", "c"], "r.yaml")
    assert both.critic_start == "rm"
    assert parse(PPOArgs, argv=["--sft_experiment_dir=x", "--reward=a"])[0].critic_start == "sft"
    assert parsed(PPOArgs, *REQUIRED[PPOArgs], "--critic_init=sft").critic_start == "sft"


def test_the_help_names_every_start_of_the_critic(capsys):
    with pytest.raises(SystemExit):
        parse(PPOArgs, argv=["--help"])
    assert "--critic_init {auto,rm,sft}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--validation_percentage=1", "--validation_percentage lies between"),
        ("--validation_percentage=-0.1", "--validation_percentage lies between"),
        ("--test_percentage=10", "--test_percentage lies between"),
        ("--max_prompt_length=0", "--max_prompt_length lies between"),
        ("--max_length=257", "leaves no room for a response after --max_prompt_length 256; raise it to at least 258"),
        ("--num_workers=0", "--num_workers must be at least 1, got 0"),
        ("--num_samples=0", "--num_samples lies between"),
        ("--stage=prompt", "--stage_split 1,1,0 gives --stage prompt none"),
        ("--stage_split=0,1,1", "--stage_split 0,1,1 gives --stage finetune none"),
        ("--stage_split=1,2", "--stage_split takes three weights such as 2,4,4, got '1,2'"),
        ("--stage_split=a,b,c", "--stage_split takes three weights such as 2,4,4, got 'a,b,c'"),
        ("--stage_split=2,-1,1", "--stage_split takes three weights such as 2,4,4, got '2,-1,1'"),
        ("--stage_split=0,0,0", "--stage_split takes three weights such as 2,4,4, got '0,0,0'"),
        ("--stage=rm", "invalid choice: 'rm'"),
    ],
)
def test_data_preparation_refuses(capsys, argv, message):
    assert message in refused(capsys, argv, groups=[TextDataArgs])


def test_data_preparation_takes_what_is_just_allowed():
    parsed(TextDataArgs, "--max_length=258", "--validation_percentage=0", "--test_percentage=0", "--num_workers=1")


def test_zh_sentiment_flags(capsys):
    assert parsed(ZhSentimentArgs, "--stage=prompt", "--num_prompts=5").stage_shares == {"prompt": 1.0}
    assert not parsed(ZhSentimentArgs, "--no_remove_leak").remove_leak
    for argv, reason in (
        ("--num_prompts=5", "--num_prompts only acts with --stage=prompt"),
        ("--prompts=x", "--prompts only acts with --stage=prompt"),
        ("--opening_length=1", "--opening_length lies between 2 and"),
        ("--stage=rank", "invalid choice: 'rank'"),
    ):
        assert reason in refused(capsys, argv, groups=[ZhSentimentArgs])
    common = {"destination_dir": "d", "tokenizer_name": "t"}
    for changes, reason in (
        ({"rank_lists": "r"}, "--stage=finetune needs --source, the reviews"),
        ({"stage": "preference", "source": "s"}, "--stage=preference needs --rank_lists"),
        ({"source": "s"}, "pass it, or --remove_leak=False"),
    ):
        with pytest.raises(ValueError, match=reason):
            ZhSentimentArgs(**common, **changes)
    assert ZhSentimentArgs(**common, stage="prompt").source is None


def test_daily_dialog_flags(capsys):
    assert parsed(DailyDialogArgs).separator == "\n"
    assert parsed(DailyDialogArgs, r"--turn_separator=\t|\n").separator == "\t|\n"
    assert parsed(DailyDialogArgs, "--turn_separator= |", "--stage=classify").separator == " |"
    for argv in ("--context_turns=0", "--minimum_turns=0"):
        assert "lies between 1 and" in refused(capsys, argv, groups=[DailyDialogArgs])
    assert "invalid choice: 'preference'" in refused(capsys, "--stage=preference", groups=[DailyDialogArgs])


# --- run ---


@pytest.fixture
def _plain_warnings(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


@pytest.mark.usefixtures("_plain_warnings")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad --x"),
        FileNotFoundError("no a.pt"),
        FileExistsError("b is there"),
        json.JSONDecodeError("x", "", 0),
    ],
)
def test_run_turns_a_users_error_into_one_line_and_exit_code_2(capsys, error):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        run(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.usefixtures("_plain_warnings")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Interrupted("SIGTERM: stopped"), 75, "SIGTERM: stopped; the same command with --resume continues"),
        (Interrupted("SIGTERM: stopped", is_first=False), 0, ""),
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left on device"), 2, "No space left on device; make room, and go on with --resume"),
        (OSError(13, "Permission denied"), 2, "error: [Errno 13] Permission denied"),
    ],
)  # fmt: skip
def test_run_turns_an_end_from_outside_into_its_exit_code(capsys, error, code, said):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        run(main)
    assert stop.value.code == code
    assert capsys.readouterr().err.strip().endswith(said)


def test_run_leaves_a_full_disk_in_a_thread_to_the_next_writer(capsys, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def failing(error):
        def call():
            raise error

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run(lambda: failing(OSError(28, "No space left on device")))
    assert capsys.readouterr().err == ""
    run(lambda: failing(RuntimeError("a fault of ours")))
    assert "a fault of ours" in capsys.readouterr().err


def test_run_says_that_there_is_nothing_left_to_do(capsys):
    def main():
        raise Finished("x is finished")

    run(main)  # exit code 0
    assert capsys.readouterr().out == "x is finished\n"


def test_run_keeps_the_traceback_of_a_fault_of_ours():
    def main():
        raise KeyError("not the user's")

    with pytest.raises(KeyError, match="not the user's"):
        run(main)


@pytest.mark.usefixtures("_plain_warnings")
def test_run_prints_warnings_without_source_lines():
    run(lambda: None)
    assert warnings.formatwarning("cut to 3", UserWarning, "optim.py", 7) == "warning: cut to 3\n"


@pytest.mark.parametrize("argv", ["--learning_rate=-1", "--lr_warmup_steps=-5", "--label_smoothing=3"])
def test_supervised_fine_tuning_refuses(capsys, argv):
    assert f"{argv.split('=')[0]} lies between" in refused(capsys, argv, groups=[SFTArgs])


def test_a_negated_flag_with_a_value_does_not_pass_for_success(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(PPOArgs, argv=["--no_clip_rewards=True", "--sft_experiment_dir=a", "--rm_experiment_dir=b"])
    assert stop.value.code == 2


def test_sampling_flags_are_refused_without_sampling(capsys):
    message = "--top_p only acts when sampling, not with --do_sample=False"
    assert message in refused(capsys, "--do_sample=False", "--top_p=0.5", groups=[GenerationArgs])


def test_mini_batches_count_responses_and_rollouts_prompts():
    sizes = ["--rollout_size=8", "--rollout_mini_batch_size=8", "--mini_batch_size=32"]
    args = parsed(PPOArgs, *sizes, "--advantage_estimator=rloo")
    args.check_rollout(4, devices=1)
    with pytest.raises(ValueError, match="--mini_batch_size 32 is larger than --rollout_size 8 x 3 responses"):
        args.check_rollout(3, devices=1)
    with pytest.raises(ValueError, match="--advantage_estimator=rloo needs --num_return_sequences of at least 2"):
        args.check_rollout(1, devices=1)
    with pytest.raises(ValueError, match=r"--mini_batch_size 32 is larger than --rollout_size 8$"):
        parsed(PPOArgs, *sizes).check_rollout(1, devices=1)
