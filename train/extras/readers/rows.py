"""Every record becomes a row, good or bad, whatever it was read from; bad rows are then refused or skipped.

A bad record is a row with a ``problem``. So a cached corpus still knows which records were bad and where they are, and
``on_bad_record`` can change without reading the files again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.fingerprint import Hasher

from train.extras.cache import file_digest, generated
from train.extras.readers import Source
from train.figures import several
from train.records import UserError

EMPTY = "empty document"
NAME_COLUMNS = "Name the right ones with --text_column and --label_column; those of a CSV file stand in its first line"
FORMAT = 7  # part of every cache key: raise it when a reader or a check gives other rows
FEATURES = Features({name: Value("string") for name in ("text", "label", "source", "problem")})
_UNREADABLE = re.compile("[\0\ud800-\udfff]")  # NUL, half a surrogate pair, or a byte that could not be decoded

Columns = tuple[str, str | None]
"""Names of the columns of the text and, where documents are labelled, of the label."""


class RecordError(Exception):
    """Why a record cannot be used; a reader yields it in place of the record."""


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
            names = ", ".join(f"{name!s:.40}" for name in record)
            raise RecordError(f"no column {column!r}; the columns are {names or 'none'}. {NAME_COLUMNS}")
    text = record[text_column]
    if not isinstance(text, str):
        raise RecordError(f"{text_column!r} must be text, not {text!r:.40}")
    if found := _UNREADABLE.search(text):
        encoding = "If the file is not UTF-8, name its encoding, such as --encoding cp1252"
        raise RecordError(f"character {found.start() + 1} of {text_column!r} is unreadable. {encoding}")
    if len(text) >= 2**29 and len(text.encode()) >= 2**31:  # which one value in Arrow cannot hold
        raise RecordError(f"{text_column!r} is 2 GiB or more. Divide it, or try --sample_by line")
    label = None if label_column is None else _label(record[label_column], label_column)
    if not text.strip():
        raise RecordError(EMPTY)
    return text, label


def _label(value: Any, column: str) -> str:
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    if isinstance(value, int):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or _UNREADABLE.search(value):
        raise RecordError(f"{column!r} must be text or a whole number, not {value!r:.40}")
    return value


def documents(generator: Callable[..., Iterator[Any]], data: Source, what: str, **key: Any) -> Dataset:
    """The good rows of ``generator`` as documents (``text``, ``label`` if labelled, ``source``); the bad are noted.

    ``key`` are its arguments but for ``columns``; ``what`` is how a message calls the rows, such as "train.jsonl".
    Raises UserError for a bad record that may not be skipped, or if nothing is left.
    """
    rows = cached(generator, FEATURES, columns=(data.text_column, data.label_column if data.labelled else None), **key)
    is_bad = ~rows.data.column("problem").is_null().to_numpy()
    bad = rows.select_columns(["source", "problem"]).select(np.flatnonzero(is_bad))
    settle([(row["source"], row["problem"]) for row in bad.to_list()], len(rows), data, what)
    found = rows.select_columns(["text", "label", "source"] if data.labelled else ["text", "source"])
    return found.select(np.flatnonzero(~is_bad)) if len(bad) else found


def settle(problems: Sequence[tuple[str, str]], count: int, data: Source, what: str) -> None:
    """Notes which of ``count`` rows are left out, by their sources and problems.

    Raises UserError if they may not be left out, or if nothing else is left.
    """
    notes = []
    for flag, noun in (("on_bad_record", "bad record"), ("on_empty_document", EMPTY)):
        found = [f"{source}: {problem}" for source, problem in problems if (problem == EMPTY) == (noun == EMPTY)]
        if found and getattr(data, flag) == "error":
            raise UserError(f"{found[0]}. Correct it, or leave such records out with --{flag} skip.")
        if found:
            notes.append(f"skipped {several(len(found), noun)} of {what}, the first {found[0]}")
    if len(problems) == count:
        raise UserError(" ".join([f"{what}: no document to learn from.", *(f"{note}." for note in notes)]))
    data.notes.extend(notes)


def cached(generator: Callable[..., Iterator[Any]], features: Features, **key: Any) -> Dataset:
    """The rows of ``generator(**key)``, from the cache where its arguments and the content of ``files`` are known.

    Raises the UserError that the generator raised, or one for a file that cannot be read or written.
    """
    try:
        contents = [file_digest(Path(path)) for path in key.get("files", ())]
        fingerprint = Hasher.hash([generator.__qualname__, key, contents, FORMAT])
        return generated(generator, features, fingerprint, **key)
    except OSError as error:
        raise UserError(f"{error.filename or 'reading the data'}: {error.strerror or error}.") from None
