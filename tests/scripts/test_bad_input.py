"""Wrong input to the stages: exit code 2, one line that says what to do, and nothing written."""

import json
import re
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_stages.cli import run
from rlhf_stages.experiment import resolve_checkpoint

from helpers import (
    ROOT,
    load_script,
    make_tokenizer,
    run_stage,
    save_classifier,
    save_encoder,
    toy_rows,
    write_data,
    write_toy_data,
)

TOKENS = "--max_new_tokens=4"
STAGES = ("sft", "rm", "ppo", "dpo")


@pytest.fixture
def flags(tiny_run, tmp_path):
    """Flags that run each stage for a step; a later flag wins."""
    common = [f"--data_dir={tiny_run.data}", f"--log_dir={tmp_path / 'runs'}", "--accelerator=cpu", "--devices=1"]
    common += ["--max_steps=1"]
    sft, rm = f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}"
    return {
        "sft": [*common, f"--model_name={tiny_run.model}", TOKENS],
        "rm": [*common, sft],
        "ppo": [*common, sft, rm, TOKENS, "--rollout_size=8", "--rollout_mini_batch_size=8"],
        "dpo": [*common, sft, TOKENS],
    }


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a stage as its script does and returns the line that says what is wrong."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # run() sets another

    def running(stage, argv):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run(lambda: load_script(f"scripts/rlhf_{stage}.py").main(argv))
        assert caught.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert "error: " in lines[-1]
        assert sum("error:" in line for line in lines) == 1
        assert not any("Traceback" in line for line in lines)
        assert not (tmp_path / "runs").exists()
        return lines[-1].partition("error: ")[2]

    return running


def copy_of(folder, target):
    """A copy that may be changed."""
    shutil.copytree(folder, target)
    for manifest in target.rglob("manifest.json"):
        manifest.unlink()
    return target


# Flags


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_that_do_not_divide(refused, flags, stage):
    message = refused(stage, [*flags[stage], "--mini_batch_size=6", "--micro_batch_size=4"])
    assert message.startswith("--micro_batch_size 4 must divide --mini_batch_size 6")


def test_no_model(refused, flags):
    argv = [flag for flag in flags["sft"] if "model_name" not in flag]
    assert refused("sft", argv).startswith("--model_name is required: the model to fine-tune")
    for stage in ("rm", "dpo"):
        argv = [flag for flag in flags[stage] if "sft_experiment" not in flag]
        assert refused(stage, argv).startswith("give --sft_experiment_dir (an SFT experiment) or --model_name")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rollout_mini_batch_size=9"], "--rollout_mini_batch_size 9 is more than --rollout_size 8; lower it, too"),
        (["--rollout_size=4", "--rollout_mini_batch_size=4"], "--normalize_rewards needs --rollout_size of at least 8"),
        (["--top_k=5"], "--top_k=0 --top_p=1.0 in PPO"),
        (["--nonsense=1"], "unrecognized arguments: --nonsense=1"),
    ],
)
def test_flags_that_cannot_be(refused, flags, more, message):
    assert refused("ppo", [*flags["ppo"], *more]).startswith(message)


def test_flags_of_dpo_that_cannot_be(refused, flags):
    assert refused("dpo", [*flags["dpo"], "--label_smoothing=0.5"]).startswith("--label_smoothing 0.5 takes no less")
    assert refused("dpo", [*flags["dpo"], "--beta=0"]).startswith("--beta lies between")
    message = refused("dpo", [*flags["dpo"], "--finetune_mode=lora", "--lora_targets=nope"])
    assert message.startswith("--lora_targets=nope: ")


def test_parents_are_required(refused, flags):
    argv = [flag for flag in flags["ppo"] if "experiment_dir" not in flag]
    assert "required: --sft_experiment_dir" in refused("ppo", argv)


# Models and experiments


