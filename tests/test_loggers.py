"""Each logger writes what it is given, several at once, and a run that is resumed goes on in all of them."""

import json
import os
import random
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlhf_stages import loggers as module
from rlhf_stages.args import TrainArgs
from rlhf_stages.cli import parse
from rlhf_stages.loggers import check_loggers, make_loggers

from helpers import ROOT, read_metrics, run_stage, save_causal, write_toy_data

OFFLINE = TrainArgs(loggers=["wandb"], wandb_mode="offline", wandb_project="p")


@pytest.fixture
def folder(tmp_path):
    """Where an experiment would be."""
    path = tmp_path / "toy" / "tiny" / "sft"
    path.mkdir(parents=True)
    return path


@pytest.fixture(autouse=True)
def _nobody(monkeypatch, tmp_path):
    """No key and no settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def log_all(chosen, rows, total=9):
    for logger in chosen:
        logger.log_params({"train_args.seed": 7, "train_args.loggers": ["wandb"]})
        for step, numbers in rows.items():
            logger.log_metrics(numbers, step)
        logger.log_text("info/sample", "<b>a</b> & [b](c)", max(rows))
        logger.flush()
        logger.close()


def records(path):
    """What a file of Weights & Biases holds: blocks of 32 KiB of records, each with checksum, length and kind."""
    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def history(folder):
    """{name: {step: value}} of all runs in a folder, the ids of those runs, and their config."""
    rows, ids, config = {}, set(), {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            config |= values(record.config.update)
            row = values(record.history.item)
            for name, value in row.items():
                rows.setdefault(name, {})[row["_step"]] = value
    return rows, ids, config


def values(items):
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def test_csv_is_always_there(folder):
    for chosen in ([], ["csv"], ["tensorboard"]):
        names = [type(logger).__name__ for logger in make_loggers(TrainArgs(loggers=chosen), folder, 0, 9)]
        assert names[0] == "CsvFiles"
        assert len(names) == (2 if "tensorboard" in chosen else 1)
    log_all(make_loggers(TrainArgs(loggers=["csv", "csv"]), folder, 0, 9), {1: {"a": 1.0, "info/time": 2.0}})
    assert read_metrics(folder) == {"a": {1: 1.0}}
    assert read_metrics(folder, "timing.csv") == {"info/time": {1: 2.0}}
    assert {path.name for path in folder.iterdir()} - {"logs"} == {"metrics.csv", "timing.csv"}


def test_all_at_once_say_the_same(folder, capsys):
    args = TrainArgs(loggers=["console", "wandb", "tensorboard"], wandb_mode="offline")
    log_all(make_loggers(args, folder, 0, 9), {1: {"train/loss": 2.0}, 2: {"train/loss": 1.5}})
    expected = {1: 2.0, 2: 1.5}
    assert read_metrics(folder)["train/loss"] == expected
    assert history(folder)[0]["train/loss"] == expected
    board = EventAccumulator(str(folder / "logs")).Reload()
    assert {event.step: event.value for event in board.Scalars("train/loss")} == expected
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["sft", "1/9", "loss=2"], ["sft", "2/9", "loss=1.5"],
    ]  # fmt: skip


def test_an_unknown_logger_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(TrainArgs, argv=["--loggers", "tensorboard", "wand"])
    assert "--loggers takes tensorboard, csv, wandb, console, got 'wand'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--wandb_project=p", "--wandb_entity=e", "--wandb_mode=offline"])
def test_flags_of_wandb_need_wandb(flag, capsys):
    with pytest.raises(SystemExit):
        parse(TrainArgs, argv=[flag])
    assert "only acts with --loggers wandb" in capsys.readouterr().err
    assert parse(TrainArgs, argv=["--loggers", "wandb", flag])


# Console


def test_the_time_left_by_hand(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    console = module.Console("ppo", done=10, total_steps=110)
    console.log_metrics({"val/reward_mean": 1.0}, 10)
    now[0] += 50.0
    console.log_metrics({"train/reward_mean": 1.23456, "info/lr": 1e-6}, 15)  # 50 s for 5 steps, 95 steps to go: 950 s
    now[0] += 37_000.0
    console.log_metrics({"train/kl_sequence": 0.5}, 20)  # 37050 s for 10 steps, 90 to go: 333450 s
    assert capsys.readouterr().out.splitlines() == [
        "ppo 10/110 val_reward=1 left=?",
        "ppo 15/110 reward=1.235 left=0:15:50",
        "ppo 20/110 kl=0.5 left=92:37:30",
    ]


def test_a_console_line_fits(capsys):
    console = module.Console("ppo", done=0, total_steps=10**9)
    console.log_metrics(dict.fromkeys(module.SHOWN, -1.234e-100), 1)
    (line,) = capsys.readouterr().out.splitlines()
    assert 70 < len(line) <= 100
    assert line.startswith("ppo 1/1000000000 loss=-1.234e-100 ")
    assert " left=" in line


# Weights & Biases


def test_offline_metrics_can_be_read(folder):
    (_, logger) = make_loggers(OFFLINE, folder, 0, 9)
    log_all([logger], {0: {"val/loss": 3.0}, 2: {"train/loss": 2.5, "info/lr": 1e-4}})
    rows, ids, config = history(folder)
    assert (rows["val/loss"], rows["train/loss"], rows["info/lr"]) == ({0: 3.0}, {2: 2.5}, {2: 1e-4})
    assert ids == {(folder / "wandb" / "run_id").read_text().strip()}
    assert config["train_args.seed"] == 7
    (text,) = folder.glob("wandb/offline-run-*/files/media/html/info/*.html")
    assert text.read_text() == "<pre>&lt;b&gt;a&lt;/b&gt; &amp; [b](c)</pre>"


def test_a_resumed_run_is_the_same_run(folder):
    for done in (0, 1):
        log_all(make_loggers(OFFLINE, folder, done, 9)[1:], {done + 1: {"train/loss": float(done)}})
        time.sleep(1.1)  # the folder of a run is named after the second in which it starts
    rows, ids, _ = history(folder)
    assert rows["train/loss"] == {1: 0.0, 2: 1.0}
    assert len(ids) == 1
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2


def test_disabled_writes_and_sends_nothing(folder):
    args = TrainArgs(loggers=["wandb"], wandb_mode="disabled")
    check_loggers(args)
    log_all(make_loggers(args, folder, 0, 9)[1:], {1: {"train/loss": 1.0}})
    assert [path.name for path in (folder / "wandb").iterdir()] == ["run_id"]


def test_random_numbers_are_left_alone(folder):
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    log_all(make_loggers(OFFLINE, folder, 0, 9), {1: {"train/loss": 1.0}})
    assert state() == before


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"pip install 'rlhf_stages\[wandb\]'"):
        check_loggers(OFFLINE)
    check_loggers(TrainArgs())


def test_a_server_that_takes_nothing_more(folder, monkeypatch):
    (_, logger) = make_loggers(OFFLINE, folder, 0, 9)

    def gone(*args, **kwargs):
        raise wandb.errors.CommError("the connection\nis gone.")

    with monkeypatch.context() as patched:
        patched.setattr(logger._run, "log", gone)
        with pytest.raises(OSError, match=r"^Weights & Biases takes nothing more: the connection is gone$"):
            logger.log_metrics({"a": 1.0}, 1)
    logger.close()


def test_online_without_a_key(monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^--loggers wandb: no API key; set WANDB_API_KEY .*--wandb_mode=offline"):
        check_loggers(TrainArgs(loggers=["wandb"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "message"), [("", "no API key; set WANDB_API_KEY"), ("a" * 40, "Failed to authenticate")], ids=["no", "a"]
)
def test_online_without_key_or_network_ends_before_there_is_a_folder(tmp_path, key, message):
    data, model = write_toy_data(tmp_path / "toy" / "tiny"), save_causal(tmp_path / "model")
    # nobody listens at the discard port of this machine
    env = {**os.environ, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_HTTP_TIMEOUT": "2"}
    env |= {"WANDB_API_KEY": key} if key else {}
    script = [sys.executable, str(ROOT / "scripts" / "rlhf_sft.py"), "--accelerator=cpu", "--devices=1"]
    script += [f"--data_dir={data}", f"--model_name={model}", f"--log_dir={tmp_path / 'runs'}", "--max_new_tokens=4"]
    script += ["--loggers", "wandb"]
    result = subprocess.run(script, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --loggers wandb: ")
    assert message in last
    assert "--wandb_mode=offline" in last
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_stage_with_all_loggers_trains_as_one_with_none(tmp_path, capfd):
    data, model = write_toy_data(tmp_path / "toy" / "tiny"), save_causal(tmp_path / "model", dropout=0.1)
    flags = [f"--model_name={model}", "--max_steps=3", "--save_interval=2", "--log_interval=1", "--max_new_tokens=4"]
    plain = run_stage("sft", tmp_path / "plain", data, *flags, "--loggers", "csv")
    capfd.readouterr()
    chosen = ["--loggers", "tensorboard", "wandb", "console", "--wandb_mode=offline"]
    loud = run_stage("sft", tmp_path / "loud", data, *flags, *chosen)
    assert (plain / "metrics.csv").read_bytes() == (loud / "metrics.csv").read_bytes()
    assert not (plain / "logs").exists()
    run_stage("sft", tmp_path / "loud", data, *flags, "--loggers", "wandb", "--wandb_mode=offline", "--resume=2")
    assert (plain / "metrics.csv").read_bytes() == (loud / "metrics.csv").read_bytes()
    rows, ids, config = history(loud)
    assert rows["train/loss"] == pytest.approx(read_metrics(plain)["train/loss"])
    assert len(ids) == 1
    assert config["train_args.wandb_mode"] == "offline"
    output = capfd.readouterr().out
    assert "sft 3/3 loss=" in output
    assert "left=0:00:00" in output
