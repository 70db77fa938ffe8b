"""Runs that are stopped, killed, continued and refused, each through its script's main()."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

from rlhf_stages import loop
from rlhf_stages.cli import Finished, Interrupted, run
from rlhf_stages.functional import tokens
from rlhf_stages.keeper import Keeper
from rlhf_stages.rewards import learned

from helpers import ROOT, make_tokenizer, run_stage, toy_rows, write_data

STEPS = 7
# saves at 2, 4, 6, 7, validations at 3, 6 and with each save, log lines at 3, 6, 7: never all at once
COMMON = [f"--max_steps={STEPS}", "--save_interval=2", "--eval_interval=3", "--log_interval=3"]
LEARN = ["--learning_rate=1e-3", "--lr_warmup_steps=2", "--epochs=2", "--weight_decay=0.01"]
TOKENS = "--max_new_tokens=5"
PPO = [
    "--rollout_size=8", "--rollout_mini_batch_size=5", "--mini_batch_size=6", "--micro_batch_size=3", "--epochs=3",
    "--eval_iters=1", "--ppo_epochs=2", "--adaptive_kl_coeff", "--actor_learning_rate=1e-3", TOKENS,
    "--critic_learning_rate=1e-3", "--actor_lr_schedule=cosine",
]  # fmt: skip
LORA = ["--finetune_mode=lora", "--lora_rank=2", "--lora_alpha=8"]
REWARD = "--reward=length=0.5,normalize=true,clip=4"
KINDS = {
    "sft": ("sft", [*LEARN, TOKENS]),
    "sft-lora": ("sft", [*LEARN, *LORA, "--lora_dropout=0.2", TOKENS]),
    "sft-last": ("sft", [*LEARN, "--finetune_mode=last_layer", TOKENS]),
    "sft-tokens": ("sft", [*LEARN, "--mini_batch_size=6", "--micro_batch_tokens=90", TOKENS]),
    "sft-packed": (
        "sft",
        [*LEARN, "--mini_batch_size=2", "--micro_batch_size=1", "--packing", "--packing_length=70", TOKENS],
    ),
    "rm": ("rm", LEARN),
    "rm-lora": ("rm", [*LEARN, *LORA]),
    "dpo": ("dpo", [*LEARN, TOKENS]),
    "classifier": ("classifier", [*LEARN, "--balance"]),
    "classifier-lora": ("classifier", [*LEARN, *LORA, "--lora_dropout=0.2"]),
    "ppo": ("ppo", [*PPO, "--normalize_values", "--critic_lr_warmup_steps=2", "--critic_warmup_steps=1", REWARD]),
    "ppo-shared": ("ppo", [f for f in PPO if "critic" not in f] + ["--share_actor_critic", *LORA]),
    "ppo-lora": ("ppo", [*PPO, *LORA, "--num_return_sequences=2"]),
    "ppo-backbone": (
        "ppo", [*PPO, *LORA, "--share_backbone=critic", "--critic_init=sft", "--gradient_checkpointing"]
    ),
    "ppo-tokens": (
        "ppo", [f for f in PPO if not f.startswith("--micro_batch_size")] + ["--micro_batch_tokens=100"]
    ),
    "ppo-rloo": (
        "ppo", [f for f in PPO if "critic" not in f] + ["--advantage_estimator=rloo", "--num_return_sequences=2"]
    ),
}  # fmt: skip


def go(tiny_run, folder, kind, *more, data=None):
    """Run a stage in a folder of its own; returns the experiment."""
    stage, flags = KINDS[kind]
    start = {
        "sft": [f"--model_name={tiny_run.model}"],
        "classifier": [f"--model_name={tiny_run.model}"],
        "rm": [f"--sft_experiment_dir={tiny_run.sft}"],
        "dpo": [f"--sft_experiment_dir={tiny_run.sft}"],
        "ppo": [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}"],
    }[stage]
    return run_stage(stage, folder, data or tiny_run.data, *start, *COMMON, *flags, *more)


def content(experiment):
    """All that a second run of the same seed writes again: {file: bytes}."""
    return {
        str(path.relative_to(experiment)): path.read_bytes()
        for path in experiment.rglob("*")
        if path.is_file() and path.parent.name != "logs" and path.name not in ("timing.csv", "args.json")
    }


def same(one, other):
    one, other = content(one), content(other)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


@pytest.fixture(scope="module")
def finished(tiny_run, tmp_path_factory):
    """Undisturbed runs, made when first asked for."""
    runs = {}

    def get(kind):
        if kind not in runs:
            runs[kind] = go(tiny_run, tmp_path_factory.mktemp(kind), kind)
        return runs[kind]

    return get


def copy_of(experiment, folder):
    """A copy of an experiment that `go` finds in another folder."""
    target = folder.joinpath(*experiment.parts[-3:])
    shutil.copytree(experiment, target)
    return target


SLOW = {
    "sft-tokens",
    "ppo-tokens",
    "sft-lora",
    "sft-last",
    "rm-lora",
    "classifier-lora",
    "ppo-shared",
    "ppo-lora",
    "ppo-backbone",
    "ppo-rloo",
}
POINTS = [
    pytest.param(kind, step, marks=[pytest.mark.slow] if kind in SLOW or step != 4 else [], id=f"{kind}-{step}")
    for kind in KINDS
    for step in (2, 4, 6, 7)
]


@pytest.mark.parametrize(("kind", "step"), POINTS)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tiny_run, tmp_path, finished, kind, step):
    copy = copy_of(finished(kind), tmp_path)
    assert go(tiny_run, tmp_path, kind, f"--resume={step}") == copy
    same(copy, finished(kind))


def signal_at(monkeypatch, step, number=signal.SIGTERM):
    """Send this process a signal in the middle of a step (SFT, RM, DPO: one update each)."""
    update, calls = loop.update, []

    def updating(*args, **more):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return update(*args, **more)

    monkeypatch.setattr(loop, "update", updating)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_after_the_step_and_resume_goes_on_from_there(tiny_run, tmp_path, monkeypatch, finished, number):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        signal_at(patch, 5, number)
        with pytest.raises(Interrupted, match=f"{number.name}: stopped after step 5 of 7, all saved") as stop:
            go(tiny_run, tmp_path, "rm")
    assert stop.value.exit_code == 75
    assert signal.getsignal(number) is before
    folder = tmp_path.joinpath(*finished("rm").parts[-3:])
    assert (folder / "latest").read_text() == "step-000005\n"
    assert (folder / "best").read_text() != "step-000005\n"  # it was not validated
    assert not (folder / "summary.json").exists()
    go(tiny_run, tmp_path, "rm", "--resume")
    shutil.rmtree(folder / "checkpoints" / "step-000005")  # the undisturbed run has none of this step
    same(folder, finished("rm"))


def test_a_stopped_run_says_so_and_ends_with_75(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    signal_at(monkeypatch, 1)
    with pytest.raises(SystemExit) as stop:
        run(lambda: go(tiny_run, tmp_path, "rm"))
    assert stop.value.code == 75
    assert (
        "SIGTERM: stopped after step 1 of 7, all saved; the same command with --resume continues"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_signal_to_the_group_leaves_the_workers_of_the_data_alone(tiny_run, tmp_path):
    """As `timeout` sends it."""
    flags = [f"--data_dir={tiny_run.data}", f"--log_dir={tmp_path}", f"--model_name={tiny_run.model}", "--epochs=999"]
    script = [sys.executable, str(ROOT / "scripts" / "rlhf_rm.py"), *flags, "--accelerator=cpu", "--num_workers=2"]
    process = subprocess.Popen([*script, "--eval_interval=9999"], stderr=subprocess.PIPE, start_new_session=True)
    folder = tmp_path.joinpath(*tiny_run.rm.parts[-3:])
    numbers, end = folder / "metrics.csv", time.monotonic() + 120
    while not numbers.is_file() or numbers.read_text().count("\n") < 3:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    error = process.communicate(timeout=60)[1].decode()
    assert (process.returncode, "all saved" in error) == (75, True), error


def test_the_time_limit_stops_with_all_saved(tiny_run, tmp_path, finished):
    for step in (1, 2, 3):
        with pytest.raises(Interrupted, match=f"--max_time: stopped after step {step} of 7"):
            go(tiny_run, tmp_path, "rm", "--resume", "--max_time=0s")
    folder = go(tiny_run, tmp_path, "rm", "--resume", "--max_time=10h")
    for step in (1, 3):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    same(folder, finished("rm"))


# What is refused, and what is not


def test_another_run_is_not_continued(tiny_run, tmp_path, finished):
    copy = copy_of(finished("sft"), tmp_path)
    before = content(copy)
    with pytest.raises(ValueError, match=r"--resume: .* is another run \(learning_rate: 0\.001 before, 0\.002 now\)"):
        go(tiny_run, tmp_path, "sft", "--resume=4", "--learning_rate=2e-3")
    with pytest.raises(ValueError, match=r"another run \(finetune_mode: all before, last_layer now\)"):
        go(tiny_run, tmp_path, "sft", "--resume=4", "--finetune_mode=last_layer")
    assert content(copy) == before
    go(tiny_run, tmp_path, "sft", "--resume=4", "--learning_rate=2e-3", "--resume_override")
    assert json.loads((copy / "args.json").read_text())["train_args"]["learning_rate"] == 2e-3
    after = content(copy)
    names = ("checkpoints/step-000004/model.safetensors", "checkpoints/step-000007/model.safetensors")
    assert [after[name] == before[name] for name in names] == [True, False]


def test_another_parent_is_another_run(tiny_run, tmp_path, finished):
    copy_of(finished("rm"), tmp_path)
    with pytest.raises(ValueError, match=r"another run \(sft: its weights are not those of before\)"):
        go(tiny_run, tmp_path, "rm", "--resume=4", f"--sft_experiment_dir={finished('sft')}")


def test_a_parent_that_was_moved_is_the_same(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    shutil.copytree(tiny_run.sft, tmp_path / "moved")
    go(tiny_run, tmp_path, "rm", "--resume=4", f"--sft_experiment_dir={tmp_path / 'moved'}")
    same(copy, finished("rm"))


def test_other_data_are_another_run(tiny_run, tmp_path, finished):
    copy_of(finished("rm"), tmp_path)
    rows = [(prompt, *replies[:2]) for prompt, replies in toy_rows(24, seed=9)]
    data = write_data(tmp_path / "toy" / "tiny", make_tokenizer(), preference={"train": rows, "validation": rows})
    with pytest.raises(ValueError, match=r"another run \(preference_train\.pt: \w+ before, \w+ now"):
        go(tiny_run, tmp_path, "rm", "--resume=4", data=data)


def test_a_finished_run_has_nothing_left_to_do(tiny_run, tmp_path, finished, capsys):
    copy = copy_of(finished("rm"), tmp_path)
    before = content(copy)
    (copy / "checkpoints" / ".step-000007.old").mkdir()  # from a kill in the last moment
    (copy / ".summary.json.4711").touch()
    with pytest.raises(Finished, match=r"rm is finished; --overwrite runs it again"):
        go(tiny_run, tmp_path, "rm", "--resume")
    run(lambda: go(tiny_run, tmp_path, "rm", "--resume"))  # ends with 0
    assert f"{copy} is finished" in capsys.readouterr().out
    assert content(copy) == before


def test_a_finished_run_can_be_made_longer(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    go(tiny_run, tmp_path, "rm", "--resume", "--resume_override", "--max_steps=9")
    assert (copy / "latest").read_text() == "step-000009\n"


def test_resume_with_overwrite_takes_what_fits_and_replaces_the_rest(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "checkpoints" / "step-000007")
    (copy / "mark").touch()
    go(tiny_run, tmp_path, "rm", "--resume", "--overwrite")
    assert (copy / "mark").exists()  # continued
    (copy / "mark").unlink()
    same(copy, finished("rm"))
    (copy / "mark").touch()
    go(tiny_run, tmp_path, "rm", "--resume", "--overwrite", "--seed=5")
    assert not (copy / "mark").exists()  # replaced


def test_resume_of_nothing_starts_anew(tiny_run, tmp_path, finished):
    same(go(tiny_run, tmp_path, "rm", "--resume"), finished("rm"))


def test_a_step_without_a_checkpoint(tiny_run, tmp_path, finished):
    copy_of(finished("rm"), tmp_path)
    with pytest.raises(ValueError, match=r"--resume=5: .*rm has checkpoints of the steps \[2, 4, 6, 7\]"):
        go(tiny_run, tmp_path, "rm", "--resume=5")


# Damage


@pytest.mark.parametrize("file", ["model.safetensors", "resume/optimizer.pt", "resume/state.pt", "manifest.json"])
@pytest.mark.parametrize("how", ["cut off", "another byte", "gone"])
def test_a_damaged_checkpoint_is_passed_over(tiny_run, tmp_path, finished, file, how):
    copy = copy_of(finished("rm"), tmp_path)
    (copy / "summary.json").unlink()
    damaged = copy / "checkpoints" / "step-000007" / file
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data[: len(data) // 2] if how == "cut off" else data)
    if how == "gone":
        damaged.unlink()
    with pytest.warns(UserWarning, match=r"passed over: .*step-000007"):
        go(tiny_run, tmp_path, "rm", "--resume")
    same(copy, finished("rm"))


def test_a_finished_run_whose_checkpoints_are_damaged_is_left_alone(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    for path in copy.glob("checkpoints/*/config.json"):
        path.write_text("{}")
    before = content(copy)
    with pytest.raises(ValueError, match=r"--resume: the run is finished, but .* --overwrite alone runs it again"):
        go(tiny_run, tmp_path, "rm", "--resume", "--resume_override", "--max_steps=9")
    assert content(copy) == before


def test_when_every_checkpoint_is_damaged_the_run_starts_anew(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    (copy / "summary.json").unlink()
    for manifest in copy.rglob("manifest.json"):
        manifest.write_text("{}")
    with pytest.warns(UserWarning, match="has no whole checkpoint, so the run starts anew"):
        go(tiny_run, tmp_path, "rm", "--resume")
    same(copy, finished("rm"))


def test_logs_are_cut_back_also_in_the_middle_of_a_line(tiny_run, tmp_path, finished):
    copy = copy_of(finished("sft"), tmp_path)
    (copy / "summary.json").unlink()
    for step in (6, 7):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:06d}")
    for name in ("metrics.csv", "samples.jsonl", "timing.csv"):
        with (copy / name).open("ab") as file:
            file.truncate((copy / name).stat().st_size - 3)
    (copy / "checkpoints" / ".step-000006").mkdir()  # what a kill leaves
    (copy / ".latest.4711").touch()
    go(tiny_run, tmp_path, "sft", "--resume")
    same(copy, finished("sft"))


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tiny_run, tmp_path, monkeypatch, finished):
    save, calls = torch.save, []

    def saving(value, path, *rest, **more):
        calls.append(path)
        if "step-000004" in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", saving)
        with pytest.raises(
            OSError,
            match=r"a checkpoint could not be written \(.*No space left on device\); .* the checkpoint of step 2 is",
        ):
            go(tiny_run, tmp_path, "rm")
    folder = tmp_path.joinpath(*finished("rm").parts[-3:])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert (folder / "latest").read_text() == "step-000002\n"
    go(tiny_run, tmp_path, "rm", "--resume")
    same(folder, finished("rm"))


def test_a_whole_checkpoint_of_another_shape_is_one_error(tiny_run, tmp_path, finished):
    copy = copy_of(finished("rm"), tmp_path)
    folder = copy / "checkpoints" / "step-000004"
    torch.save({"state": {}, "param_groups": []}, folder / "resume" / "optimizer.pt")
    listed = json.loads((folder / "manifest.json").read_text())
    content = (folder / "resume" / "optimizer.pt").read_bytes()
    listed["files"]["resume/optimizer.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(listed))
    with pytest.raises(
        ValueError, match=r"--resume: .*step-000004 does not fit this run \(ValueError: loaded state dict"
    ):
        go(tiny_run, tmp_path, "rm", "--resume=4")


# What is kept


def steps_of(experiment):
    return sorted(int(path.name.removeprefix("step-")) for path in (experiment / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ([], [2, 4, 6, 7]),
        (["--keep_last=2"], [2, 6, 7]),
        (["--keep_last=1"], [2, 7]),
        (["--keep_last=1", "--keep_best=False"], [7]),
    ],
)
def test_old_checkpoints_go_and_the_best_stays(tiny_run, tmp_path, monkeypatch, flags, kept):
    end_step = Keeper.end_step
    # the earlier the better
    monkeypatch.setattr(Keeper, "end_step", lambda keeper, step, quality: end_step(keeper, step, quality=-step))
    folder = go(tiny_run, tmp_path, "sft", *flags)
    assert steps_of(folder) == kept
    assert (folder / "latest").read_text() == "step-000007\n"
    if 2 in kept:
        assert (folder / "best").read_text() == "step-000002\n"
    else:
        assert not (folder / "best").exists()


# Numbers that are not finite


@pytest.fixture
def marked(tmp_path):
    """Data in which record 5 alone says `pink pink`."""
    rows = [(prompt, replies[i % 3]) for i, (prompt, replies) in enumerate(toy_rows(12))]
    rows[5] = (rows[5][0], " pink pink pink pink pink.")
    pairs = [(prompt, reply, " red.") for prompt, reply in rows]
    splits = {"finetune": {"train": rows}, "preference": {"train": pairs}}
    return write_data(tmp_path / "toy" / "marked", make_tokenizer(), **splits)


def lines(experiment):
    return [json.loads(line) for line in (experiment / "skipped.jsonl").read_text().splitlines()]


def test_a_step_whose_loss_is_not_finite_is_skipped_and_its_sample_named(tiny_run, tmp_path, marked, monkeypatch):
    pink, loss = make_tokenizer()(" pink pink pink", add_special_tokens=False)["input_ids"], tokens.sft_loss

    def spoiled(logits, targets, *rest, **more):
        total, count = loss(logits, targets, *rest, **more)
        return (total * math.nan if str(pink)[1:-1] in str(targets.tolist()) else total), count

    monkeypatch.setattr(tokens, "sft_loss", spoiled)
    flags = ["--epochs=2", "--max_steps=6", "--micro_batch_size=1", "--log_interval=1"]
    folder = go(tiny_run, tmp_path, "sft", *flags, data=marked)
    found = lines(folder)
    assert [line["samples"] for line in found] == [[5], [5]]  # once in each epoch, of 3 steps
    assert [(line["step"] - 1) // 3 for line in found] == [0, 1]
    assert {line["reason"] for line in found} == {"the loss is nan"}
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 2
    for path in (folder / "checkpoints").rglob("model.safetensors"):
        from safetensors.torch import load_file

        assert all(torch.isfinite(weight).all() for weight in load_file(path).values())


def test_skipped_steps_are_counted_over_a_resume(tiny_run, tmp_path, marked, monkeypatch):
    loss = tokens.sft_loss
    monkeypatch.setattr(tokens, "sft_loss", lambda *args, **more: (loss(*args, **more)[0] * math.inf, loss(*args)[1]))
    flags = ["--save_interval=1", "--max_skipped_steps=3"]
    with monkeypatch.context() as patch:
        signal_at(patch, 2)
        with pytest.raises(Interrupted):
            go(tiny_run, tmp_path, "sft", *flags, data=marked)
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped, the last because the loss is") as stop:
        go(tiny_run, tmp_path, "sft", *flags, "--resume", data=marked)
    assert "the last good checkpoint is" in str(stop.value)
    assert str(stop.value).endswith("step-000002")


def test_a_reward_that_is_not_finite_skips_the_rollout(tiny_run, tmp_path, marked, monkeypatch):
    scores, seen = learned.end_scores, []

    def spoiled(model, ids, mask):
        values = scores(model, ids, mask)
        seen.append(len(values))
        if len(seen) == 2:  # the second rollout's
            values[1] = -math.inf
        return values

    monkeypatch.setattr(learned, "end_scores", spoiled)
    flags = ["--max_steps=3", "--rollout_size=4", "--rollout_mini_batch_size=4", "--normalize_rewards=False"]
    flags += ["--mini_batch_size=4", "--micro_batch_size=2", "--log_interval=1", "--num_return_sequences=2"]
    folder = go(tiny_run, tmp_path, "ppo", *flags, data=marked)
    (line,) = lines(folder)
    assert line["step"] == 2
    assert line["reason"] == "the scores of the reward model are not finite for 1 of 8 responses"
    # response 1 is the second one to the first prompt of the step
    from rlhf_stages.plan import epoch_windows

    assert line["samples"] == [epoch_windows(12, mini=4, micro=4, seed=42, epoch=0)[1][0][0]]
    metrics = (folder / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in metrics[1:]].count("2") == 0
    assert "nan" not in (folder / "metrics.csv").read_text()


def test_an_update_that_is_not_finite_leaves_the_rest_of_ppo_alone(tiny_run, tmp_path, monkeypatch):
    update, calls = loop.update, []

    def updating(fabric, model, optimizer, batches, loss_sum, *rest):
        calls.append(1)
        if len(calls) == 3:
            return update(fabric, model, optimizer, batches, lambda b: (loss_sum(b)[0] * math.nan, {}), *rest)
        return update(fabric, model, optimizer, batches, loss_sum, *rest)

    monkeypatch.setattr(loop, "update", updating)
    folder = go(tiny_run, tmp_path, "ppo", "--max_steps=2", "--critic_warmup_steps=0")
    (line,) = lines(folder)
    assert (line["step"], line["reason"]) == (1, "the loss is nan")
    assert len(line["samples"]) == 2  # the last window of the first epoch has two rows
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == 1
    assert len(calls) == 2 * 2 * 2 * 2  # steps, epochs, windows, models: all others were made
