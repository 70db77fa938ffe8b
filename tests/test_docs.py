"""The tests that docs/ name are there."""

import re

import pytest

from helpers import ROOT

DOCS = ROOT / "docs"
ROWS = {
    m[1]: m[2]
    for m in re.finditer(
        r"^\| ([ABS][\w.]+) \| (.+) \|$", (DOCS / "correctness.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}
PROMISES = [
    (path.stem, m[1], m[2])
    for path in (DOCS / "reliability.md", DOCS / "security.md")
    if path.is_file()
    for m in re.finditer(r"^\| (.+) \| (`[\w/]+\.py::.+) \|$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def has_tests(cell):
    """All the tests that a cell names exist; returns how many."""
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    for file, test in tests:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"\ndef {test}(" in source, f"{file} has no {test}"
    return len(tests)


def test_every_entry_of_the_lists_has_a_row():
    expected = {f"A{i}" for i in range(1, 37)} | {f"S1.{i}" for i in range(1, 18)}
    # numbers that the list of reports leaves out
    expected |= {f"B{i}" for i in range(1, 49)} - {f"B{i}" for i in (6, 13, 20, 23, 29, 35, 37, 45, 46, 47)}
    assert expected <= ROWS.keys()
    assert {name[:2] for name in ROWS if name[0] == "S"} == {"S1", "S2", "S3", "S4"}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_names_a_test_or_a_reason(name):
    cell = ROWS[name].split(" | ", 1)[1]
    assert len(cell) > 10
    has_tests(cell)


@pytest.mark.parametrize(("page", "promise", "cell"), PROMISES, ids=lambda text: text[:40])
def test_every_promise_names_its_test(page, promise, cell):
    assert has_tests(cell) > 0


def test_the_promises_are_found():
    assert sum(page == "reliability" for page, *_ in PROMISES) > 20
