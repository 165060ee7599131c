"""Readers of single files. Each knows the line it is at, so that a message can name it.

A reader yields ``(position, record)`` in the order of the file: the position is a line (a row in Parquet, an index in a
JSON array), the record a mapping of columns, another JSON value or a :class:`Problem`. Files are read piece by piece,
except ``.json`` and text files that are one document.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from train.extras.cache import ROWS_IN_MEMORY
from train.extras.readers.rows import Columns, Problem, row
from train.figures import without_secrets
from train.records import UserError

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MARKUP = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".html", ".htm", ".xml")
_CODE = (".py", ".pyi", ".c", ".h", ".cpp", ".go", ".java", ".js", ".ts", ".r", ".rb", ".rs", ".sh", ".sql")
TEXT_SUFFIXES = _MARKUP + _CODE

_SPACE = re.compile(r"\s*")
_BAD_BYTE = re.compile("[\udc80-\udcff]")
LONGEST_TEXT_BYTES = 2**31 - 1
_TOO_LONG = Problem("larger than 2 GiB", "cut it with --sample_by paragraph or line")

File = tuple[str, str]
"""Name to show and absolute path."""

Found = Iterator[tuple[int | str | None, Any]]


def named(path: Path, shown: str | None = None) -> File:
    """A file by its own name, unless another is to be ``shown``: in one line."""
    return without_secrets(shown or str(path)).replace("\n", "\\n"), str(path.resolve())


def has_records(path: str | Path) -> bool:
    """Whether the file holds records with columns, by its suffix, rather than text."""
    return Path(path).suffix.lower() in RECORD_SUFFIXES


def file_rows(files: Sequence[File], columns: Columns, how: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    """The rows of files; ``how``: sample_by, encoding and quoting."""
    wanted = [column for column in columns if column is not None]
    for shown, path in files:
        if has_records(path):
            found, own = read_records(Path(path), wanted, *how[1:]), columns
        else:
            found, own = read_documents(Path(path), *how[:2]), ("text", None)
        yield from (row(record, shown, position, own) for position, record in found)


def read_records(path: Path, columns: Sequence[str], encoding: str = "utf-8", quoting: str = "standard") -> Found:
    """The records of a file by its suffix, with these columns at least; UserError for a header that cannot be used."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, columns)
    if suffix in (".csv", ".tsv"):
        with path.open(encoding=encoding.replace("utf-8", "utf-8-sig"), errors="surrogateescape") as file:
            header = next((line for line in file if line.strip()), "").rstrip()
        usual = "\t" if suffix == ".tsv" else ","
        named = (mark for mark in (usual, *",;\t|") if {name.strip('"') for name in header.split(mark)} >= set(columns))
        quotes = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
        return _read_csv(path, encoding, {"delimiter": next(named, usual), "quoting": quotes})
    return _read_json(path, encoding) if suffix == ".json" else _read_jsonl(path, encoding)


def read_documents(path: Path, sample_by: str, encoding: str = "utf-8") -> Found:
    """The documents of a text file: the whole file, its paragraphs (separated by blank lines) or its lines."""
    with path.open("rb") as file:
        file, encoding = _by_lines(file, encoding)
        for line, raw in _blocks(file, sample_by):
            found = _TOO_LONG if len(raw) > LONGEST_TEXT_BYTES else _decode(raw, line, encoding)
            record = found if isinstance(found, Problem) else {"text": found.replace("\r\n", "\n")}
            yield (None if sample_by == "document" else line), record


def _by_lines(file: BinaryIO, encoding: str) -> tuple[BinaryIO, str]:
    """``file`` and its encoding; in UTF-8 instead of UTF-16, whose lines do not end where the byte of a newline is."""
    if encoding != "utf-16" or isinstance(text := _decode(file.read(), 0, encoding), Problem):
        file.seek(0)
        return file, encoding
    return io.BytesIO(text.encode()), "utf-8"


def _blocks(file: BinaryIO, sample_by: str) -> Iterator[tuple[int, bytes]]:
    """The first line and the bytes of each document, without blank lines around it."""
    if sample_by == "document":
        yield 1, file.read()
        return
    for has_text, group in groupby(enumerate(file, start=1), key=lambda numbered: bool(numbered[1].strip())):
        if has_text and sample_by == "line":
            yield from ((number, line.rstrip(b"\r\n")) for number, line in group)
        elif has_text:
            numbers, lines = zip(*group, strict=True)
            yield numbers[0], b"".join(lines).rstrip(b"\r\n")


def _decode(raw: bytes, first_line: int, encoding: str) -> str | Problem:
    """Decodes text; a byte order mark at the start of the file is dropped."""
    if first_line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        reason = f"not {encoding.upper()}"
        return Problem(reason, f"byte 0x{raw[error.start]:02x} in line {line}, column {column}")


def _read_jsonl(path: Path, encoding: str) -> Found:
    """One object a line; blank lines are passed over. What begins like an array or an indented object is read whole."""
    with path.open("rb") as opened:
        file, line_encoding = _by_lines(opened, encoding)
        first = next(filter(None, (line.removeprefix(b"\xef\xbb\xbf").strip() for line in file)), b"")
        if first == b"{" or first.startswith(b"["):
            yield from _read_json(path, encoding)
            return
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            text = _decode(raw, number, line_encoding)
            if isinstance(text, Problem):
                yield number, text
            elif text.strip():
                try:
                    yield number, json.loads(text)
                except (ValueError, RecursionError) as error:
                    where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                    yield number, Problem("not JSON", f"{getattr(error, 'msg', error)}{where}")


