"""What README.md and the Makefile say is run here: commands parse, files exist."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.strip()
    for page in (
        "README.md",
        "docs/rewards.md",
        "docs/over-optimisation.md",
        "docs/human-feedback.md",
        "docs/demo.md",
    )
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


class Parsed(Exception):
    """The script got through its arguments."""


def parse_only(script, argv, monkeypatch):
    """Load a script and run its main as far as the parsed arguments."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, *argv])
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    for name in ("corpus", "script_under_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("script_under_test", ROOT / script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_under_test", module)
    spec.loader.exec_module(module)
    parse = module.parse

    def stop(*args, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(module, "parse", stop)
    with pytest.raises(Parsed):
        module.main()


def make_commands(*words):
    """The commands that make would run."""
    result = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.replace("\\\n", " ").splitlines()
    return [line.split(" > ")[0] for line in lines if line.startswith(".venv/bin/python ")]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_every_python_command_parses(command, monkeypatch):
    _, script, *argv = shlex.split(command)
    parse_only(script, argv, monkeypatch)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_command_leads_to_commands_that_parse(command, monkeypatch, tmp_path):
    # other folders than those of a user who works in this checkout, whose finished stages make would leave out
    words = [*shlex.split(command)[1:], "NAME=readme_test", "VENV=.venv"]
    if "test" in words:
        return
    commands = make_commands(*words)
    assert commands or words[0] in ("model-smollm2", "nltk-data")  # there already, perhaps
    for line in commands:
        if " scripts/" in line or " data_prep/" in line:
            _, script, *argv = shlex.split(line)
            parse_only(script, argv, monkeypatch)


def test_make_test_runs_everything():
    lines = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for part in (
        "ruff check",
        "ruff format --check",
        "mypy",
        'pytest -n auto -m "not slow"',
        "pytest -n auto --dist=loadgroup -m slow",
    ):
        assert part in lines


def test_every_file_of_the_tree_is_there():
    tree = README.split("## What is where")[1].split("```")[1]
    folder = ""
    for line in tree.splitlines():
        match = re.match(r"( *)([\w./ ]+?)(?:  |$)", line)
        if not match or not line.strip():
            continue
        names = match[2].split()
        if not match[1]:
            folder = names[0]
        for name in names:
            path = ROOT / name if not match[1] else ROOT / folder / name
            assert path.exists(), path


def test_every_link_leads_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "experiments" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
