"""The code blocks of README.md and docs/, and the commands in them."""

import re
import shlex
import subprocess

from helpers import ROOT

PAGES = [
    *sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "experiments" / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]  # fmt: skip
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), language, code)
    for page in PAGES
    for language, code in re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
PROGRAMS = ("python", "make", "torchrun", "srun")


def commands_of(code):
    """The commands of a block as bash takes them apart, each a tuple of words; none of them runs.

    Raises:
        AssertionError: it is not bash, has a variable without a value, or calls something else than `PROGRAMS`.
    """
    say = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" $'\\n'; }}\n" for name in PROGRAMS)
    result = subprocess.run(["bash", "-euc", say + code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{code}\n{result.stderr}"
    return [tuple(words.split("\0")) for words in result.stdout.split("\0\n\0")[:-1]]


def python_part(command, ellipsis):
    """The script of a command and its flags, whatever starts it; `...` stands for the flags of `ellipsis`."""
    start = next(i for i, word in enumerate(command) if word.endswith(".py"))
    script, *flags = command[start:]
    return script, [part for flag in flags for part in (ellipsis if flag == "..." else [flag])]


def make_part(words, cwd):
    """The Python commands that make would run in a folder: the words of each, and where its output goes or None."""
    result = subprocess.run(["make", "-n", *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.replace("\\\n", " ").splitlines()
    parts = [line.partition(" > ") for line in lines if line.startswith(".venv/bin/python ")]
    return [(shlex.split(line)[1:], output.strip() or None) for line, _, output in parts]