@pytest.mark.parametrize("name", ["sft", "rm"])
def test_parents_that_are_missing_or_of_another_stage(refused, flags, tiny_run, tmp_path, name):
    flag, other = f"--{name}_experiment_dir", {"sft": tiny_run.rm, "rm": tiny_run.sft}[name]
    for stage in ("rm", "ppo", "dpo") if name == "sft" else ("ppo",):
        message = refused(stage, [*flags[stage], f"{flag}={tmp_path / 'gone'}"])
        assert message.startswith(f"{flag}={tmp_path / 'gone'}: no folder")
        message = refused(stage, [*flags[stage], f"{flag}={other}"])
        assert message == f"{flag}={other} is an experiment of stage '{other.name}', expected '{name}'"


def test_parents_without_a_checkpoint(refused, flags, tiny_run, tmp_path):
    unfinished = copy_of(tiny_run.sft, tmp_path / "sft")
    shutil.rmtree(unfinished / "checkpoints")
    message = refused("ppo", [*flags["ppo"], f"--sft_experiment_dir={unfinished}"])
    assert "has no finished checkpoint yet" in message


@pytest.mark.parametrize("stage", ["rm", "ppo", "dpo"])
def test_a_contradicting_model_name(refused, flags, stage):
    message = refused(stage, [*flags[stage], "--model_name=someone/else"])
    assert message.startswith("--model_name=someone/else contradicts --sft_experiment_dir, which was made from")


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_a_reward_model_as_policy(refused, flags, tiny_run, stage):
    argv = [flag for flag in flags[stage] if "sft_experiment" not in flag]
    message = refused(stage, [*argv, f"--model_name={resolve_checkpoint(tiny_run.rm)}"])
    assert "GPT2ForSequenceClassification, which scores texts; expected a causal language model" in message


@pytest.mark.parametrize("loss_type", ["per_sample", "per_token", "average"])
def test_token_losses_of_an_encoder(refused, flags, tmp_path, loss_type):
    argv = [flag for flag in flags["rm"] if "sft_experiment" not in flag]
    model = save_encoder(tmp_path / "bert")
    message = refused("rm", [*argv, f"--model_name={model}", f"--loss_type={loss_type}"])
    assert message.startswith(f"{model}: BertForSequenceClassification is an encoder, which scores whole texts")
    assert "--loss_type=last_token" in message


def test_a_critic_from_an_encoder(refused, flags, tiny_run, tmp_path):
    rm = copy_of(tiny_run.rm, tmp_path / "rm")
    shutil.rmtree(resolve_checkpoint(rm))
    save_classifier(rm / "checkpoints" / "step-000002", "bert")
    message = refused("ppo", [*flags["ppo"], f"--rm_experiment_dir={rm}"])
    assert "no critic can start from it: give PPO --critic_init=sft" in message


def test_a_reward_model_without_a_scale(refused, flags, tiny_run, tmp_path):
    rm = copy_of(tiny_run.rm, tmp_path / "rm")
    file = resolve_checkpoint(rm) / "config.json"
    content = {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("reward_")}
    file.write_text(json.dumps(content))
    message = refused("ppo", [*flags["ppo"], f"--rm_experiment_dir={rm}", "--standardize_rewards"])
    assert "so its scores cannot be standardized; rlhf_rm.py writes both" in message


