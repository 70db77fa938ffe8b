"""Where a child is: it writes that down in memory that it shares with its parent.

The functions of each phase are wrapped in the child, after the fork; the product knows nothing of it.
"""

import mmap
import os
import signal
import sys
import time
from functools import wraps

# main: what the training does; writer: what the thread does that writes a checkpoint beside it
MAIN, WRITER = 0, 1
NAMES = ("-", "start", "train", "rollout", "update", "eval", "log", "copy", "write", "settle", "end")
SAVING = ("copy", "write", "settle")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Board:
    """For each phase how often it was entered and how long it took, and the phases that go on now."""

    def __init__(self):
        self._cells = memoryview(mmap.mmap(-1, 8 * (3 + 2 * len(NAMES)))).cast("q")

    def now(self):
        """Phase of the main thread and of the writer, "-" for none."""
        return NAMES[self._cells[MAIN]], NAMES[self._cells[WRITER]]

    @property
    def operations(self):
        """Changes made to files so far."""
        return self._cells[2]

    def entries(self, phase):
        """How often it was entered."""
        return self._cells[3 + 2 * NAMES.index(phase)]

    def seconds(self, phase):
        """How long it takes each time."""
        return self._cells[4 + 2 * NAMES.index(phase)] / 1e9 / max(self.entries(phase), 1)

    def count_operation(self):
        self._cells[2] += 1
        return self._cells[2]

    def go(self, slot, phase):
        """Be in a phase until told otherwise."""
        self._cells[slot] = NAMES.index(phase)

    def enter(self, slot, phase):
        """Begin a phase; what was before is returned."""
        before = self._cells[slot]
        self._cells[slot] = NAMES.index(phase)
        self._cells[3 + 2 * NAMES.index(phase)] += 1
        return before, time.perf_counter_ns()

    def leave(self, slot, phase, entered):
        """End it."""
        before, started = entered
        self._cells[4 + 2 * NAMES.index(phase)] += time.perf_counter_ns() - started
        self._cells[slot] = before


def install(board):
    """Wrap the functions of the phases in this process."""
    from rlhf_stages import checkpoint, keeper, loop, plan, tracking
    from rlhf_stages.rollout import collect, experience, samples

    started = board.enter(MAIN, "start")

    def wrap(owner, name, phase, slot=MAIN, only_in=None):
        inner = getattr(owner, name)

        @wraps(inner)
        def wrapped(*args, **more):
            if only_in and board.now()[slot] not in only_in:
                return inner(*args, **more)
            entered = board.enter(slot, phase)
            try:
                return inner(*args, **more)
            finally:
                board.leave(slot, phase, entered)
                if phase == "end":
                    board.go(slot, phase)

        setattr(owner, name, wrapped)

    training = ("train",)  # a rollout of the validation belongs to it
    wrap(samples, "sample", "rollout", only_in=training)
    wrap(collect, "score_responses", "rollout", only_in=training)
    wrap(loop, "update", "update")
    wrap(experience, "make_experience", "update")
    wrap(tracking.Tracker, "log", "log", only_in=training)
    wrap(keeper.Keeper, "_save", "copy")
    wrap(checkpoint.Checkpoints, "publish", "write", WRITER)
    wrap(keeper.Keeper, "_settle", "settle", WRITER)
    wrap(keeper.Keeper, "finish", "end")

    steps, evaluates, end_step = plan.Plan.steps, keeper.Keeper.evaluates, keeper.Keeper.end_step
    validating = []

    def stepping(self, *args):
        board.leave(MAIN, "start", started)
        board.go(MAIN, "train")
        yield from steps(self, *args)

    def evaluating(self, step):
        if evaluates(self, step):
            validating.append(board.enter(MAIN, "eval"))
            return True
        return False

    def ending(self, *args, **more):
        if validating:
            board.leave(MAIN, "eval", validating.pop())
        return end_step(self, *args, **more)

    plan.Plan.steps, keeper.Keeper.evaluates, keeper.Keeper.end_step = stepping, evaluating, ending


def watch_files(board, folder, kill_at=None, names=None):
    """Count the changes that this process makes to files in a folder, and be killed right before one of them.

    Args:
        names: a file to which a line is added for each change: what is done to what.
    """
    folder, mine = str(folder), os.getpid()
    output = None if names is None else os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event, args):
        if event == "open":
            path, mode, flags = args
            # `os.open` has no mode: it is how a file, or a folder, is flushed
            if not isinstance(path, str | bytes | os.PathLike) or not (flags & _WRITING or mode is None):
                return
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            path = args[0]
        else:
            return
        path = folder if isinstance(path, int) else os.path.normpath(os.path.join(folder, os.fsdecode(path)))
        if os.getpid() != mine or not path.startswith(folder) or "/logs/" in path:
            return
        number = board.count_operation()
        if output is not None:
            os.write(output, f"{event} {path[len(folder) :]}\n".encode())
        if number == kill_at:
            os.kill(mine, signal.SIGKILL)

    sys.addaudithook(hook)
