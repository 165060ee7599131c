"""Files of records and of text: each record becomes a row, good or bad; bad rows are then refused or skipped.

A bad record is a row with a ``problem``, so ``on_bad_record`` can change without reading the files again. Readers yield
``(position, record)``: a line (a row in Parquet, an index in a JSON array), and columns by name, another JSON value or
a :class:`RecordError`. Files are read piece by piece, except JSON arrays, objects over several lines, and text files
that are one document. Bytes that are not of the encoding become half characters, by which their record is found bad.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features, Value

from train.checkpoint import digest
from train.extras.cache import ROWS_AT_ONCE, generated
from train.extras.readers import Source
from train.figures import several, without_secrets
from train.records import UserError, one_line

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_MARKUP = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log", ".html", ".htm", ".xml")
_CODE = (".py", ".pyi", ".c", ".h", ".cpp", ".go", ".java", ".js", ".ts", ".r", ".rb", ".rs", ".sh", ".sql")
TEXT_SUFFIXES = _MARKUP + _CODE

EMPTY = "empty document"
NAME_COLUMNS = "Give --text_column, --label_column (a CSV file's first line); for text files, chats see docs/data.md"
FORMAT = 11  # part of every cache key: raise it when a reader or a check gives other rows
FEATURES = Features({name: Value("string") for name in ("text", "label", "source", "problem")})
_UNREADABLE = re.compile("[\0\ud800-\udfff]")  # NUL, half a surrogate pair, or a byte that could not be decoded

Found = Iterator[tuple[int | str | None, Any]]
Columns = tuple[str, str | None]  # names of those of the text and, where documents are labelled, of the label


class RecordError(Exception):
    """Why a record cannot be used; a reader yields it in place of the record."""


class UnusableError(UserError):
    """No row of a split can be used."""


def documents(files: Sequence[str], data: Source, what: str) -> Dataset:
    """The good records of ``files``: columns ``text``, ``label`` if labelled, ``source``; the bad are noted.

    A message calls the files ``what``. Raises UserError if a bad record may not be skipped, or if nothing is left.
    """
    columns = data.text_column, data.label_column if data.labelled else None
    how = data.sample_by, data.encoding, data.quoting
    rows = cached(file_rows, FEATURES, files=tuple(files), columns=columns, how=how)
    is_bad = ~rows.data.column("problem").is_null().to_numpy()
    bad = rows.select_columns(["source", "problem"]).select(np.flatnonzero(is_bad))
    settle([(row["source"], row["problem"]) for row in bad.to_list()], len(rows), data, what)
    found = rows.select_columns(["text", "label", "source"] if data.labelled else ["text", "source"])
    return found.select(np.flatnonzero(~is_bad)) if len(bad) else found


def settle(problems: Sequence[tuple[str, str]], count: int, data: Source, what: str) -> None:
    """Notes which of ``count`` rows are left out, and why; UserError if they may not be, or if nothing else is left."""
    notes = []
    for flag, noun in (("on_bad_record", "bad record"), ("on_empty_document", EMPTY)):
        found = [f"{source}: {problem}" for source, problem in problems if (problem == EMPTY) == (noun == EMPTY)]
        if found and getattr(data, flag) == "error":
            remedy = f"Correct it, or leave such records out with --{flag} skip"
            if len(problems) == count > 1 and len({problem for _, problem in problems}) == 1:  # nothing would be left
                remedy = f"The same holds for all {count:,} records"
            raise (UserError if len(problems) < count else UnusableError)(
                " ".join([f"{found[0]}. {remedy}.", *(f"{note}." for note in data.notes)])
            )
        if found:
            notes.append(f"skipped {several(len(found), noun)} of {what}, the first {found[0]}")
    if len(problems) == count:
        raise UnusableError(" ".join([f"{what}: no document to learn from.", *(f"{note}." for note in notes)]))
    data.notes.extend(notes)


def cached(generator: Callable[..., Iterator[Any]], features: Features, **key: Any) -> Dataset:
    """The rows of ``generator(**key)``, from the cache where its arguments and the content of ``files`` are known.

    Raises the UserError that the generator raised, or one for a file that cannot be read or written.
    """
    try:
        contents = [digest(Path(path)) for path in key.get("files", ())]
        return generated(generator, features, (key, contents, FORMAT), **key)
    except OSError as error:
        raise UserError(f"{error.filename or 'reading the data'}: {error.strerror or error}.") from None


def file_rows(files: Sequence[str], columns: Columns, how: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    """The rows of files; ``how``: sample_by, encoding and quoting. The text of text files is their column "text"."""
    for file in files:
        own = columns if Path(file).suffix.lower() in RECORD_SUFFIXES else ("text", columns[1])
        shown = without_secrets(file).replace("\n", "\\n").encode("utf-8", "backslashreplace").decode()
        for position, record in read_file(Path(file), own, *how):
            yield row(record, shown, position, own)


def row(record: Any, file: str, position: int | str | None, columns: Columns) -> dict[str, Any]:
    """One row from a record, or a :class:`RecordError`, that a reader found at ``position`` (a line) of ``file``."""
    found = dict.fromkeys(FEATURES) | {"source": file if position is None else f"{file}:{position}"}
    try:
        text, label = _values(record, *columns)
    except RecordError as error:  # which may quote names that can be neither stored nor printed
        return found | {"problem": " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()}
    return found | {"text": text, "label": label}


def _values(record: Any, text_column: str, label_column: str | None) -> tuple[str, str | None]:
    if isinstance(record, RecordError):
        raise record
    if not isinstance(record, Mapping):
        raise RecordError(f"not a JSON object but {type(record).__name__}")
    for column in (text_column, label_column):
        if column is not None and column not in record:
            names = ", ".join(f"{name if name == name.strip() else repr(name)!s:.40}" for name in map(str, record))
            raise RecordError(f"no column {column!r}; the columns are {names or 'none'}. {NAME_COLUMNS}")
        if column is not None and isinstance(value := record[column], str) and (found := _UNREADABLE.search(value)):
            encoding = "If the files are not UTF-8, name the encoding of all of them, such as --encoding cp1252"
            where = f"character {found.start() + 1} of {column!r}"
            raise RecordError(f"{where} is unreadable: NUL, half a surrogate pair, or a byte. {encoding}")
    if not isinstance(text := record[text_column], str):
        raise RecordError(f"{text_column!r} must be text, not {text!r:.40}. A function can read it (docs/forking.md)")
    if len(text) >= 2**29 and len(text.encode()) >= 2**31:  # which one value in Arrow cannot hold
        raise RecordError(f"{text_column!r} is 2 GiB or more. Divide it, or try --sample_by line")
    label = None
    if label_column is not None:
        label = record[label_column]
        if isinstance(label, int | float) and label % 1 >= 0:  # which NaN and infinity fail
            label = str(label if label % 1 else int(label))
        if not isinstance(label, str) or not label.strip():
            raise RecordError(f"{label_column!r} must be a number or non-empty text, not {label!r:.40}")
    if not text.strip():
        raise RecordError(EMPTY)
    return text, label


def read_file(
    path: Path, columns: Columns, sample_by: str = "document", encoding: str = "utf-8", quoting: str = "standard"
) -> Found:
    """The records of a file by its suffix, with these columns at least; UserError for one that cannot be used."""
    suffix, wanted = path.suffix.lower(), [column for column in columns if column is not None]
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, wanted)
        elif suffix in (".csv", ".tsv"):
            yield from _read_csv(path, wanted, encoding, csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL)
        else:
            is_text = suffix not in RECORD_SUFFIXES
            yield from _read_text(path, encoding, sample_by) if is_text else _read_json(path, encoding)
    except UnicodeDecodeError as error:  # UTF-16 that was cut off
        yield "end", RecordError(f"unreadable from here on: {one_line(error)}")


def _read_text(path: Path, encoding: str, sample_by: str) -> Found:
    """The whole text, or each of its lines that is not blank."""
    with _open(path, encoding) as file:
        if sample_by == "document":
            yield None, {"text": file.read().replace("\r\n", "\n")}
        else:
            yield from ((n, {"text": line.rstrip("\r\n")}) for n, line in enumerate(file, start=1) if line.strip())


def _open(path: Path, encoding: str) -> TextIO:
    with path.open("rb") as file:
        is_utf16 = (start := file.read(3))[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # Windows' "Unicode"
    encoding = "utf-16" if is_utf16 else "utf-8-sig" if encoding == "utf-8" or start == codecs.BOM_UTF8 else encoding
    return path.open(encoding=encoding, errors="surrogatepass" if is_utf16 else "surrogateescape", newline="")


def _read_json(path: Path, encoding: str) -> Found:
    """One object a line, objects over several lines, or an array of objects; blank lines are passed over."""
    with _open(path, encoding) as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if not first.lstrip().startswith("["):
            found = enumerate(file, start=1)
            if first.startswith("{") and isinstance(_parsed(first), RecordError):  # it runs on, or is damaged
                pieces = re.split(r"^(?=\{)", file.read(), flags=re.MULTILINE)  # what belongs to an object is indented
                found = zip(accumulate((piece.count("\n") for piece in pieces), initial=1), pieces, strict=False)
            yield from ((number, _parsed(text)) for number, text in found if text.strip())
        elif isinstance(array := _parsed(file.read()), list):
            yield from ((f"[{index}]", item) for index, item in enumerate(array))
        else:
            yield None, array


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        several = ". An object begins at the start of a line; `jq -c . FILE` puts each on one" if "{" in text else ""
        return RecordError(re.sub("(?: at)?: line 1 column", " at column", f"not JSON ({error}){several}"))


def _read_csv(path: Path, columns: Sequence[str], encoding: str, quoting: Literal[0, 3]) -> Found:
    """Rows under a header line; a quoted field may run over several lines."""
    csv.field_size_limit(2**31 - 1)  # of the whole process; the default is 131,072 characters
    with _open(path, encoding) as file:
        first = next((line for line in file if line.strip()), "").rstrip()
        file.seek(0)
        usual_first = "\t,;|" if path.suffix.lower() == ".tsv" else ",;\t|"
        named = {mark: {*columns} & {name.strip('"') for name in first.split(mark)} for mark in usual_first}
        divider = max(named, key=lambda mark: (len(named[mark]), first.count(mark)))  # where none fits, for the error
        reader = csv.reader(file, strict=True, quoting=quoting, delimiter=divider)
        header: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                if (fields := next(reader, None)) is None:
                    return
            except csv.Error as error:
                quotes = "Give --quoting none if quotes are only characters"
                if "unexpected end" in str(error):  # all lines from here on would be lost as one record
                    raise UserError(f"{path}: a quote in line {line} is not closed up to the end. {quotes}.") from None
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
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = (schema := file.schema_arrow).names
            if twice := next((name for name in columns if names.count(name) > 1), None):
                raise UserError(f"{path}: the column {twice!r} appears twice. Rename one.")
            kinds = Features.from_arrow_schema(schema) if "ClassLabel" in str(schema.metadata) else {}
            classes = {n: dict(enumerate(kind.names)) for n in columns if isinstance(kind := kinds.get(n), ClassLabel)}
            is_known = set(columns) <= set(names)  # otherwise the message tells the names of all
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns) if is_known else None):
                rows = ({**row, **{n: of.get(row[n]) for n, of in classes.items()}} for row in batch.to_pylist())
                yield from enumerate(rows, start=number + 1)
                number += batch.num_rows
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:  # as damaged files raise them
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path}: cannot be read as Parquet after row {number}: {one_line(error, 200)}.") from None