def _read_json(path: Path, encoding: str) -> Found:
    """A list of objects, an object that holds one list of objects, or in fact one object after another."""
    text = _decode(path.read_bytes(), 1, encoding)
    if isinstance(text, Problem):
        yield None, text
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", None) == "Extra data" and not text.lstrip().startswith("["):
            is_indented = text.lstrip().partition("\n")[0].strip() == "{"
            yield from _objects(text) if is_indented else _read_jsonl(path, encoding)
        elif text.strip():
            yield getattr(error, "lineno", None), Problem("not JSON; the whole file is lost", str(error))
        return
    lists: dict[str, list[Any]] = {"": value} if isinstance(value, list) else {}
    if isinstance(value, dict):
        lists = {name: items for name, items in value.items() if items and isinstance(items, list)}
        lists = {name: items for name, items in lists.items() if all(isinstance(item, dict) for item in items)}
    if len(lists) > 1:
        yield None, Problem("an object with several lists of records", ", ".join(lists))
    elif lists:
        ((name, items),) = lists.items()
        yield from ((f"{name}[{number}]", item) for number, item in enumerate(items))
    else:
        yield 1, value


def _objects(text: str) -> Found:
    """Objects of several lines each, one after another, with the line at which each begins."""
    at, line = 0, 1
    while (start := at + len(_SPACE.match(text, at)[0])) < len(text):  # pyright: ignore - it always matches
        line += text.count("\n", at, start)
        try:
            value, at = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            yield line, Problem("not JSON; the rest of the file is lost", str(error))
            return
        yield line, value
        line += text.count("\n", start, at)


def _read_csv(path: Path, encoding: str, dialect: Mapping[str, Any]) -> Found:
    """Rows under a header line; a quoted field may run over several lines.

    A quote that is not closed would swallow all lines up to the next quote or to the end of the file. Only the line
    that opens it is lost: reading resumes at the line after it. A header that cannot be read or names a column twice
    raises UserError.
    """
    csv.field_size_limit(LONGEST_TEXT_BYTES)  # of the whole process; the default is 131,072 characters
    header: list[str] | None = None
    again: deque[str] = deque()  # lines to read once more
    taken: list[str] = []  # lines of the record under way
    # An exception for a bad byte would end the reading inside a quoted field, so bad bytes become surrogates, which
    # are looked for in the fields.
    with path.open(encoding=encoding.replace("utf-8", "utf-8-sig"), errors="surrogateescape", newline="") as file:

        def next_line() -> str:
            if line := again.popleft() if again else file.readline():
                taken.append(line)
            return line

        first, reader = 1, csv.reader(iter(next_line, ""), strict=True, **dialect)
        while True:
            taken.clear()
            try:
                fields = next(reader, None)
            except csv.Error as error:
                if header is None:
                    raise UserError(f"{path}:{first}: no header line: {error}. Name the columns there.") from None
                last = first + len(taken) - 1
                where = f"a quote that is opened here is not closed: line {last}: " if last > first else ""
                yield first, Problem("not CSV", f"{where}{error}")
                again.extendleft(reversed(taken[1:]))
                first, reader = first + 1, csv.reader(iter(next_line, ""), strict=True, **dialect)
                continue
            if fields is None:
                return
            if header is None and fields:
                header = _check_names(path, fields)
            elif fields and header is not None:
                record = _csv_record(header, fields, encoding)
                is_long = isinstance(record, Problem) and len(taken) > 1
                yield (f"{first}-{first + len(taken) - 1}" if is_long else first), record
            first += len(taken)


def _csv_record(header: Sequence[str], fields: Sequence[str], encoding: str) -> Mapping[str, str] | Problem:
    if len(fields) != len(header):
        return Problem("wrong number of fields", f"{len(fields)}, the header has {len(header)}")
    if bad := next(filter(None, map(_BAD_BYTE.search, fields)), None):
        return Problem(f"not {encoding.upper()}", f"byte 0x{ord(bad[0]) - 0xDC00:02x}")
    return dict(zip(header, fields, strict=True))


def _check_names(path: Path, names: Sequence[str]) -> list[str]:
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise UserError(f"{path}: the column {', '.join(map(repr, twice))} appears twice. Rename one.")
    return list(names)


def _read_parquet(path: Path, columns: Sequence[str]) -> Found:
    """Rows, counted from 1, a few at a time; raises UserError where two columns have one name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = _check_names(path, file.schema_arrow.names)
            wanted = list(columns) if set(columns) <= set(names) else None  # all: the message tells their names
            for batch in file.iter_batches(ROWS_IN_MEMORY, columns=wanted):
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        yield number, batch.slice(index, 1).to_pylist()[0]
                    except UnicodeDecodeError as error:
                        yield number, Problem("not UTF-8", f"byte 0x{error.object[error.start]:02x}")
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:  # as damaged files raise them
        if isinstance(error, OSError) and error.errno:
            raise
        reason = "unreadable from here on; the rest of the file is lost" if number else "not a readable Parquet file"
        yield (number + 1 if number else None), Problem(reason, " ".join(str(error).split())[:200])
