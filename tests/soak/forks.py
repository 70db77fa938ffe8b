"""Runs in forked children of one process that has imported everything, so that a run costs a second instead of ten.

A child is a process of its own: it is killed like one, has its own signals, threads and random numbers, and ends with
the exit code that the script would have. Import this module first: it says how many threads the libraries may use.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
# else a mere question whether there is a GPU takes it into this process, and no child can use it
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "src")]

# a child that needs longer, in seconds, hangs
PATIENCE = 180.0
_PR_SET_PDEATHSIG = 1


class Hung(Exception):
    """A child did not end."""


def load():
    """Import all that children need, and start no thread."""
    import lightning.fabric.loggers
    import peft
    import torch
    import transformers
    from torch.utils import tensorboard
    from transformers import conversion_mapping

    from rlhf_stages import keeper, loop, plan, tracking
    from rlhf_stages.models import actor_critic, loading, scalar, start
    from rlhf_stages.rollout import collect, experience, health, samples, self_check, statistics

    import helpers

    torch.set_num_threads(1)
    conversion_mapping.get_checkpoint_conversion_mapping("gpt2")  # half a second of regular expressions, kept
    used = lightning, peft, transformers, tensorboard, helpers, keeper, loop, plan, tracking, actor_critic, loading
    return (*used, scalar, start, collect, experience, health, samples, self_check, statistics)


class Child:
    """A call in a forked process, in a folder, with its output in a file; `call` ends as a script does."""

    def __init__(self, call, folder, log):
        sys.stdout.flush()
        sys.stderr.flush()
        self._code = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(call, folder, log, parent)

    def ended(self):
        """Whether it is over."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is not None

    def send(self, number):
        """Send a signal, unless it is over."""
        if not self.ended():
            os.kill(self.pid, number)

    def wait(self, patience=PATIENCE):
        """Exit code; minus the number of the signal that killed it.

        Raises:
            Hung: it takes too long, and was killed.
        """
        return _wait(self, patience)


class Process(Child):
    """The same with a Python of its own: another seed of `hash(str)`, other addresses."""

    def __init__(self, command, folder, log):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with Path(log).open("a") as file:
            self._process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, env=environment)
        self.pid = self._process.pid

    def ended(self):
        self._code = self._process.poll()
        return self._code is not None


def _wait(child, patience):
    end = time.monotonic() + patience
    while not child.ended():
        if time.monotonic() > end:
            os.kill(child.pid, signal.SIGKILL)
            raise Hung(f"no end after {patience:.0f} seconds")
        time.sleep(0.002)
    return child._code


def _become(call, folder, log, parent):
    """What the child does; it never returns."""
    code = 1
    try:
        if sys.platform == "linux":  # nothing is left over when the one that started it is killed
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            call()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        # as Python does at its end
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
