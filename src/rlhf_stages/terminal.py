"""Texts from elsewhere on their way to a terminal."""

import re

# C0 and C1 without tab and newline: they move the cursor, rename the window, and more
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with each control character spelled out, so that the terminal shows it and does not obey it."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
