"""Small files: read with an error that names them, written in one piece."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is not UTF-8, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one piece."""
    write_text(path, [json.dumps(content, indent=2, ensure_ascii=False, default=str), "\n"])


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Write a text file in one piece: it holds all of the new text or all of the old, also after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.writelines(parts)
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
