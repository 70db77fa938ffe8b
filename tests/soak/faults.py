"""What befalls a run: each fault is one attempt of it, and what has to be true afterwards."""

import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import disk
import material
from phases import Board, install

STOPPED, FAILED = 75, 2
DAY = 86_400


class Broken(Exception):
    """A run did not do what it has to do."""


class Run:
    """A stage's run that is going to be disturbed.

    Args:
        folder: where it runs; the experiment lies in `runs/` there.
        seconds, size: of the undisturbed run, in bytes.
        disk: whether `runs/` is a disk of its own.
    """

    def __init__(self, stage, flags, folder, log, seconds, size, has_disk):
        self.stage, self.flags, self.folder, self.log = stage, flags, folder, log
        self.seconds, self.size, self.has_disk = seconds, size, has_disk
        self.experiment = folder / "runs" / "helpdesk" / "tiny" / stage
        self.stopped_at = set()
        self._damaged = False

    def start(self, *before):
        """Start it, or go on with it."""
        self.board, self._read = Board(), self.log.stat().st_size if self.log.exists() else 0
        flags = [*self.flags, "--resume"]
        return material.stage_child(self.stage, flags, self.folder, self.log, [partial(install, self.board), *before])

    def end(self, child, *codes):
        """Wait for its end; returns the exit code.

        Raises:
            Broken: the exit code is another one, or a damaged checkpoint was taken.
        """
        code, text = child.wait(), self.text()
        if code not in codes or "Traceback" in text:
            raise Broken(f"exit code {code}, expected {codes}:\n{text[-3000:]}")
        if "resumed after" in text or "starts anew" in text:
            if self._damaged and "passed over" not in text:
                raise Broken(f"a damaged checkpoint was not passed over:\n{text[-3000:]}")
            self._damaged = False
        return code

    def text(self):
        """What the last attempt wrote."""
        return self.log.read_text(errors="replace")[self._read :].replace("\r", "\n")

    def checkpoints(self):
        """Folders of the checkpoints, the newest last."""
        return sorted((self.experiment / "checkpoints").glob("step-*"))

    def damage(self):
        """Note that the newest checkpoint is not whole any more."""
        self._damaged = True


def moment(run, rng, number):
    """Start the run and send a signal at any time of it."""
    child = run.start()
    end = time.monotonic() + rng.uniform(0, run.seconds)
    while time.monotonic() < end and not child.ended():
        time.sleep(0.001)
    child.send(number)
    return child


def kill(run, rng):
    """kill -9."""
    run.end(moment(run, rng, signal.SIGKILL), 0, -signal.SIGKILL)


def stop(run, rng, number):
    """A signal that asks it to stop: it saves and says so, or is over; before and after the training it just ends."""
    child = moment(run, rng, number)
    child.wait()
    outside = run.board.now()[0] in ("start", "end")
    code = run.end(child, 0, STOPPED, *((-number, 128 + signal.SIGINT) if outside else ()))
    if code == STOPPED:
        found = re.search(rf"^{number.name}: stopped after step (\d+) of \d+, all saved; the same", run.text(), re.M)
        if not found:
            raise Broken(f"{number.name} with exit code {code}, but:\n{run.text()[-3000:]}")
        run.stopped_at.add(int(found[1]))
        check_newest(run, int(found[1]))


def full_disk(run, rng):
    """The disk is full at any time of it: one clear line, and the last checkpoint is whole."""
    before = [path.name for path in run.checkpoints()]
    ballast = disk.fill(run.folder / "runs", rng.uniform(0, run.size))
    try:
        code = run.end(run.start(), 0, FAILED)
        lines = [line for line in run.text().splitlines() if "error" in line.lower()]
        if code == FAILED and not (len(lines) == 1 and lines[0].startswith("error: ")):
            raise Broken(f"not one clear line: {lines}")
        if before and not run.checkpoints():
            raise Broken("no checkpoint is left")
        if run.checkpoints():
            check_newest(run)
    finally:
        ballast.unlink()


def cut_off(run, rng):
    """kill -9, and then a file of the newest checkpoint is cut off."""
    kill(run, rng)
    if path := some_file(run, rng):
        os.truncate(path, rng.randrange(path.stat().st_size))


def flip(run, rng):
    """kill -9, and then a bit of the newest checkpoint is another."""
    kill(run, rng)
    if path := some_file(run, rng):
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def some_file(run, rng):
    """Any file of the newest checkpoint, which is damaged from now on; None if there is none, or the run is over."""
    if not run.checkpoints() or (run.experiment / "summary.json").exists():
        return None
    run.damage()
    return rng.choice(sorted(path for path in run.checkpoints()[-1].rglob("*") if path.is_file()))


def leftover(run, rng):
    """kill -9, and half-written things lie about."""
    kill(run, rng)
    folder = run.experiment / "checkpoints"
    if not folder.is_dir():
        return
    for name in (".step-000003", ".step-000006.old"):
        (folder / name / "resume").mkdir(parents=True, exist_ok=True)
        (folder / name / "model.safetensors").write_bytes(rng.randbytes(1000))
        (folder / name / "resume" / "state.pt").write_bytes(b"")
    (run.experiment / ".metrics.csv.1").write_text("step,val/lo")
    (run.experiment / ".summary.json.1").write_text('{"steps": ')


def clock(run, rng):
    """The clock is years off, jumps both ways all the time, and files have the dates of any day."""
    for path in run.experiment.rglob("*") if run.experiment.is_dir() else ():
        os.utime(path, (rng.uniform(0, 2e9),) * 2)
    child = run.start(partial(lie_about_the_time, rng.random()))
    if rng.random() < 0.5:
        end = time.monotonic() + rng.uniform(0, run.seconds)
        while time.monotonic() < end and not child.ended():
            time.sleep(0.001)
        child.send(signal.SIGKILL)
    run.end(child, 0, -signal.SIGKILL)


def lie_about_the_time(seed):
    """Let the clock of this process jump."""
    rng, real = random.Random(seed), time.time
    offset = rng.uniform(-9000 * DAY, 9000 * DAY)

    def now():
        nonlocal offset
        if rng.random() < 0.1:
            offset += rng.uniform(-DAY, DAY)
        return real() + offset

    time.time, time.time_ns = now, lambda: int(now() * 1e9)


def check_newest(run, step=None):
    """The checkpoint that `latest` names is whole."""
    from rlhf_stages.checkpoint import check_whole

    name = (run.experiment / "latest").read_text().strip()
    if step is not None and name != f"step-{step:06d}":
        raise Broken(f"stopped after step {step}, and the latest checkpoint is {name}")
    try:
        check_whole(Path(run.experiment / "checkpoints" / name), resumable=True)
    except ValueError as error:
        raise Broken(str(error)) from None


FAULTS = {
    "kill -9": kill,
    "SIGTERM": partial(stop, number=signal.SIGTERM),
    "SIGINT": partial(stop, number=signal.SIGINT),
    "SIGUSR1": partial(stop, number=signal.SIGUSR1),
    "disk full": full_disk,
    "cut off": cut_off,
    "flipped bit": flip,
    "leftovers": leftover,
    "clock": clock,
}


def copy_for_later(run, folder):
    """Keep what went wrong."""
    shutil.copytree(run.experiment, folder, dirs_exist_ok=True)
