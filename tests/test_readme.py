"""What README.md and the Makefile say is run here: commands parse, files exist."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "experiments" / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]  # fmt: skip
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), language, code)
    for page in PAGES
    for language, code in re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]
# Python and YAML blocks, and the test that runs them
RUN_BY = {
    ("docs/concepts.md", "python"): "test_concepts.py",
    ("docs/rewards.md", "python"): "rewards/test_page.py",
    ("docs/rewards.md", "yaml"): "rewards/test_page.py",
}
# What is not even parsed, and why
NOT_TRIED = {"--config=nlp_ppo.yaml": "a file of the reader's own; test_openrl.py parses such files"}
# What stands before the flags of a script
LAUNCHERS = re.compile(r"^(until |torchrun .*?(?=scripts/)|srun .*?(?=python ))")


def lines_of(code):
    """The commands of a block, with its shell variables filled in."""
    variables = {}
    for line in code.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), line.strip())
        if match := re.fullmatch(r'([A-Z]+)="?(.*?)"?', line):
            variables[match[1]] = match[2]
        elif line:
            yield line.removeprefix("OMP_NUM_THREADS=1 ")


def script_command(line):
    """`python script flags` of a line that calls a script in whatever way, or None."""
    line = LAUNCHERS.sub("", line).partition(";")[0]
    line = f"python {line}" if line.startswith("scripts/") else line
    if not line.startswith("python "):
        return None
    return re.sub(r" \.\.\.( |$)", " --sft_experiment_dir=sft --rm_experiment_dir=rm ", line)


LINES = list(dict.fromkeys(line for _, language, code in BLOCKS if language == "bash" for line in lines_of(code)))
SCRIPT_LINES = [line for line in LINES if script_command(line) and not any(part in line for part in NOT_TRIED)]
MAKE_LINES = [line for line in LINES if line.startswith("make ")]


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


@pytest.mark.parametrize("line", SCRIPT_LINES)
def test_every_command_of_a_script_parses(line, monkeypatch):
    _, script, *argv = shlex.split(script_command(line), comments=True)
    parse_only(script, argv, monkeypatch)


@pytest.mark.parametrize("command", MAKE_LINES)
def test_every_make_command_leads_to_commands_that_parse(command, monkeypatch, tmp_path):
    # other folders than those of a user who works in this checkout, whose finished stages make would leave out
    words = [*shlex.split(command, comments=True)[1:], "NAME=readme_test", "VENV=.venv"]
    if words[0] in ("test", "docs", "docs-check"):
        return
    commands = make_commands(*words)
    assert commands or words[0] in ("model-smollm2", "nltk-data", "fuzz")  # there already, perhaps
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
    for line in LINES:
        assert line in SCRIPT_LINES or line in MAKE_LINES or any(part in line for part in NOT_TRIED), line
    for part in NOT_TRIED:
        assert any(part in line for line in LINES)


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