def test_a_model_that_is_not_there(refused, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refused("sft", [*flags["sft"], f"--model_name={tmp_path / 'gone'}"])
    assert str(tmp_path / "gone") in message


@pytest.mark.parametrize(("stage", "parent"), [("rm", "sft"), ("ppo", "sft"), ("ppo", "rm"), ("dpo", "sft")])
def test_a_damaged_checkpoint(refused, flags, tiny_run, tmp_path, stage, parent):
    damaged = copy_of(getattr(tiny_run, parent), tmp_path / parent)
    file = resolve_checkpoint(damaged) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = refused(stage, [*flags[stage], f"--{parent}_experiment_dir={damaged}"])
    assert message.removeprefix("reward 'rm': ").startswith(f"no model could be loaded from '{file.parent}'")


@pytest.mark.parametrize("how", ["cut off", "another byte", "gone"])
@pytest.mark.parametrize(("stage", "parent"), [("rm", "sft"), ("ppo", "sft"), ("ppo", "rm"), ("dpo", "sft")])
def test_a_checkpoint_that_is_not_what_was_written(refused, flags, tiny_run, tmp_path, stage, parent, how):
    damaged = tmp_path / parent
    shutil.copytree(getattr(tiny_run, parent), damaged)
    file = resolve_checkpoint(damaged) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content[:-1000] if how == "cut off" else content)
    if how == "gone":
        file.unlink()
    message = refused(stage, [*flags[stage], f"--{parent}_experiment_dir={damaged}"])
    assert message.startswith(f"--{parent}_experiment_dir={damaged}: {file.parent}: model.safetensors ")
    assert "; the checkpoint is damaged, or was changed by hand (then delete manifest.json); run its stage" in message


def test_a_reward_model_that_lost_its_head(refused, flags, tiny_run, tmp_path):
    headless = copy_of(tiny_run.rm, tmp_path / "rm")
    file = resolve_checkpoint(headless) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items() if name != "score.weight"}
    save_file(tensors, file, metadata={"format": "pt"})
    message = refused("ppo", [*flags["ppo"], f"--rm_experiment_dir={headless}"])
    assert "has no trained reward head (score.weight)" in message


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_not_numbers(flags, tiny_run, tmp_path, stage):
    parent = {"sft": tiny_run.model, "rm": tiny_run.sft, "ppo": tiny_run.rm, "dpo": tiny_run.sft}[stage]
    experiment = copy_of(parent, tmp_path / "nan")
    file = resolve_checkpoint(experiment) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["transformer.ln_f.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    name = {"sft": "model_name", "ppo": "rm_experiment_dir"}.get(stage, "sft_experiment_dir")
    with pytest.raises(FloatingPointError, match=r"is not a number|gradient norm is nan"):
        load_script(f"scripts/rlhf_{stage}.py").main([*flags[stage], f"--{name}={experiment}"])
    assert not list((tmp_path / "runs").rglob("step-*"))


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_an_existing_run(tiny_run, flags, capsys, monkeypatch, stage):
    existing = tiny_run.sft.parents[2]
    parents = {name: getattr(tiny_run, name) for name in ("sft", "rm")}
    before = {path: path.stat().st_mtime_ns for path in parents[stage].rglob("*")}
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit) as caught:
        run(lambda: load_script(f"scripts/rlhf_{stage}.py").main([*flags[stage], f"--log_dir={existing}"]))
    assert caught.value.code == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(
        f"error: {parents[stage]} holds a run already; continue it with --resume, choose another --experiment_name, or"
    )
    assert {path: path.stat().st_mtime_ns for path in parents[stage].rglob("*")} == before


# Data


@pytest.mark.parametrize("stage", STAGES)
def test_data_of_another_tokenizer(refused, flags, tmp_path, stage):
    other = make_tokenizer(bos_token="<unk>")
    data = write_toy_data(tmp_path / "toy" / "other", other)
    message = refused(stage, [*flags[stage], f"--data_dir={data}"])
    assert message.startswith(f"{data} was prepared with the tokenizer of 'toy'")
    assert "prepare the data again with --tokenizer_name=" in message


def test_brought_along_data_of_another_tokenizer(refused, flags, tmp_path):
    """Without a fingerprint, ids that the model does not have give it away."""
    rows = [{"prompt_len": 2, "input_ids": torch.tensor([1, 5, 300, 2]), "targets": torch.tensor([-1, -1, 300, 2])}]
    data = write_data(tmp_path / "toy" / "own", make_tokenizer())
    (data / "args.json").write_text(json.dumps({"tokenizer_name": "someone/else"}))
    torch.save(rows, data / "finetune_train.pt")
    message = refused("sft", [*flags["sft"], f"--data_dir={data}"])
    assert "has token ids from 1 to 300, but the model's vocabulary has 100: it was prepared with another" in message


