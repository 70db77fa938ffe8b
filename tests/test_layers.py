"""Rules about the code itself: layers, imports, sizes, and that every flag does something."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_stages import args

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rlhf_stages"
SOURCES = sorted(path for folder in ("src", "scripts", "data_prep") for path in (ROOT / folder).rglob("*.py"))
# a table: a line for each flag, of which there are many
EXEMPT_FROM_LENGTH = {PACKAGE / "args.py"}
GROUPS = [
    value for value in vars(args).values() if dataclasses.is_dataclass(value) and value.__module__ == args.__name__
]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trees(paths):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_layers_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_arguments_import_without_torch_and_at_once():
    """Seconds of the processor, since others may use it as well."""
    code = (
        "import sys, time; started = time.process_time(); import rlhf_stages.args, rlhf_stages.cli;"
        "print(time.process_time() - started, *sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    heavy = {"torch", "transformers", "lightning", "torchmetrics", "datasets", "peft", "gradio", "matplotlib", "wandb"}
    assert heavy.isdisjoint(runs[0][1:])
    assert min(float(seconds) for seconds, *_ in runs) < 0.5


def read_attributes(tree):
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_argument_is_read():
    """Outside of args.py, or by a property of its group that is read there; what only args.py checks does nothing."""
    read = set()
    for path, tree in trees(SOURCES).items():
        if path != PACKAGE / "args.py":
            read |= read_attributes(tree)
    properties = {
        node.name: read_attributes(node)
        for node in ast.walk(trees([PACKAGE / "args.py"])[PACKAGE / "args.py"])
        if isinstance(node, FUNCTIONS) and any(ast.unparse(d) == "property" for d in node.decorator_list)
    }
    while reached := {name for name in properties if name in read and not properties[name] <= read}:
        read |= set().union(*(properties[name] for name in reached))
    unread = {f"{group.__name__}.{f.name}" for group in GROUPS for f in dataclasses.fields(group) if f.name not in read}
    assert not unread


def test_modules_are_short_enough_to_read():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 300}
    for path in EXEMPT_FROM_LENGTH:
        too_long.pop(str(path.relative_to(ROOT)), None)
    assert not too_long


def test_functions_are_short_enough_to_read():
    too_long = {}
    for path, tree in trees(SOURCES).items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                limit = 200 if node.name == "main" and "src" not in path.relative_to(ROOT).parts else 60
                if (length := node.end_lineno - node.lineno + 1) > limit:
                    too_long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert not too_long


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


# what scripts/pages holds is imported by a script that has parsed its arguments
SCRIPTS = [path for path in SOURCES if PACKAGE not in path.parents and path.parent.name != "pages"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_do_not_import_each_other(path):
    others = {other.stem for other in (ROOT / "scripts").glob("*.py")} | {"scripts"}
    modules = {name.partition(".")[0] for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    assert modules.isdisjoint(others)


@pytest.mark.parametrize("name", ["rlhf_sft", "rlhf_rm", "rlhf_ppo", "rlhf_dpo", "train_classifier"])
def test_training_scripts_import_nothing_that_draws_or_downloads(name):
    modules = {
        module.partition(".")[0]
        for module in imported(ast.parse((ROOT / "scripts" / f"{name}.py").read_text(encoding="utf-8")))
    }
    assert modules.isdisjoint({"gradio", "matplotlib", "datasets"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_optional_is_imported_where_it_is_used(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    outside = ast.Module([node for node in body if not isinstance(node, (*FUNCTIONS, ast.ClassDef))], [])
    assert {"wandb", "bitsandbytes"}.isdisjoint({name.partition(".")[0] for name in imported(outside)})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_parse_their_arguments_before_anything_heavy(path):
    top_level = ast.Module(
        [
            node
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ],
        [],
    )
    heavy = {"torch", "transformers", "lightning", "datasets", "peft", "gguf", "gradio"}
    modules = set(imported(top_level))
    assert {name.partition(".")[0] for name in modules}.isdisjoint(heavy)
    assert {name for name in modules if name.startswith("rlhf_stages")} <= {
        "rlhf_stages.args",
        "rlhf_stages.cli",
        "rlhf_stages.terminal",
    }
