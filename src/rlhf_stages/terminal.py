"""Texts from elsewhere on their way to a terminal or a page."""

import re

# C0 and C1 without tab and newline: they move the cursor, rename the window, and more
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# what makes a tag, a link or an image of Markdown, or hides such a character
_MARKUP = re.compile(r"[\\&<>\[\]]")


def printable(text: str) -> str:
    """The text with each control character spelled out, so that the terminal shows it and does not obey it."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def without_links(text: str) -> str:
    """The text as Markdown that holds no HTML, no link and no image, which would tell its address who reads it."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)
