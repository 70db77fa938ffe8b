import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from rlhf_stages import interruption
from rlhf_stages.interruption import Interruption

ALONE = SimpleNamespace(world_size=1, device=torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves; the program started at 0."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(interruption, "STARTED", 0.0)
    return now


@pytest.fixture
def made():
    """Makes interruptions and gives the signals back."""
    all_of_them = []

    def make(*args, **more):
        all_of_them.append(Interruption(*args, **more))
        return all_of_them[-1]

    yield make
    for one in reversed(all_of_them):
        one.close()


def test_nothing_happened(made):
    assert made().reason(ALONE) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted(made, number):
    one = made()
    os.kill(os.getpid(), number)
    assert one.reason(ALONE) == number.name
    assert signal.getsignal(number) is signal.SIG_DFL  # the next one acts


def test_signals_are_given_back(made):
    before = signal.getsignal(signal.SIGTERM)
    one = made()
    assert signal.getsignal(signal.SIGTERM) != before
    one.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_stops_at_once():
    child = os.fork()
    if child == 0:
        Interruption()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGINT


def test_the_time_limit_leaves_room_for_the_longest_step_and_a_save(made, clock):
    clock.seconds = 10.0
    one = made(max_seconds=100.0, save_seconds=5.0)
    for seconds, reason in [(20, None), (50, None), (60, None), (64, None), (66, "--max_time")]:  # the longest step: 30
        clock.seconds = float(seconds)
        assert one.reason(ALONE) == reason, seconds


def test_without_a_limit_time_means_nothing(made, clock):
    one = made()
    clock.seconds = 1e9
    assert one.reason(ALONE) is None


def test_every_device_learns_of_the_signal_of_one(made):
    """The largest over all devices, of which this one has seen nothing."""

    def all_reduce(noted, reduce_op):
        assert reduce_op == "max"
        assert noted.tolist() == [0.0, 0.0]
        return torch.tensor([float(signal.SIGUSR1), 0.0])

    follower = SimpleNamespace(world_size=2, device=torch.device("cpu"), all_reduce=all_reduce)
    assert made().reason(follower) == "SIGUSR1"


def test_a_process_ends_with_its_parent(monkeypatch):
    monkeypatch.setattr(interruption, "_WATCH_INTERVAL", 0.05)
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:  # the child that is to end
            interruption.end_with_parent()
            os.write(writer, b"1")
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
    assert os.read(reader, 1) == b"1"
    os.close(writer)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    started = time.monotonic()
    assert os.read(reader, 1) == b""  # the last process that held the pipe is gone
    assert time.monotonic() - started < 10
