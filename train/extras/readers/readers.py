"""Readers of single files. Each knows the line it is at, so that a message can name it.

A reader yields ``(position, record)`` in the order of the file: the position is a line (or a row, where a format has
no lines), the record a mapping of columns, or a :class:`Problem`. None reads more than a piece of a large file at a
time, but for ``.json`` and for text files that are one document.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from train.extras.readers.rows import Problem, row
from train.records import UserError

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MARKUP = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".html", ".htm", ".xml")
_CODE = (".py", ".pyi", ".c", ".h", ".cpp", ".go", ".java", ".js", ".ts", ".r", ".rb", ".rs", ".sh", ".sql")
TEXT_SUFFIXES = _MARKUP + _CODE

LONGEST_TEXT_BYTES = 2**31 - 1
PARQUET_ROWS_AT_ONCE = 64

FileKey = tuple[str, str, int, int]
"""Name to show, absolute path, bytes and time of the last change (ns): changes whenever the file does."""

Found = Iterator[tuple[int | str | None, Mapping[str, Any] | Problem]]


def file_key(path: Path, shown: str | None = None) -> FileKey:
    """The identity of a file's present content.

    Raises:
        UserError: the file cannot be looked at.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    return shown or str(path), str(path.resolve()), stat.st_size, stat.st_mtime_ns


def record_rows(
    files: Sequence[FileKey], text_column: str, label_column: str | None, version: int
) -> Iterator[dict[str, Any]]:
    """The rows of files of records; ``version`` only tells cache entries apart."""
    columns = [column for column in (text_column, label_column) if column is not None]
    for shown, path, *_ in files:
        for position, record in read_records(Path(path), columns):
            yield row(record, shown, position, text_column, label_column)


def document_rows(files: Sequence[FileKey], sample_by: str, version: int) -> Iterator[dict[str, Any]]:
    """The rows of text files; ``version`` only tells cache entries apart."""
    for shown, path, *_ in files:
        for position, record in read_documents(Path(path), sample_by):
            yield row(record, shown, position, "text", None)


def read_records(path: Path, columns: Sequence[str]) -> Found:
    """The records of a file by its suffix; ``columns`` are the ones that matter."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, columns)
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, "\t" if suffix == ".tsv" else ",")
    return _read_json(path) if suffix == ".json" else _read_jsonl(path)


def read_documents(path: Path, sample_by: str) -> Found:
    """The documents of a text file: the file, its paragraphs (blank lines part them) or its lines."""
    with path.open("rb") as file:
        for line, raw in _blocks(file, sample_by):
            if len(raw) > LONGEST_TEXT_BYTES:
                yield None, Problem("larger than 2 GiB", "cut it with --sample_by paragraph or line")
                continue
            text = _decode(raw, line)
            record = text if isinstance(text, Problem) else {"text": text.replace("\r\n", "\n")}
            yield (None if sample_by == "document" else line), record


def _blocks(file: BinaryIO, sample_by: str) -> Iterator[tuple[int, bytes]]:
    """The first line and the bytes of each document; blank lines are none."""
    if sample_by == "document":
        yield 1, file.read()
        return
    first, lines = 1, []
    for number, line in enumerate(file, start=1):
        is_blank = not line.strip(b" \t\r\n\f\v")
        if lines and (is_blank or sample_by == "line"):
            yield first, b"".join(lines).rstrip(b"\r\n")
            lines = []
        if not is_blank:
            first = first if lines else number
            lines.append(line)
    if lines:
        yield first, b"".join(lines).rstrip(b"\r\n")


def _decode(raw: bytes, first_line: int) -> str | Problem:
    """UTF-8, a byte order mark at the start of the file tolerated."""
    if first_line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        return Problem("not UTF-8", f"byte 0x{raw[error.start]:02x} is the {column}. of line {line}")


def _read_jsonl(path: Path) -> Found:
    """One object a line; blank lines are none."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = _decode(raw, number)
            if isinstance(text, Problem):
                yield number, text
            elif text.strip():
                yield number, _object(text)


def _object(text: str) -> Mapping[str, Any] | Problem:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Problem("not JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Problem("not JSON", str(error))
    return _as_record(value)


def _as_record(value: Any) -> Mapping[str, Any] | Problem:
    return value if isinstance(value, dict) else Problem("not a JSON object", f"but {type(value).__name__}")


def _read_json(path: Path) -> Found:
    """A list of objects, an object that holds one list of objects, or one object a line after all."""
    text = _decode(path.read_bytes(), 1)
    if isinstance(text, Problem):
        yield None, text
        return
    start = _skip_space(text, 0)
    if text.startswith("[", start):
        yield from _read_json_list(text, start)
        return
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        if start < len(text):
            yield None, Problem("not JSON", str(error))
        return
    if _skip_space(text, end) < len(text):
        yield from _read_jsonl(path)
        return
    yield from _read_json_object(value)


def _read_json_list(text: str, start: int) -> Found:
    """The items of the list that opens at ``start``, one by one, each with its line."""
    decoder = json.JSONDecoder()
    position, line, counted = start, 1, 0
    closing = ","
    while closing == ",":
        position = _skip_space(text, position + 1)
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position) and text[:position].rstrip().endswith("["):
            return
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield line, Problem("not JSON; the rest of the file is lost", str(error))
            return
        yield line, _as_record(value)
        position = _skip_space(text, position)
        closing = text[position : position + 1]
    if closing != "]" or _skip_space(text, position + 1) < len(text):
        line += text.count("\n", counted, position)
        yield line, Problem("not JSON; the rest of the file is lost", "after a list item: expected , or ] and the end")


