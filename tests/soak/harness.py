"""Runs of the stages in children of a process that has imported everything: a second each instead of ten.

A child is a process of its own, and what kills it a real SIGKILL. It tells through shared memory what it does.
"""

import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

import peft  # noqa: F401
import torch
import transformers  # noqa: F401

from rlhf_stages import interruption, keeper, loop
from rlhf_stages.cli import run
from rlhf_stages.rollout import collect, samples

from helpers import load_script

torch.set_num_threads(1)
PHASES = ("rollout", "update", "save")
SECONDS = 300.0  # no run takes longer
_SLOTS = struct.Struct("ii")  # how often a phase began, and how many are going on


@dataclass
class Phases:
    """What a child is doing, seen from outside."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _SLOTS.size * len(PHASES)))

    def read(self, phase: str) -> tuple[int, int]:
        """How often a phase has begun, and how many of it are going on."""
        return _SLOTS.unpack_from(self.memory, _SLOTS.size * PHASES.index(phase))

    def add(self, phase: str, began: int, going_on: int) -> None:
        """In the child: count."""
        counts = self.read(phase)
        _SLOTS.pack_into(self.memory, _SLOTS.size * PHASES.index(phase), counts[0] + began, counts[1] + going_on)

    @contextmanager
    def of(self, phase: str):
        """In the child: a phase goes on."""
        self.add(phase, 1, 1)
        try:
            yield
        finally:
            self.add(phase, 0, -1)

    def watch(self, owner: object, name: str, phase: str) -> None:
        """In the child: calls of a function are a phase."""
        function = getattr(owner, name)

        def watched(*args, **more):
            with self.of(phase):
                return function(*args, **more)

        setattr(owner, name, watched)


@dataclass
class Child:
    """A run in a process of its own."""

    pid: int
    phases: Phases
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Until it has ended; it is killed after a while."""
        return self.wait_for(lambda: False)

    def wait_for(self, condition: Callable[[], bool]) -> int | None:
        """Until it has ended, or something is so."""
        deadline = time.monotonic() + SECONDS
        while self.poll() is None and not condition():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"a run takes more than {SECONDS:.0f} s: {self.log.read_text()[-2000:]}")
            time.sleep(0.0002)
        return self.code

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start(script: str, argv: Sequence[str], log: Path, before: Callable[[], None] = lambda: None) -> Child:
    """Run a script's main in a child, as its command line would; `before` is called in it first."""
    phases = Phases()
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return Child(pid, phases, log)
    code = 1
    try:
        for number in interruption.SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        phases.watch(samples, "sample", "rollout")
        phases.watch(collect, "score_responses", "rollout")
        phases.watch(loop, "update", "update")
        for name in ("_save", "_write"):
            phases.watch(keeper.Keeper, name, "save")
        before()
        run(lambda: load_script(script).main(list(argv)))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():  # as an interpreter does before it ends
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(script: str, argv: Sequence[str], log: Path) -> None:
    """Run a script to its end.

    Raises:
        RuntimeError: it ends otherwise.
    """
    code = start(script, argv, log).wait()
    if code:
        raise RuntimeError(f"{script} ended with {code}:\n{log.read_text()[-3000:]}")


def differences(one: Path, other: Path) -> list[str]:
    """Files of two experiments that differ, but for what the clock says, TensorBoard and the paths in args.json."""

    def content(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.parent.name != "logs" and path.name not in ("timing.csv", "args.json")
        }

    a, b = content(one), content(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