def test_seed_style_data_trains(flags, tmp_path):
    ids = torch.tensor([1, 5, 6, 7, 2])
    rows = [{"prompt_len": 2, "input_ids": ids, "targets": torch.tensor([-1, -1, 6, 7, 2])}] * 4
    data = write_data(tmp_path / "toy" / "own", make_tokenizer())
    (data / "args.json").write_text(json.dumps({"tokenizer_name": "someone/else"}))
    for split in ("train", "validation"):
        torch.save(rows, data / f"finetune_{split}.pt")
    assert (load_script("scripts/rlhf_sft.py").main([*flags["sft"], f"--data_dir={data}"]) / "summary.json").is_file()


def test_seed_style_preferences_train_also_without_a_prompt(flags, tmp_path):
    chosen, rejected = torch.tensor([1, 5, 6, 7, 2]), torch.tensor([1, 5, 8, 2])
    rows = [{"prompt_len": n, "chosen_input_ids": chosen, "rejected_input_ids": rejected} for n in (0, 1, 2)]
    data = write_data(tmp_path / "toy" / "own", make_tokenizer())
    (data / "args.json").write_text(json.dumps({"tokenizer_name": "someone/else"}))
    for split in ("train", "validation"):
        torch.save(rows, data / f"preference_{split}.pt")
    assert (load_script("scripts/rlhf_dpo.py").main([*flags["dpo"], f"--data_dir={data}"]) / "summary.json").is_file()


@pytest.mark.parametrize(
    ("stage", "shard"),
    [
        ("sft", "finetune_train"),
        ("rm", "preference_train"),
        ("ppo", "finetune_train"),
        ("dpo", "preference_train"),
    ],
)
def test_shards_that_are_missing_or_damaged(refused, flags, tiny_run, tmp_path, stage, shard):
    data = copy_of(tiny_run.data, tmp_path / "toy" / "tiny")
    argv, file = [*flags[stage], f"--data_dir={data}"], data / f"{shard}.pt"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert refused(stage, argv).startswith(f"{file} is not a readable shard")
    file.unlink()
    assert refused(stage, argv).startswith(f"no shard {file}; data_prep/<dataset>/prepare_data.py writes it")


@pytest.mark.parametrize(("stage", "shard"), [("sft", "finetune_validation"), ("dpo", "preference_validation")])
def test_a_damaged_validation_shard(refused, flags, tiny_run, tmp_path, stage, shard):
    data = copy_of(tiny_run.data, tmp_path / "toy" / "tiny")
    (data / f"{shard}.pt").write_bytes(b"junk")
    assert "is not a readable shard" in refused(stage, [*flags[stage], f"--data_dir={data}"])


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_fine_tuning_data_for_preferences(refused, flags, tiny_run, tmp_path, stage):
    data = copy_of(tiny_run.data, tmp_path / "toy" / "tiny")
    shutil.copy(data / "finetune_train.pt", data / "preference_train.pt")
    message = refused(stage, [*flags[stage], f"--data_dir={data}"])
    assert "record 0 has 1 responses, expected at least 2" in message


def test_margins_of_data_without_ratings(refused, flags, tiny_run):
    message = refused("rm", [*flags["rm"], "--use_margin"])
    assert message.startswith(f"{tiny_run.data / 'preference_train.pt'} has no ratings to take margins from")


@pytest.mark.parametrize("stage", ["sft", "ppo", "dpo"])
@pytest.mark.parametrize("content", [None, b"junk"])
def test_example_prompt_that_is_missing_or_damaged(refused, flags, tiny_run, tmp_path, stage, content):
    data = copy_of(tiny_run.data, tmp_path / "toy" / "tiny")
    (data / "example_prompt.pt").unlink()
    if content:
        (data / "example_prompt.pt").write_bytes(content)
    message = refused(stage, [*flags[stage], f"--data_dir={data}"])
    assert f"{data / 'example_prompt.pt'}" in message