def _read_json_object(value: Any) -> Found:
    lists = {
        name: items
        for name, items in (value.items() if isinstance(value, dict) else ())
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items)
    }
    if len(lists) > 1:
        yield None, Problem("an object with several lists of records", ", ".join(lists))
    elif lists:
        ((name, items),) = lists.items()
        for number, item in enumerate(items):
            yield f"{name}[{number}]", item
    else:
        yield 1, _as_record(value)


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # pyright: ignore[reportOptionalMemberAccess]


_SPACE = re.compile(r"[ \t\r\n]*")


def _read_csv(path: Path, delimiter: str) -> Found:
    """Rows under a header line; a field may run over several lines when quoted.

    A quote that is not closed would take all lines up to the next one with it, or to the end of the file: only the
    line that opens it is lost, and reading goes on behind that.

    Raises:
        UserError: a header that cannot be read or names a column twice.
    """
    # A bad byte must not end the reading in the middle of a quoted field, so it is carried as a surrogate and
    # looked for in the fields.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file, _fields_of_any_size():
        lines = _Lines(file)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = lines.begin_record()
            try:
                fields = next(reader, None)
            except csv.Error as error:
                if header is None:
                    raise UserError(f"{path}:{line}: no header line: {error}. Name the columns there.") from None
                is_open = lines.last > line
                where = f"a quote that is opened here is not closed: line {lines.last}: " if is_open else ""
                yield line, Problem("not CSV", f"{where}{error}")
                lines.go_back()
                continue
            if fields is None:
                return
            if header is None and fields:
                header = _check_names(path, fields)
            elif fields and header is not None:
                record = _csv_record(header, fields)
                is_long = isinstance(record, Problem) and lines.last > line
                yield (f"{line}-{lines.last}" if is_long else line), record


class _Lines:
    """The lines of a file, those of the record under way once more where asked."""

    def __init__(self, file: Iterator[str]) -> None:
        self.last = 0
        """Number of the line that was given last."""
        self._file = file
        self._record: list[str] = []
        self._again: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._file)
        self._record.append(line)
        self.last += 1
        return line

    def begin_record(self) -> int:
        """The number of the next line, with which a record begins."""
        self._record.clear()
        return self.last + 1

    def go_back(self) -> None:
        """To the second line of the record."""
        self._again.extendleft(reversed(self._record[1:]))
        self.last -= len(self._record) - 1


@contextlib.contextmanager
def _fields_of_any_size() -> Iterator[None]:
    before = csv.field_size_limit(LONGEST_TEXT_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_record(header: Sequence[str], fields: Sequence[str]) -> Mapping[str, str] | Problem:
    if len(fields) != len(header):
        return Problem("wrong number of fields", f"{len(fields)}, the header has {len(header)}")
    for field in fields:
        if not field.isascii() and (bad := _BAD_BYTE.search(field)):
            return Problem("not UTF-8", f"byte 0x{ord(bad[0]) - 0xDC00:02x}")
    return dict(zip(header, fields, strict=True))


_BAD_BYTE = re.compile("[\udc80-\udcff]")


def _check_names(path: Path, names: Sequence[str]) -> list[str]:
    for name in names:
        if bad := _BAD_BYTE.search(name):
            raise UserError(
                f"{path}: the header line is not UTF-8 (byte 0x{ord(bad[0]) - 0xDC00:02x}). Store the file as UTF-8."
            )
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UserError(f"{path}: the column {', '.join(map(repr, twice))} stands twice. Rename one.")
    return list(names)


def _read_parquet(path: Path, columns: Sequence[str]) -> Found:
    """Rows, counted from 1, a few at a time.

    Raises:
        UserError: a column name that stands twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = _check_names(path, file.schema_arrow.names)
            if missing := [column for column in columns if column not in names]:
                unread = dict.fromkeys(name for name in names if name not in missing)
                yield from ((row_number, unread) for row_number in range(1, file.metadata.num_rows + 1))
                return
            for batch in file.iter_batches(PARQUET_ROWS_AT_ONCE, columns=list(columns)):
                for index in range(batch.num_rows):
                    number += 1
                    yield number, _parquet_record(batch, index, columns)
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:  # as damaged files bring them up
        if isinstance(error, OSError) and error.errno:
            raise
        reason = (
            "not a readable Parquet file" if number == 0 else "unreadable from here on; the rest of the file is lost"
        )
        yield (None if number == 0 else number + 1), Problem(reason, " ".join(str(error).split())[:200])


def _parquet_record(batch: Any, index: int, columns: Sequence[str]) -> Mapping[str, Any] | Problem:
    try:
        return {column: batch.column(column)[index].as_py() for column in columns}
    except UnicodeDecodeError as error:
        return Problem("not UTF-8", f"byte 0x{error.object[error.start]:02x}")
