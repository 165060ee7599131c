"""Documents that a function of a fork returns, looked at as closely as those of files."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
from pyarrow import compute

from train.config import Config
from train.data import corpus_of, load_function
from train.figures import several
from train.records import Corpus, UserError
from train.state import ROWS_AT_ONCE


def load_returned(config: Config, labelled: bool) -> Corpus:
    """What the function that ``--dataset`` names returns, without documents of only space; classes by their names.

    Raises UserError for a function that does not take the configuration, and for a row without text or label.
    """
    name = config.data.dataset
    function = load_function(name, "dataset")
    try:
        inspect.signature(function).bind(config)
    except TypeError:
        raise UserError(f"dataset {name!r}: it must take one argument, the configuration of the run.") from None
    found = function(config)
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if unknown := splits.keys() - {"train", "validation", "test"}:
        raise UserError(f"dataset {name!r} returned a split {min(map(str, unknown))!r}: use train, validation, test.")
    notes: list[str] = []
    for split, documents in splits.items():
        if isinstance(documents, datasets.Dataset) and {"text", *(["label"] * labelled)} <= {*documents.column_names}:
            splits[split] = _checked(documents, f"dataset {name!r}: the {split} split", labelled, notes)
    corpus = corpus_of(splits if isinstance(found, dict) else splits["train"], config, labelled)
    return replace(corpus, notes=tuple(notes))


def _checked(documents: datasets.Dataset, what: str, labelled: bool, notes: list[str]) -> datasets.Dataset:
    plain = documents.with_format(None)
    if labelled and (names := getattr(documents.features["label"], "names", None)):
        labels = [names[label] if label in range(len(names)) else None for label in plain["label"][:]]
        documents = documents.remove_columns("label").add_column("label", labels)  # pyright: ignore[reportCallIssue]
    kinds = {"text": "(large_)?string", "label": r"(large_)?string|u?int\d+|bool"}
    for column in ("text", "label") if labelled else ("text",):
        kind = str(getattr(documents.features[column], "dtype", "list"))
        needed = "text" if column == "text" else "text or a whole number"
        if re.fullmatch(kinds[column], kind) is None:
            raise UserError(f"{what}: column {column!r} holds {kind}; each row needs {needed}.")
        if documents.data.column(column).null_count and None in (values := documents[column][:]):
            raise UserError(f"{what}: row {values.index(None)} has no {column}; each row needs {needed}.")
    tables: Any = documents.select_columns("text").with_format("arrow").iter(ROWS_AT_ONCE)  # without Python's strings
    trimmed = (compute.utf8_trim_whitespace(table["text"]) for table in tables)  # pyright: ignore
    has_text = [mark for texts in trimmed for mark in compute.not_equal(texts, "").to_pylist()]  # pyright: ignore
    if all(has_text):
        return documents
    count, first = several(has_text.count(False), "empty document"), has_text.index(False)
    notes.append(f"{what}: skipped {count}, the first in row {first}")
    return documents.select(np.flatnonzero(has_text))
