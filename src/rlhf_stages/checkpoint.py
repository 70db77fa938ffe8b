"""Checkpoints: each is there whole, or not at all.

checkpoints/step-000500/
    config.json, model.safetensors, ...   a Hugging Face model folder with its tokenizer
    critic/                               the same of PPO's critic
    resume/                               what a resumed run needs besides the weights
    manifest.json                         size and SHA-256 of every other file
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_stages.files import flush, read_json, write_json

MANIFEST = "manifest.json"
RESUME_DIR = "resume"
_NAME = re.compile(r"step-(\d{6,})")
# files are written and read back side by side; more threads than this only wait for the disk
_THREADS = 4


class Checkpoints:
    """The checkpoints of a run, by step."""

    def __init__(self, directory: Path) -> None:
        self.dir = directory

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.dir / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or not, in order."""
        names = (_NAME.fullmatch(path.name) for path in self.dir.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def publish(self, step: int, writers: Sequence[Callable[[Path], None]]) -> Path:
        """Let the writers fill a folder side by side; once all of it is on the disk it gets its name.

        Args:
            writers: each is called with a folder of its own, and what it leaves there goes into the checkpoint. The
                first ones start first: those that take long.

        Raises:
            OSError: it could not be written, say because the disk is full; what was there before is as it was.
        """
        target = self.path(step)
        temporary, old = target.with_name(f".{target.name}"), target.with_name(f".{target.name}.old")
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        parts = [temporary / f".part-{i}" for i in range(len(writers))]
        try:
            for part in parts:
                part.mkdir(parents=True)
            with ThreadPoolExecutor(_THREADS) as pool:
                sums: dict[str, Any] = {}
                for written in [pool.submit(_write, *job) for job in zip(writers, parts, strict=True)]:
                    sums |= written.result()
            for part in parts:
                for name in _files(part):
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    (part / name).rename(temporary / name)
                shutil.rmtree(part)
            write_json(temporary / MANIFEST, {"files": dict(sorted(sums.items()))})
            for folder in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                flush(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        flush(self.dir)
        shutil.rmtree(old, ignore_errors=True)
        return target

    def remove(self, step: int) -> None:
        """Take a checkpoint away; a half-removed one is never taken for a whole one."""
        path = self.path(step)
        hidden = path.with_name(f".{path.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)

    def tidy(self) -> None:
        """Remove what killed runs left half-written or half-removed."""
        for leftover in self.dir.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def check_whole(folder: Path, *, resumable: bool = False) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        resumable: check what a resumed run needs too; else only what others read. A model folder from elsewhere has no
            manifest and passes only without this.

    Raises:
        ValueError: a file is missing, cut off or altered, or there is no manifest where one is needed.
    """
    if not (folder / MANIFEST).is_file():
        if resumable:
            raise ValueError(f"{folder} has no {MANIFEST}: it is not a whole checkpoint")
        return
    files = read_json(folder / MANIFEST).get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise ValueError(f"{folder / MANIFEST} does not list files; the checkpoint is damaged")
    if resumable and not any(name.startswith(f"{RESUME_DIR}/") for name in files):
        raise ValueError(f"{folder} holds weights only, nothing to resume from")
    names = [name for name in files if resumable or "/" not in name]
    with ThreadPoolExecutor(_THREADS) as pool:
        for problem in pool.map(lambda name: _problem(folder, name, files[name]), names):
            if problem:
                raise ValueError(
                    f"{folder}: {problem}; the checkpoint is damaged, or was changed by hand (then delete {MANIFEST})"
                )


def _problem(folder: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"its manifest names {name!r}, which lies outside"
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry.get("size"):
        return f"{name} has {path.stat().st_size} bytes instead of {entry.get('size')}"
    if _sum(path) != entry.get("sha256"):
        return f"{name} is not what was written (its SHA-256 differs)"
    return None


def _write(writer: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """Write, wait for the disk, and read back; the sums of the files."""
    writer(folder)
    sums = {}
    for name in _files(folder):
        flush(folder / name)
        sums[name] = {"size": (folder / name).stat().st_size, "sha256": _sum(folder / name)}
    return sums


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
