"""Files of records, one record at a time: nobody vouches for what is in them.

A line that cannot be read is a `BadLine`; a file that cannot be read is a ValueError that names it. A packed file is
never unpacked as a whole.
"""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from rlhf_stages.files import read_json

MAX_LINE = 2**26  # Bytes; a small packed file can hold a line that no memory can
TOO_LONG = f"longer than {MAX_LINE:,} bytes"
MAX_NESTING = 100  # Far below what json itself can write again
MAX_BATCH = 2**28  # Bytes of the rows of a table that are looked at together
BATCH_ROWS = 100
csv.field_size_limit(MAX_LINE)  # What is left of a longer field would be read as rows, and 131,072 is the default


class BadLine(NamedTuple):
    """Where a line is that could not be read, and why."""

    line: int
    why: str


Line = Mapping[str, Any] | BadLine


def numbered_lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file from 1, without a byte order mark; None in place of one that is longer than `MAX_LINE`."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        is_whole = len(line) < MAX_LINE or line.endswith(b"\n")
        while len(line) == MAX_LINE and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
        yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line) if is_whole else None


def _read_jsonl(path: Path) -> Iterator[Line]:
    number = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in numbered_lines(file):
                if line is None:
                    yield BadLine(number, TOO_LONG)
                elif line.strip():
                    yield _parse_json(line, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is a broken gzip file ({error}, after line {number}); fetch it again") from None


def _parse_json(line: bytes, number: int) -> Line:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadLine(number, "not UTF-8")
    except (ValueError, RecursionError):
        return BadLine(number, "not JSON")
    if not isinstance(record, dict):
        return BadLine(number, f"a JSON {type(record).__name__}, not an object")
    return BadLine(number, "nested too deep") if _is_deeper(record, MAX_NESTING) else record


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _read_csv(path: Path, columns: Sequence[str] = ()) -> Iterator[Line]:
    return _read_table(path, columns, "excel")


def _read_tsv(path: Path, columns: Sequence[str] = ()) -> Iterator[Line]:
    return _read_table(path, columns, _PlainTabs)


class _PlainTabs(csv.excel_tab):
    """Tabs part the fields, and a quotation mark is a mark like any other."""

    quoting = csv.QUOTE_NONE


def _read_table(path: Path, columns: Sequence[str], dialect: str | type[csv.Dialect]) -> Iterator[Line]:
    """Rows of a table; the first line names the columns unless `columns` does."""
    # Bytes that are not UTF-8 come through as surrogates, so that they spoil their own row only.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, dialect)
        header: Sequence[str] | None = columns or None
        named = "--columns names" if columns else "the header has"
        while True:
            try:
                fields = next(rows, None)
            except csv.Error as error:
                yield BadLine(rows.line_num, str(error))
                continue
            if fields is None:
                return
            if header is None:
                header = fields
            elif len(fields) not in (0, len(header)):
                yield BadLine(rows.line_num, f"{len(fields)} fields, {named} {len(header)}")
            elif not is_text("".join(fields)):
                yield BadLine(rows.line_num, "not UTF-8")
            elif fields:
                yield dict(zip(header, fields, strict=True))


def is_text(text: str) -> bool:
    """False if half of a surrogate pair is in it, which JSON can spell and neither UTF-8 nor a tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[Line]:
    import pyarrow.parquet

    try:
        yield from _rows(pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS), path)
    except Exception as error:  # of pyarrow, and what turning numbers into dates and texts raises
        raise ValueError(f"{path} is not a readable parquet file ({_reason(error)}); fetch it again") from None


def read_saved(folder: Path) -> dict[str, Iterable[Line]]:
    """The splits of a folder of `save_to_disk`, by name; one that is not part of a dictionary is `train`.

    The tables are read as they are, not through `datasets`: its features may open files and addresses that the data
    name, and it trusts the offsets of the file, so that a wrong one ends the process.

    Raises:
        ValueError: one of the JSON files is damaged, or names a file outside of the folder.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            names = _inner_names(read_json(folder / "dataset_dict.json").get("splits"))
            return {name: _Tables(_arrow_files(folder / name)) for name in names}
        return {"train": _Tables(_arrow_files(folder))}
    except (ValueError, OSError) as error:
        raise ValueError(
            f"'{folder}' is not a readable save_to_disk folder ({error}); give --source a local file or folder"
        ) from None


def _arrow_files(folder: Path) -> list[Path]:
    entries = read_json(folder / "state.json").get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{folder / 'state.json'} lists no _data_files")
    return [folder / name for name in _inner_names([entry.get("filename") for entry in entries])]


def _inner_names(names: Any) -> list[str]:
    """Names of things that lie directly in a folder."""
    if not isinstance(names, list):
        raise ValueError(f"expected a list of names, got {names!r:.100}")
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise ValueError(f"{name!r:.100} is not the name of a file in the folder")
    return names


class _Tables:
    """The rows of Arrow files; each iteration reads them afresh."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[Line]:
        for path in self._paths:
            yield from _read_arrow(path)


def _read_arrow(path: Path) -> Iterator[Line]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            yield from _rows((batch.slice(i, BATCH_ROWS) for batch in _checked(stream) for i in _starts(batch)), path)
    except Exception as error:  # as for parquet
        raise ValueError(f"{path} is not a readable Arrow file ({_reason(error)}); fetch it again") from None


def _checked(stream: Iterable[Any]) -> Iterator[Any]:
    for batch in stream:
        batch.validate(full=True)  # without, an offset outside of the file ends the process
        yield batch


def _starts(batch: Any) -> range:
    return range(0, batch.num_rows, BATCH_ROWS)


def _rows(batches: Iterable[Any], path: Path) -> Iterator[Line]:
    for batch in batches:
        if batch.nbytes > MAX_BATCH:
            raise ValueError(f"{batch.num_rows} of its rows take {batch.nbytes:,} bytes")
        yield from batch.to_pylist()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


TABLES: dict[str, Callable[[Path, Sequence[str]], Iterator[Line]]] = {".csv": _read_csv, ".tsv": _read_tsv}
READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
