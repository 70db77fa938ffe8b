"""DailyDialog as its authors publish it: text files in a folder, or in a zip file that holds three more.

Of each split there are three files: `dialogues_<split>.txt` with a dialogue a line, each utterance closed by `__eou__`,
and `dialogues_act_<split>.txt` and `dialogues_emotion_<split>.txt` with a number for each utterance. Nothing is ever
unpacked to the disk, and the texts may have 64 MiB together (there are 7).
"""

import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from rlhf_stages.data.readers import TOO_LONG, BadLine, Line, numbered_lines
from rlhf_stages.data.sources import SPLITS, Source, read_source

MAX_BYTES = 2**26
_TEXT = re.compile(rf"dialogues_(?:(?:act|emotion)_)?(?:{'|'.join(SPLITS)})\.txt")
_ZIP = re.compile(rf"(?:{'|'.join(SPLITS)})\.zip")
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, OSError, ValueError)


def read_dialogues(source: str) -> Source:
    """Records `{"dialog": utterances, "act": numbers, "emotion": numbers}` of the official files, or of a data set.

    Raises:
        FileNotFoundError: `source` looks like a local path and is not there.
        ValueError: it cannot be read, one of its files is missing or there twice, or they do not fit each other.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix.lower() == ".zip":
        texts = dict(_once(_in_zip(path, str(path)), source))
    elif path.is_dir() and any(_TEXT.fullmatch(file.name) or _ZIP.fullmatch(file.name) for file in path.rglob("*")):
        texts = dict(_once(_in_folder(path), source))
    else:
        return read_source(source)
    parts = []
    for split in SPLITS:
        names = [f"dialogues_{kind}{split}.txt" for kind in ("", "act_", "emotion_")]
        missing = [name for name in names if name not in texts]
        if missing:
            raise ValueError(f"--source {source} holds no {missing[0]}; all of {', '.join(names)} are needed")
        lines = [list(_lines(texts[name])) for name in names]
        if len(set(map(len, lines))) != 1:
            counts = ", ".join(f"{name} {len(of_file):,}" for name, of_file in zip(names, lines, strict=True))
            raise ValueError(f"--source {source}: the lines of its files do not fit each other ({counts})")
        parts.append((split, f"{source} [{names[0]}]", partial(_rows, *lines)))
    return Source(parts)


def _rows(dialogues: list[bytes | None], acts: list[bytes | None], emotions: list[bytes | None]) -> Iterator[Line]:
    for number, (text, act, emotion) in enumerate(zip(dialogues, acts, emotions, strict=True), start=1):
        if text is None or act is None or emotion is None:
            yield BadLine(number, TOO_LONG)
            continue
        try:
            *utterances, rest = text.decode("utf-8").split("__eou__")
        except UnicodeDecodeError:
            yield BadLine(number, "not UTF-8")
            continue
        utterances += [rest] if rest.strip() else []
        yield {"dialog": utterances, "act": _numbers(act), "emotion": _numbers(emotion)}


def _numbers(line: bytes) -> list[int]:
    """The labels of a line, -1 for what is none."""
    return [int(word) if word.isdigit() and len(word) < 4 else -1 for word in line.split()]


def _lines(content: bytes) -> Iterator[bytes | None]:
    lines = (line for _, line in numbered_lines(io.BytesIO(content.rstrip())))
    return (line if line is None else line.rstrip() for line in lines)


def _once(found: Iterable[tuple[str, bytes]], source: str) -> Iterator[tuple[str, bytes]]:
    """The same, as long as no name comes twice and all together stay within the limit."""
    names: set[str] = set()
    size = 0
    for name, content in found:
        size += len(content)
        if name in names:
            raise ValueError(f"--source {source} holds {name} twice; name the folder or zip file that holds it once")
        if size > MAX_BYTES:
            raise ValueError(f"--source {source}: its texts have more than {MAX_BYTES:,} bytes")
        names.add(name)
        yield name, content


def _in_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The text files below a folder; where there are none of a split, those of its zip file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    texts = [file for file in files if _TEXT.fullmatch(file.name)]
    for file in texts:
        with file.open("rb") as opened:
            yield file.name, opened.read(MAX_BYTES + 1)
    names = {file.name for file in texts}
    for file in files:
        if _ZIP.fullmatch(file.name) and f"dialogues_{file.stem}.txt" not in names:
            yield from _in_zip(file, str(file))


def _in_zip(file: Path | io.BytesIO, name: str, is_outer: bool = True) -> Iterator[tuple[str, bytes]]:
    """The text files in a zip file and, one level deep, in the zip files of the splits that it holds."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                base = PurePosixPath(member.filename).name
                if _TEXT.fullmatch(base):
                    yield base, _read(archive, member)
                elif is_outer and _ZIP.fullmatch(base):
                    yield from _in_zip(io.BytesIO(_read(archive, member)), f"{name}/{base}", is_outer=False)
    except _UNREADABLE as error:
        if str(error).startswith("--source"):
            raise
        raise ValueError(f"--source {name} is not a readable zip file ({error}); fetch it again") from None


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename!r} is packed in a way that such files are not")
    with archive.open(member) as opened:
        content = opened.read(MAX_BYTES + 1)  # what the list of members says of its size may be wrong
    if len(content) > MAX_BYTES:
        raise ValueError(f"{member.filename!r} has more than {MAX_BYTES:,} bytes")
    return content
