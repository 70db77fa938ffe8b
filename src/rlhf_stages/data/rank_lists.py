"""Ranked lists as text: a list per line, its responses separated by tabs, the best one first.

There is no header, nothing is quoted, and nothing can be escaped: a text with a tab or a newline in it cannot be
written in this format. Where a labelling tool put the prompt in front of every response, it is the same in all lists or
not known; `prompt` takes it off again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlhf_stages.data.readers import TOO_LONG, BadLine, numbered_lines


class RankList(NamedTuple):
    """A line of the file: its number, the prompt, and the responses, best first."""

    line: int
    prompt: str
    responses: tuple[str, ...]


def read_rank_lists(path: Path, prompt: str = "") -> Iterator[RankList | BadLine]:
    """The lists of a file, and a `BadLine` for each line that is none; empty lines do not count.

    Args:
        prompt: what the responses answer. It is removed where each text of a list begins with it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; expected ranked lists, a line each, separated by tabs, best first")
    with path.open("rb") as file:
        for number, line in numbered_lines(file):
            if line is None:
                yield BadLine(number, TOO_LONG)
            elif line.strip():
                yield _parse(line, number, prompt)


def _parse(line: bytes, number: int, prompt: str) -> RankList | BadLine:
    try:
        texts = line.decode("utf-8").rstrip("\r\n").split("\t")
    except UnicodeDecodeError:
        return BadLine(number, "not UTF-8")
    if prompt and all(text.startswith(prompt) for text in texts):
        texts = [text.removeprefix(prompt) for text in texts]
    if len(texts) < 2:
        return BadLine(number, "a list of one")
    if not all(text.strip() for text in texts):
        return BadLine(number, "an empty text")
    if len({text.strip() for text in texts}) < len(texts):
        return BadLine(number, "the same text twice")
    return RankList(number, prompt, tuple(texts))
