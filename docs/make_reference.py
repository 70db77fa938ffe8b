#!/usr/bin/env python3
"""docs/reference/: a page per script, made from its --help. `make docs` writes them, a test compares them."""

import contextlib
import importlib.util
import io
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
PATTERNS = ("scripts/*.py", "data_prep/*/*.py", "examples/*.py", "examples/*/*.py")
COLUMNS = 100


def scripts() -> list[Path]:
    """What can be called, by path from the root: files with a shebang."""
    found = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
    return [path.relative_to(ROOT) for path in found if path.read_text(encoding="utf-8").startswith("#!")]


def page_name(script: Path) -> str:
    """`rlhf_sft.md`; scripts of a dataset, whose names repeat, bring its name along."""
    return f"{script.stem}.md" if script.parts[0] == "scripts" else f"{script.stem}-{script.parent.name}.md"


def help_of(script: Path) -> str:
    """What --help prints."""
    out, argv, path, known = io.StringIO(), sys.argv, list(sys.path), set(sys.modules)
    name = "_script_of_the_reference"
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    if spec is None or spec.loader is None:
        raise ImportError(script)
    module = importlib.util.module_from_spec(spec)
    sys.argv, columns = [str(script), "--help"], os.environ.get("COLUMNS")
    sys.path.insert(0, str((ROOT / script).parent))
    sys.modules[name], os.environ["COLUMNS"] = module, str(COLUMNS)
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            spec.loader.exec_module(module)
            module.main()
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
        for other in set(sys.modules) - known:  # neighbours of a script have names that repeat, too
            if str(getattr(sys.modules[other], "__file__", "")).startswith(str((ROOT / script).parent)):
                del sys.modules[other]
        sys.modules.pop(name, None)
    return out.getvalue()


def page(script: Path) -> tuple[str, str]:
    """The page of a script, and what it is for."""
    _, about, flags = re.split(r"\n\n", help_of(script), maxsplit=2)
    text = f"# {script.as_posix()}\n\n{about.strip()}\n\n```text\n{flags.strip()}\n```\n"
    return text, " ".join(about.split())


def pages() -> dict[str, str]:
    """All pages, by file name."""
    made = {page_name(script): (script, *page(script)) for script in scripts()}
    rows = [f"| [{script.as_posix()}]({name}) | {about} |" for name, (script, _, about) in made.items()]
    index = "\n".join(
        [
            "# Reference",
            "",
            "What `--help` says, a page per script; `make docs` writes them anew.",
            "",
            "| script | |",
            "| --- | --- |",
            *rows,
            "",
        ]
    )
    return {"README.md": index, **{name: text for name, (_, text, _) in made.items()}}


def main() -> None:
    """Write all pages and remove those of scripts that are gone."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
