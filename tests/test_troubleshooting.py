"""Messages that docs/troubleshooting.md quotes are in the source, and so are the flags and metrics that it names."""

import ast
import re

import pytest

from helpers import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PATHS = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("scripts/*.py")]
SOURCES = [path.read_text(encoding="utf-8") for path in PATHS]


def text_of(node):
    """A string of the source, with … for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "…"


def messages():
    """All strings of the source."""
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.add(" ".join(text_of(node).split()))
    return found


MESSAGES = messages()


def is_said(quote):
    """Some string of the source says it, with values at the same places."""
    return any(quote in message for message in MESSAGES)


def test_messages_are_quoted():
    assert len(QUOTED) > 30
    assert not is_said("the critic explains everything")


@pytest.mark.parametrize("quote", QUOTED, ids=lambda text: text[:50])
def test_every_quoted_message_is_in_the_source(quote):
    assert is_said(quote)


def test_every_flag_and_metric_is_there():
    text = "\n".join(SOURCES)
    prose = re.sub(r"```text\n.*?```", "", PAGE, flags=re.DOTALL)
    for name in re.findall(r"--(\w+)", PAGE):
        assert re.search(rf"^    {name}: ", text, re.MULTILINE), f"--{name}"
    for group, name in re.findall(r"`(info|health|train|val|debug)/(\w+)`", prose):
        assert f'"{group}/{name}"' in text or f"{{prefix}}/{name}" in text or f'"{name}"' in text, f"{group}/{name}"
