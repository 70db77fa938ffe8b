"""Every fault of mutants.md can still be made, and the tests that are to notice it are there."""

import ast

from helpers import ROOT
from run_mutants import read_mutants


def problem(mutant):
    """What stands in the way of a mutant, if anything."""
    try:
        ast.parse(mutant.text())  # what is no Python would make every test fail
    except (OSError, SyntaxError, ValueError) as error:
        return f"mutant {mutant.number}: {error}"
    for test in mutant.tests:
        file, *function = test.split("::")
        path = ROOT / file
        if not path.is_file() or not all(f"\ndef {name}(" in path.read_text(encoding="utf-8") for name in function):
            return f"mutant {mutant.number}: there is no {test}"
    return None if mutant.tests else f"mutant {mutant.number} names no test"


def test_every_mutant_applies_and_names_tests_that_are_there():
    assert [found for found in map(problem, read_mutants()) if found] == []
