"""The state of a run that is not in its weights: copied, written and read."""

import copy
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from rlhf_stages.checkpoint import RESUME_DIR

_THREADS = 4


class Stateful(Protocol):
    """Something whose state goes into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state over."""


def on_host(value: Any) -> Any:
    """A copy in host memory of a model, or of tensors in dictionaries and lists."""
    tensors: list[Tensor] = []
    if isinstance(value, nn.Module):
        tensors += [*value.parameters(), *value.buffers()]
    else:
        apply_to_collection(value, Tensor, tensors.append)
    # several at a time: fresh memory is what takes the time, and each thread gets its own
    with ThreadPoolExecutor(_THREADS) as pool:
        copies = dict(zip(map(id, tensors), pool.map(_to_host, tensors), strict=True))
    if isinstance(value, nn.Module):
        return copy.deepcopy(value, copies)
    return apply_to_collection(value, Tensor, lambda tensor: copies[id(tensor)])


def _to_host(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "quant_state"):  # a 4-bit weight of bitsandbytes, which means nothing without its scales
        return copy.deepcopy(tensor).to("cpu")
    if tensor.is_cuda:  # page-locked memory, which PyTorch keeps for the next time: ten times the speed from then on
        copied = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach())
    else:
        copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


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


def move_states(source: Path, folder: Path) -> None:
    """Move what `write_state` wrote into one folder to another beside it."""
    (source / RESUME_DIR).rename(folder / RESUME_DIR)
    source.rmdir()


def read_state(folder: Path, name: str) -> Any:
    """Read it.

    Raises:
        ValueError: the checkpoint does not have it, or it holds more than numbers and text.
    """
    path = folder / RESUME_DIR / f"{name}.pt"
    if not path.is_file():
        raise ValueError(f"{folder} has no {RESUME_DIR}/{name}.pt: it was saved with other arguments, or damaged")
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # torch raises half a dozen types, and explains for a page
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a readable state ({type(error).__name__}: {reason})") from None
