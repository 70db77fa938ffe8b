"""Processes that die, and signals that only one of them gets: real programs on two gloo processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import ROOT, read_metrics

pytestmark = pytest.mark.slow
LIMIT = 60.0  # seconds within which all processes are gone


@pytest.fixture
def running(tiny_run, tmp_path):
    """An SFT run of two processes, in the middle of its training; all that is left of it is killed afterwards."""
    command = [sys.executable, str(ROOT / "scripts" / "rlhf_sft.py"), f"--data_dir={tiny_run.data}"]
    command += [f"--model_name={tiny_run.model}", f"--log_dir={tmp_path}", "--accelerator=cpu", "--devices=2"]
    command += ["--max_steps=100000", "--epochs=100000", "--log_interval=1", "--save_interval=5", "--keep_last=2"]
    command += ["--max_new_tokens=2", "--eval_iters=1", "--mini_batch_size=2", "--micro_batch_size=1"]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
    folder = tmp_path / "toy" / "tiny" / "sft"
    deadline = time.monotonic() + 120
    while not (folder / "latest").is_file():
        assert first.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.2)
    (second,) = (child for child in psutil.Process(first.pid).children() if "rlhf_sft.py" in " ".join(child.cmdline()))
    yield folder, first, second, command
    for process in (second, first):
        if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
            process.kill()
    first.wait()


def test_when_the_second_process_dies_the_first_ends_too(running):
    _, first, second, _ = running
    second.kill()
    assert first.wait(LIMIT) != 0


def test_when_the_first_process_dies_the_second_ends_too(running):
    _, first, second, _ = running
    first.kill()
    first.wait()
    second.wait(LIMIT)


def test_a_signal_to_one_process_stops_both_with_all_saved_and_the_run_goes_on(running, tmp_path):
    folder, first, second, command = running
    os.kill(second.pid, signal.SIGTERM)
    assert first.wait(LIMIT) == 75
    deadline = time.monotonic() + LIMIT  # it may end a moment after its parent
    while second.is_running() and second.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    log = (tmp_path / "log").read_text()
    step = int(log.partition("SIGTERM: stopped after step ")[2].split()[0])
    assert (folder / "latest").read_text() == f"step-{step:06d}\n"
    again = [*command, "--resume", f"--max_steps={step + 2}", "--resume_override"]
    result = subprocess.run(again, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {step} of {step + 2}" in result.stdout
    assert sorted(read_metrics(folder)["train/loss"]) == list(range(1, step + 3))
