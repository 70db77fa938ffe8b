"""Texts from elsewhere on their way to a terminal or a page."""

import re
import textwrap

# what a run prints is at most this wide
COLUMNS = 100

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


def first_line(error: Exception) -> str:
    """What an error says, in a line; its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def folded(text: str) -> str:
    """The text in lines of at most `COLUMNS`, broken between words only: a path stays whole, however long it is."""
    fold = textwrap.TextWrapper(COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(fold.fill(line) for line in text.split("\n"))


def folded_command(command: str, indent: str = "  ") -> str:
    """A shell command in lines of at most `COLUMNS` that can be copied as they are, each but the last ending in \\."""
    first, *words = command.split(" ")
    lines = [indent + first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 <= COLUMNS:  # a space before it, and " \\" after it
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}    {word}")
    return " \\\n".join(lines)
