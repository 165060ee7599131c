"""Rows: every record becomes one, good or bad, whatever it was read from; bad ones are then refused or counted.

A bad record is a row with a ``problem``. So a cached corpus still knows which records were bad and where they are, and
``on_bad_record`` can change without reading the files again.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from datasets.fingerprint import Hasher

from train.extras.cache import file_digest, generated
from train.extras.readers import Source
from train.figures import several
from train.records import UserError

EMPTY = "empty document"
NAME_COLUMNS = "Name the right ones with --text_column and --label_column; those of a CSV file stand in its first line."
ADVICE = {"without": NAME_COLUMNS, "not UTF-8": "Name its encoding, such as --encoding cp1252."}
ADVICE |= {"not CSV": "Give --quoting none where quotes are only characters."}
FORMAT = 6  # part of every cache key: raise it when a reader or a check gives other rows
_TEXTS = ("text", "label", "source", "file", "problem", "detail")
# Of a row: ``label_number`` is null where the label is text, ``file`` to ``detail`` in a good row.
FEATURES = Features({name: Value("string") for name in _TEXTS} | {"label_number": Value("int64")})
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
logger = logging.getLogger(__name__)

Columns = tuple[str, str | None]
"""Names of the columns of the text and, where documents are labelled, of the label."""


class Problem(NamedTuple):
    """Why a record cannot be used: ``reason`` groups records of one kind, ``detail`` belongs to this one."""

    reason: str
    detail: str = ""


def row(record: Any, file: str, position: int | str | None, columns: Columns) -> dict[str, Any]:
    """One row from a record, or a :class:`Problem`, that a reader found at ``position`` (a line) of ``file``."""
    source = file if position is None else f"{file}:{position}"
    found = record if isinstance(record, Problem) else _check(record, *columns)
    if isinstance(found, Problem):
        empty = dict.fromkeys(("text", "label", "label_number"))
        return empty | {"source": source, "file": file, "problem": found.reason, "detail": found.detail}
    return found | {"source": source, "file": None, "problem": None, "detail": None}


def _check(record: Any, text_column: str, label_column: str | None) -> dict[str, Any] | Problem:
    if not isinstance(record, Mapping):
        return Problem("not a JSON object", f"but {type(record).__name__}")
    for column in (text_column, label_column):
        if column is not None and column not in record:
            # Names may hold half characters, which could neither be stored nor printed.
            names = ", ".join(f"{name!s:.40}" for name in record).encode("utf-8", "backslashreplace").decode() or "none"
            return Problem(f"without {column!r}", f"the columns are {names}")
    text = record[text_column]
    if text is None:
        return Problem(f"{text_column!r} is null")
    if not isinstance(text, str):
        return Problem(f"{text_column!r} is not text", f"but {type(text).__name__}")
    if "\0" in text:
        return Problem("a NUL character", f"at position {text.index(chr(0))} of {text_column!r}")
    if _HALF.search(text):
        return Problem("half a surrogate pair, which is not a character", f"in {text_column!r}")
    label = _label(record[label_column], label_column) if label_column is not None else None
    if isinstance(label, Problem):
        return label
    if not text.strip():
        return Problem(EMPTY)
    return {
        "text": text,
        "label": None if label is None else str(label),
        "label_number": label if isinstance(label, int) else None,
    }


def _label(value: Any, column: str) -> str | int | Problem:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool | int):
        return int(value) if abs(value) < 2**63 else Problem(f"{column!r} does not fit 64 bits")
    if value is None or (isinstance(value, str) and not value.strip()):
        return Problem(f"{column!r} is empty")
    if not isinstance(value, str):
        return Problem(f"{column!r} is neither text nor a whole number", f"but {type(value).__name__}")
    return Problem(f"{column!r} is not readable text") if "\0" in value or _HALF.search(value) else value


def documents(
    generator: Callable[..., Iterator[Any]], data: Source, what: str, streams: bool = False, **key: Any
) -> Any:
    """The good rows of ``generator`` as documents (``text``, ``label`` if labelled, ``source``); the bad are noted.

    ``key`` are its arguments but for ``columns``; ``what`` is how a message calls the rows, such as "train.jsonl".
    Raises UserError for a bad record that may not be skipped, a column that no record has, or nothing left. In a stream
    (an IterableDataset), a bad row raises when it is reached, or is logged and left out.
    """
    key["columns"] = (data.text_column, data.label_column if data.labelled else None)
    if streams:
        return _stream(partial(generator, **key), data, what)
    return _settle(cached(generator, FEATURES, **key), data, what)


def cached(generator: Callable[..., Iterator[Any]], features: Features, **key: Any) -> Dataset:
    """The rows of ``generator(**key)``, from the cache where its arguments and the content of ``files`` are known.

    Raises the UserError that the generator raised, or one for a file that cannot be read or written.
    """
    try:
        contents = [file_digest(Path(path)) for _, path in key.get("files", ())]
        fingerprint = Hasher.hash([generator.__qualname__, key, contents, FORMAT])
        return generated(generator, features, fingerprint, **key)
    except OSError as error:
        raise UserError(f"{error.filename or 'reading the data'}: {error.strerror or error}.") from None


def _settle(rows: Dataset, data: Source, what: str) -> Dataset:
    bad = ~rows.data.column("problem").is_null().to_numpy()
    problems = rows.select_columns(["source", "file", "problem", "detail"]).select(np.flatnonzero(bad)).to_list()
    missing = next((problem for problem in problems if problem["problem"].startswith("without ")), None)
    if bad.all() and missing:
        column = missing["problem"].removeprefix("without ")
        raise UserError(f"{what}: no record has {column}: {missing['detail']} ({missing['source']}). {NAME_COLUMNS}")
    for problem in problems:
        _refuse(problem, data)
    notes = _notes(problems)
    data.notes.extend(notes)
    if bad.all():
        raise UserError(f"{what}: no document to learn from. {' '.join(f'{note}.' for note in notes)}".rstrip())
    columns = ["text", "source"]
    if data.labelled:
        if rows.data.column("label_number").null_count == bad.sum():
            rows = rows.remove_columns("label").rename_column("label_number", "label")
        columns.insert(1, "label")
        alike = defaultdict(set)
        for label in rows.unique("label"):
            alike[" ".join(str(label).casefold().split())].add(str(label))
        if same := [f"{label!r}" for group in alike.values() if len(group) > 1 for label in sorted(group)]:
            data.notes.append(f"labels that differ only in case or spaces are different classes: {some(same)}")
    documents = rows.select_columns(columns)
    return documents.select(np.flatnonzero(~bad)) if bad.any() else documents


def _stream(rows: partial[Iterator[Any]], data: Source, what: str) -> IterableDataset:
    """What is read one after another are shards: a run that resumes reads those before its own no more."""
    key = rows.keywords
    shards: list[dict[str, Any]] = [{"files": (file,)} for file in key["files"]]
    if (count := getattr(key.get("table"), "num_shards", 1)) > 1:
        shards = [{"table": key["table"].shard(count, i), "shown": f"{what}:{i}"} for i in range(count)]
    options = {"shards": shards or [{}], "rows": rows, "data": data}
    first = next(_good(**options), None)
    if first is None:
        raise UserError(f"{what}: no document to learn from; --text_column and --label_column name what to read.")
    columns = Features({name: Value("int64" if isinstance(value, int) else "string") for name, value in first.items()})
    options["label"] = "label_number" if isinstance(first.get("label"), int) else "label"
    return IterableDataset.from_generator(_good, features=columns, gen_kwargs=options)


def _good(
    shards: list[dict[str, Any]], rows: Callable[..., Iterator[Any]], data: Source, label: str | None = None
) -> Iterator[dict[str, Any]]:
    """The documents among ``rows`` of all shards; labels are all text or all numbers, as ``label`` or the first."""
    for found in (row for shard in shards for row in rows(**shard)):
        own = "label" if found["label_number"] is None else "label_number"
        if found["problem"] is None and own != (label := label or own):
            found |= {"problem": "labels are text in some records and numbers in others", "detail": None}
        if found["problem"] is None:
            labels = {"label": found[label]} if data.labelled else {}
            yield {"text": found["text"], **labels, "source": found["source"]}
            continue
        _refuse(found, data)
        if found["problem"] != EMPTY:
            logger.warning("skipped %s: %s", found["source"], found["problem"])


def _refuse(problem: Mapping[str, Any], data: Source) -> None:
    """Raises UserError for a bad record, unless the flag for its kind allows leaving it out."""
    flag, advice = "on_bad_record", "Correct the record, or leave such records out"
    if problem["problem"] == EMPTY:
        flag, advice = "on_empty_document", "Leave such documents out"
    if getattr(data, flag) == "error":
        detail = f" ({problem['detail']})" if problem["detail"] else ""
        special = "".join(f" {text}" for reason, text in ADVICE.items() if problem["problem"].startswith(reason))
        raise UserError(f"{problem['source']}: {problem['problem']}{detail}.{special} {advice} with --{flag} skip.")


def _notes(problems: list[dict[str, Any]]) -> list[str]:
    """One line for each file: how many records were left out, why, and where the first of them are."""
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for problem in problems:
        sources[problem["file"]][problem["problem"]].append(problem["source"])
    return [
        f"skipped {several(sum(map(len, reasons.values())), 'record')} of {file}: "
        + ", ".join(f"{len(where)} {reason} ({some(where)})" for reason, where in reasons.items())
        for file, reasons in sources.items()
    ]


def some(names: Sequence[str]) -> str:
    """The first three of ``names``, for a message."""
    return ", ".join(names[:3]).replace("\n", "\\n") + (", ..." if len(names) > 3 else "")
