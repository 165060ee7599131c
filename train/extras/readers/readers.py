"""Readers of single files, piece by piece except for JSON arrays and text files that are one document.

A reader yields ``(position, record)`` in the order of the file: the position is a line (a row in Parquet, an index in a
JSON array), the record a mapping of columns, another JSON value or a :class:`RecordError`. Bytes that are not of the
encoding become half characters, by which their record, and no other, is found to be bad.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from train.extras.cache import ROWS_IN_MEMORY
from train.extras.readers.rows import Columns, RecordError, row
from train.figures import without_secrets
from train.records import UserError

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MARKUP = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".html", ".htm", ".xml")
_CODE = (".py", ".pyi", ".c", ".h", ".cpp", ".go", ".java", ".js", ".ts", ".r", ".rb", ".rs", ".sh", ".sql")
TEXT_SUFFIXES = _MARKUP + _CODE

Found = Iterator[tuple[int | str | None, Any]]


def file_rows(files: Sequence[str], columns: Columns, how: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    """The rows of files; ``how``: sample_by, encoding and quoting. The text of text files is their column "text"."""
    for file in files:
        own = columns if Path(file).suffix.lower() in RECORD_SUFFIXES else ("text", columns[1])
        shown = without_secrets(file).replace("\n", "\\n")
        for position, record in read_file(Path(file), own, *how):
            yield row(record, shown, position, own)


def read_file(
    path: Path, columns: Columns, sample_by: str = "document", encoding: str = "utf-8", quoting: str = "standard"
) -> Found:
    """The records of a file by its suffix, with these columns at least; UserError for one that cannot be used."""
    suffix, wanted = path.suffix.lower(), [column for column in columns if column is not None]
    if suffix == ".parquet":
        return _read_parquet(path, wanted)
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, wanted, encoding, csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL)
    return _read_json(path, encoding) if suffix in RECORD_SUFFIXES else _read_text(path, encoding, sample_by)


def _read_text(path: Path, encoding: str, sample_by: str) -> Found:
    """The whole text, or each of its lines that is not blank."""
    with _open(path, encoding) as file:
        if sample_by == "document":
            yield None, {"text": file.read().replace("\r\n", "\n")}
        else:
            yield from ((n, {"text": line.rstrip("\r\n")}) for n, line in enumerate(file, start=1) if line.strip())


def _open(path: Path, encoding: str) -> TextIO:
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding  # a byte order mark is dropped
    return path.open(encoding=encoding, errors="surrogateescape", newline="")


def _read_json(path: Path, encoding: str) -> Found:
    """One object a line, or an array of objects; blank lines are passed over."""
    with _open(path, encoding) as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if not first.lstrip().startswith("["):
            yield from ((number, _parsed(line)) for number, line in enumerate(file, start=1) if line.strip())
        elif isinstance(array := _parsed(file.read()), list):
            yield from ((f"[{index}]", item) for index, item in enumerate(array))
        else:
            yield None, array


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return RecordError(f"not JSON ({error})".replace(": line 1 column", " at column"))


def _read_csv(path: Path, columns: Sequence[str], encoding: str, quoting: Literal[0, 3]) -> Found:
    """Rows under a header line; a quoted field may run over several lines."""
    csv.field_size_limit(2**31 - 1)  # of the whole process; the default is 131,072 characters
    with _open(path, encoding) as file:
        first = next((line for line in file if line.strip()), "").rstrip()
        file.seek(0)
        usual = "\t" if path.suffix.lower() == ".tsv" else ","
        fitting = (
            mark for mark in (usual, *",;\t|") if set(columns) <= {name.strip('"') for name in first.split(mark)}
        )
        reader = csv.reader(file, strict=True, quoting=quoting, delimiter=next(fitting, usual))
        header: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                quotes = "Give --quoting none if quotes are only characters"
                yield line, RecordError(f"not CSV up to line {reader.line_num} ({error}). {quotes}")
                continue
            if not header:
                header = fields
                if twice := next((name for name in columns if header.count(name) > 1), None):
                    raise UserError(f"{path}: the column {twice!r} appears twice. Rename one.")
            elif len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            elif fields:
                yield line, RecordError(f"wrong number of fields: {len(fields)}, the header has {len(header)}")


def _read_parquet(path: Path, columns: Sequence[str]) -> Found:
    """Rows, counted from 1, a few at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            is_known = set(columns) <= set(file.schema_arrow.names)  # otherwise the message tells the names of all
            for batch in file.iter_batches(ROWS_IN_MEMORY, columns=list(columns) if is_known else None):
                yield from enumerate(batch.to_pylist(), start=number + 1)
                number += batch.num_rows
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:  # as damaged files raise them
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read as Parquet after row {number}: {reason}.") from None
