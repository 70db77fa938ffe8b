"""A ground-truth score that a user's own file defines."""

import math
from collections.abc import Callable

from rlhf_stages.plugins import load_function, where


def load_score(reference: str) -> Callable[[str, str], float]:
    """As `load_function`, for a function of prompt and response whose value must be a finite number.

    The function that is returned raises ValueError where the user's fails or returns anything else.
    """
    function = load_function(reference)

    def score(prompt: str, response: str) -> float:
        try:
            value = function(prompt, response)
        except Exception as error:  # it is anybody's code
            raise ValueError(f"{reference} failed: {where(error)}; the response was {response!r:.200}") from error
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