@pytest.mark.parametrize("stage", STAGES)
def test_no_data_folder(refused, flags, tmp_path, stage):
    message = refused(stage, [*flags[stage], f"--data_dir={tmp_path / 'gone'}"])
    assert message.startswith(f"no {tmp_path / 'gone' / 'args.json'}; --data_dir must be a folder written by")


@pytest.mark.parametrize("stage", STAGES)
def test_texts_that_are_longer_than_the_positions_of_the_model(refused, flags, tmp_path, stage):
    data = tmp_path / "toy" / "long"
    rows = [(prompt, good * 9, bad * 9) for prompt, (good, bad, _) in toy_rows(8)]
    write_data(data, make_tokenizer(), finetune={"train": [row[:2] for row in rows]}, preference={"train": rows})
    more = "--max_new_tokens=60" if stage == "ppo" else "--max_steps=1"  # PPO reads no responses
    line = refused(stage, [*flags[stage], f"--data_dir={data}", more])
    assert re.search(r"take up to \d+ tokens, and the model has positions for 64; ", line)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_samples_that_are_longer_than_the_positions_of_the_model(refused, flags, stage):
    assert "positions for 64; lower --max_new_tokens" in refused(stage, [*flags[stage], "--max_new_tokens=64"])


def test_a_reward_model_with_fewer_positions_than_the_actor(refused, flags, tmp_path):
    short = save_classifier(tmp_path / "short", "llama", max_position_embeddings=9)
    line = refused("ppo", [*flags["ppo"], "--reward", f"short=1,type=reward_model,path={short}"])
    assert line.startswith("for the reward 'short' prompts and responses take up to ")


@pytest.mark.parametrize("stage", STAGES)
def test_data_without_a_validation_shard_still_train(flags, tiny_run, tmp_path, stage):
    data = copy_of(tiny_run.data, tmp_path / "toy" / "tiny")
    for file in data.glob("*_validation.pt"):
        file.unlink()
    with pytest.warns(UserWarning, match="nothing is validated"):
        experiment = load_script(f"scripts/rlhf_{stage}.py").main([*flags[stage], f"--data_dir={data}"])
    assert (experiment / "best").read_text() == (experiment / "latest").read_text() == "step-000001\n"
    text = (experiment / "summary.json").read_text()
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))  # which are no JSON


@pytest.mark.slow
def test_the_script_itself_ends_in_one_line(flags, tmp_path):
    argv = [*flags["rm"], f"--sft_experiment_dir={tmp_path / 'gone'}"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "rlhf_rm.py"), *argv], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: --sft_experiment_dir={tmp_path / 'gone'}: no folder")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_overwrite_replaces_a_run(tiny_run, flags, tmp_path):
    first = load_script("scripts/rlhf_sft.py").main(flags["sft"])
    (first / "note.txt").write_text("mine")
    again = load_script("scripts/rlhf_sft.py").main([*flags["sft"], "--overwrite"])
    assert again == first
    assert not (first / "note.txt").exists()
    assert run_stage("rm", tmp_path / "rms", tiny_run.data, f"--sft_experiment_dir={again}", "--max_steps=1").is_dir()


def test_a_policy_whose_tokenizer_differs_from_the_reward_models(refused, flags, tiny_run, tmp_path):
    rm = copy_of(tiny_run.rm, tmp_path / "rm")
    make_tokenizer(eos_token="<unk>").save_pretrained(resolve_checkpoint(rm))
    message = refused("ppo", [*flags["ppo"], f"--rm_experiment_dir={rm}"])
    assert message.startswith(f"the tokenizer of {resolve_checkpoint(rm)} is not that of --sft_experiment_dir")
    assert "--critic_init=sft" in message
