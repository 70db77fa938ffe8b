"""A ground-truth score that a user's own file defines."""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(reference: str) -> Callable[..., Any]:
    """Import `path.py:function`. The file is code and runs: name only files that you trust.

    Raises:
        ValueError: not of that form, no such function in it, or the file fails. FileNotFoundError: no such file.
    """
    path, _, name = reference.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"expected path.py:function, got {reference!r}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path} (from {reference!r})")
    # a name of its own, or a file called json.py would be found in place of the library
    spec = importlib.util.spec_from_file_location(f"function_of_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is anybody's code
        raise ValueError(f"{path} cannot be imported: {_where(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to Any


def load_score(reference: str) -> Callable[[str, str], float]:
    """As `load_function`, for a function of prompt and response whose value must be a finite number.

    The function that is returned raises ValueError where the user's fails or returns anything else.
    """
    function = load_function(reference)

    def score(prompt: str, response: str) -> float:
        try:
            value = function(prompt, response)
        except Exception as error:  # it is anybody's code
            raise ValueError(f"{reference} failed: {_where(error)}; the response was {response!r:.200}") from error
        try:
            number = math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)
        except Exception:  # what is not a number, a tensor of several, an integer beyond all floats
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"{reference} returned {value!r:.100}, expected a finite number; the response was {response!r:.200}"
            )
        return number

    return score


def _where(error: Exception) -> str:
    """What was raised, and in which line of which file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
