"""Ends that come from outside: signals, a time limit, a process that died."""

import os
import signal
import threading
import time
from typing import Any

import torch
from lightning.fabric import Fabric

from rlhf_stages.cli import STARTED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# a thread looks this often, in seconds, whether the process that started this one is still there
_WATCH_INTERVAL = 2.0


class Interruption:
    """Takes note of signals and of the time; every device learns of it at the same step boundary.

    The second signal of a kind acts as it does in any program: a second Ctrl-C stops at once.

    Args:
        max_seconds: time since the start of the program after which it has to be over, the last save included.
        save_seconds: how long a save will take, until one is measured.
    """

    def __init__(self, max_seconds: float | None = None, save_seconds: float = 0.0) -> None:
        self.save_seconds = save_seconds
        self._deadline = None if max_seconds is None else STARTED + max_seconds
        self._noted = 0
        self._longest, self._last = 0.0, time.monotonic()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, _: Any) -> None:
        self._noted = number
        signal.signal(number, signal.SIG_DFL)

    def reason(self, fabric: Fabric) -> str | None:
        """Why the run has to stop after this step, the same on every device; None if it does not."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        late = self._deadline is not None and now + self._longest + self.save_seconds > self._deadline
        noted = torch.tensor([float(self._noted), float(late)], device=fabric.device)
        if fabric.world_size > 1:
            agreed: Any = fabric.all_reduce(noted, reduce_op="max")
            noted = torch.as_tensor(agreed)
        number, late = int(noted[0]), bool(noted[1])
        return signal.Signals(number).name if number else "--max_time" if late else None

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody else would end what waits for a dead device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
