#!/usr/bin/env python3
"""Apply each single-line fault of mutants.md to a copy of the code and see a fast test fail: `make mutants`.

Names or numbers of mutants as arguments run those alone. A mutant whose tests pass has survived; the exit code is 1.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.md"
ENTRY = re.compile(
    r"^### (?P<number>\d+)\. (?P<name>.+)\n\n`(?P<file>[\w/.]+)` · (?P<tests>.+)\n\n"
    r"```diff\n-(?P<old>.+)\n\+(?P<new>.+)\n```$",
    re.MULTILINE,
)
# What is copied, by the first folder of a mutant's file; tests load the scripts of the last by their path
FOLDERS = {"rlhf_stages": ROOT / "src" / "rlhf_stages", "examples": ROOT / "examples"}
SECONDS = 120


@dataclass(frozen=True)
class Mutant:
    """A line of a file of the package or of examples/, what becomes of it, and the tests that are to notice."""

    number: int
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file within a folder that holds both copies; mutants.md leaves the package's name out."""
        return Path(self.file) if self.file.startswith("examples/") else Path("rlhf_stages") / self.file

    def text(self) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: the line is not there exactly once.
        """
        lines = (FOLDERS[self.path.parts[0]].parent / self.path).read_text(encoding="utf-8").splitlines()
        places = [i for i, line in enumerate(lines) if line.strip() == self.old.strip()]
        if len(places) != 1:
            raise ValueError(f"mutant {self.number}: {self.old.strip()!r} is in {self.file} {len(places)} times")
        indent = lines[places[0]][: len(lines[places[0]]) - len(lines[places[0]].lstrip())]
        lines[places[0]] = indent + self.new.strip()
        return "\n".join(lines) + "\n"


def read_mutants() -> list[Mutant]:
    """Every entry of mutants.md, in order."""
    text = LIST.read_text(encoding="utf-8")
    found = [
        Mutant(int(m["number"]), m["name"], m["file"], m["old"], m["new"], tuple(re.findall(r"`(.+?)`", m["tests"])))
        for m in ENTRY.finditer(text)
    ]
    if [m.number for m in found] != list(range(1, text.count("\n### ") + 1)):
        raise ValueError(f"{LIST}: an entry cannot be read, or the numbers have a gap")
    return found


def is_caught(mutant: Mutant) -> bool:
    """Whether the tests fail in a process of their own whose code has the fault."""
    with tempfile.TemporaryDirectory() as folder:
        for name, original in FOLDERS.items():
            shutil.copytree(original, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / mutant.path).write_text(mutant.text(), encoding="utf-8")
        child = os.fork()
        if child == 0:
            _run_tests(folder, mutant.tests)
        deadline = time.monotonic() + SECONDS
        while not (state := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:  # a fault may also be a loop without end
                os.kill(child, 9)
                os.waitpid(child, 0)
                return True
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(state[1])
        if code not in (0, 1):
            raise RuntimeError(f"mutant {mutant.number}: pytest ended with {code}; are {mutant.tests} there?")
        return code == 1


def _run_tests(folder: str, tests: tuple[str, ...]) -> None:
    """In the child: import the faulty code, run, and leave with pytest's exit code."""
    os.chdir(ROOT)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.path[:0] = [folder, str(ROOT / "tests")]
    sys.dont_write_bytecode = True
    import pytest

    import helpers

    helpers.COPIES["examples"] = Path(folder) / "examples"

    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp"]
    os._exit(int(pytest.main([*options, *tests])))


def main() -> int:
    """Run all mutants, or those named on the command line; print one line each and the count."""
    import peft  # noqa: F401  the children inherit what takes seconds to import
    import torch
    import transformers  # noqa: F401
    from lightning.fabric import Fabric  # noqa: F401

    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    mutants = [m for m in read_mutants() if not wanted or str(m.number) in wanted or m.name in wanted]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        # tests that fail without a fault would catch everything
        controls = list({m.tests: replace(m, new=m.old) for m in mutants}.values())
        failing = [m.tests for m, caught in zip(controls, pool.map(is_caught, controls), strict=True) if caught]
        if failing:
            print(f"these tests fail without any fault: {failing}")
            return 1
        results = list(pool.map(is_caught, mutants))
    for mutant, caught in zip(mutants, results, strict=True):
        print(f"{'caught  ' if caught else 'SURVIVED'} {mutant.number:3} {mutant.name} ({mutant.file})")
    print(f"{sum(results)} of {len(results)} caught")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
