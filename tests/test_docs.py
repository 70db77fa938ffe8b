"""What docs/correctness.md promises is there."""

import re

import pytest

from helpers import ROOT

TEXT = (ROOT / "docs" / "correctness.md").read_text(encoding="utf-8")
ROWS = {m[1]: m[2] for m in re.finditer(r"^\| ([ABS][\w.]+) \| (.+) \|$", TEXT, re.MULTILINE)}


def test_every_entry_of_the_lists_has_a_row():
    expected = {f"A{i}" for i in range(1, 37)} | {f"S1.{i}" for i in range(1, 18)}
    # numbers that the list of reports leaves out
    expected |= {f"B{i}" for i in range(1, 49)} - {f"B{i}" for i in (6, 13, 20, 23, 29, 35, 37, 45, 46, 47)}
    assert expected <= ROWS.keys()
    assert {name[:2] for name in ROWS if name[0] == "S"} == {"S1", "S2", "S3", "S4"}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_names_a_test_or_a_reason(name):
    cell = ROWS[name].split(" | ", 1)[1]
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert len(cell) > 10
    for file, test in tests:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"\ndef {test}(" in source, f"{file} has no {test}"
