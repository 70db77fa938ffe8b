"""A ground-truth score that a user's own file defines."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(reference: str) -> Callable[..., Any]:
    """Import `path.py:function`. The file is code and runs: name only files that you trust.

    Raises:
        ValueError: not of that form, or no such function in it. FileNotFoundError: no such file.
    """
    path, _, name = reference.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"expected path.py:function, got {reference!r}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path} (from {reference!r})")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to Any
