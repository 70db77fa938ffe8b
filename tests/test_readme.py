"""What README.md and the Makefile say is run here: commands parse, files exist."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

from blocks import BLOCKS, PAGES, commands_of, make_part, python_part
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Python and YAML blocks, and the test that runs them
RUN_BY = {
    ("docs/concepts.md", "python"): "test_concepts.py",
    ("docs/extending.md", "python"): "test_blocks.py",
    ("docs/rewards.md", "python"): "rewards/test_page.py",
    ("docs/rewards.md", "yaml"): "rewards/test_page.py",
}
# What is not parsed, and why
NOT_PARSED = {"--config=nlp_ppo.yaml": "a file of the reader's own; test_blocks.py has one"}
ELLIPSIS = ["--sft_experiment_dir=sft", "--rm_experiment_dir=rm"]
COMMANDS = list(
    dict.fromkeys(command for _, language, code in BLOCKS if language == "bash" for command in commands_of(code))
)
PYTHON = [command for command in COMMANDS if command[0] != "make" and not set(command) & set(NOT_PARSED)]
MAKE = [command for command in COMMANDS if command[0] == "make"]


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


@pytest.mark.parametrize("command", PYTHON, ids=shlex.join)
def test_every_command_of_a_script_parses(command, monkeypatch):
    parse_only(*python_part(command, ELLIPSIS), monkeypatch)


@pytest.mark.parametrize("command", MAKE, ids=shlex.join)
def test_every_make_command_leads_to_commands_that_parse(command, monkeypatch):
    # other folders than those of a user who works in this checkout, whose finished stages make would leave out
    words = [*command[1:], "NAME=readme_test", "VENV=.venv"]
    if words[0] in ("test", "docs", "docs-check"):
        return
    commands = make_part(words, ROOT)
    assert commands or words[0] in ("model-smollm2", "nltk-data", "fuzz")  # there already, perhaps
    for (script, *argv), _ in commands:
        if script.startswith(("scripts/", "data_prep/")):
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


def test_the_chinese_readme_has_the_same_code_headings_links_and_numbers():
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    for pattern in (r"```.*?```", r"^#+ ", r"^\| -[^\n]*", r"(?<![\w.,/-])-?\d+\.\d{3}(?!\d)"):
        english, other = (re.findall(pattern, text, re.DOTALL | re.MULTILINE) for text in (README, chinese))
        assert sorted(other) == sorted(english), pattern
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) - {"README.md", "README.zh.md"} for text in (README, chinese)]
    assert links[0] == links[1]
    flags = [set(re.findall(r"--\w+", text)) for text in (README, chinese)]
    assert flags[0] == flags[1]


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


def test_every_block_is_run_or_has_a_reason():
    for page, language, _ in BLOCKS:
        if language in ("python", "yaml"):
            test = ROOT / "tests" / RUN_BY[page, language]
            assert page.rpartition("/")[2] in test.read_text(encoding="utf-8")
        else:
            assert language in ("bash", "text", "mermaid"), f"{page}: who runs {language}?"
    assert all(any(part in command for command in COMMANDS) for part in NOT_PARSED)


def anchors(page):
    """Names that links into a page may use: its headings as GitHub makes them names."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found + re.findall(r'<a (?:name|id)="([^"]+)"', text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)"', text)
    for target in targets:
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target
