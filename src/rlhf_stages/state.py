"""The state of a run that is not in its weights: copied, written and read."""

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from rlhf_stages.checkpoint import RESUME_DIR


class Stateful(Protocol):
    """Something whose state goes into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state over."""


def on_host(value: Any) -> Any:
    """A copy in host memory of a model, or of tensors in dictionaries and lists."""
    if not isinstance(value, nn.Module):
        return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=p.requires_grad) for p in value.parameters()
    }
    memo |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in value.buffers()}
    return copy.deepcopy(value, memo)


def random_state() -> dict[str, Any]:
    """State of every random generator of this process."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every random generator where it was."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def write_state(state: Any, name: str, folder: Path) -> None:
    """Write one of the files in `resume/` of a checkpoint."""
    path = folder / RESUME_DIR / f"{name}.pt"
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)


def read_state(folder: Path, name: str) -> Any:
    """Read it.

    Raises:
        ValueError: the checkpoint does not have it.
    """
    path = folder / RESUME_DIR / f"{name}.pt"
    if not path.is_file():
        raise ValueError(f"{folder} has no {RESUME_DIR}/{name}.pt: it was saved with other arguments, or damaged")
    return torch.load(path, weights_only=True)
