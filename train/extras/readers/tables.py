"""Datasets that 🤗 Datasets loads itself, and those of functions: used where they lie, not copied.

Code that comes with a dataset never runs. All functions raise UserError for a dataset that cannot be reached or read,
or lacks the configuration, split or column; and for a bad row.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, config
from datasets.fingerprint import Hasher

from train.checkpoint import digest
from train.extras.cache import ROWS_AT_ONCE
from train.extras.readers import Source
from train.extras.readers.readers import EMPTY, NAME_COLUMNS, UnusableError, settle
from train.figures import without_secrets
from train.records import UserError, one_line

VALIDATION = ("validation", "valid", "val", "dev")  # names of the split to validate on, the first that is there


def load_named(data: Source) -> dict[str, Dataset]:
    """The splits of the dataset ``data.dataset`` on the Hub."""
    name, configuration = data.dataset, data.dataset_config
    try:
        splits = _choose(datasets.get_dataset_split_names(name, configuration), data)
        tables = {split: datasets.load_dataset(name, configuration, split=split) for split in splits.values()}
    except Exception as error:
        # The causes come from half a dozen libraries (HTTP, file system, Parquet, YAML) with no common class.
        reason = without_secrets(one_line(error, 400)) or type(error).__name__
        advice = "A local file or folder is given by its path, a configuration by --dataset_config; a private or gated "
        advice += "dataset needs `hf auth login`; without a network, HF_HUB_OFFLINE=1 takes what is cached."
        if config.HF_HUB_OFFLINE:
            advice = "HF_HUB_OFFLINE is set: unset it to download (with a network), or give a local file or folder."
        raise UserError(f"the dataset {name!r} on the Hub: {reason.rstrip('.')}. {advice}") from None
    return _documents(splits, tables, data, name)


def load_saved(path: Path, data: Source, only_validation: bool = False) -> dict[str, Dataset]:
    """The splits of a folder written by ``save_to_disk``; a Dataset without splits is the one called train."""
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        # Whatever is wrong with a damaged folder comes up as an error of Arrow, JSON or the system.
        raise UserError(f"{path}: cannot be loaded as saved by 🤗 Datasets: {one_line(error)}") from None
    saved: dict[Any, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if only_validation:
        splits = {"validation": data.validation_split or next(name for name in (*VALIDATION, *saved) if name in saved)}
    else:
        splits = _choose(list(saved), data)
    return _documents(splits, saved, data, str(path))


def _documents(splits: Mapping[str, str], tables: Mapping[str, Any], data: Source, name: str) -> dict[str, Dataset]:
    """The documents of these ``splits``, by what they are for."""
    loaded: dict[str, Dataset] = {}
    for role, split in splits.items():
        if split not in tables:  # an expression such as train[:10%] is for the Hub
            raise UserError(f"{name}: no split {split!r}; it has {', '.join(tables)}. Name one of these.")
        data.files[role].update(file["filename"] for file in tables[split].cache_files)
        with optional_test(role, data, UserError):
            loaded[role] = _columns(tables[split], data, f"{name}[{split}]")
    return loaded


@contextmanager
def optional_test(role: str, data: Source, problem: type[UserError] = UnusableError) -> Iterator[None]:
    """A test split with this ``problem`` is left out, with a note: that of many public datasets has no labels."""
    try:
        yield
    except problem as error:
        if role != "test":
            raise
        data.notes.append(f"left out the test split: {error}")


def _columns(table: Dataset, data: Source, what: str) -> Dataset:
    names = {data.text_column: "text"} | ({data.label_column: "label"} if data.labelled else {})
    if missing := [column for column in names if column not in table.column_names]:
        known = ", ".join(table.column_names)
        raise UnusableError(f"{what}: no column {missing[0]!r}; the columns are {known}. {NAME_COLUMNS}.")
    contents = [digest(Path(file["filename"])) for file in table.cache_files]
    table = table.with_format(None).select_columns(list(names)).rename_columns(names)
    if data.labelled and re.fullmatch(r"bool|float\d+", str(getattr(table.features["label"], "dtype", ""))):
        values: Any = table["label"][:]  # 1, 1.0 and true are the class 1, as in files
        texts = [str(v if v % 1 else int(v)) if v is not None and v % 1 >= 0 else None for v in values]
        table = table.remove_columns("label").add_column("label", texts)  # type: ignore
    # The one that a dataset was saved with need not stand for its content.
    table._fingerprint = Hasher.hash([table._fingerprint, contents])
    return good_rows(table, data, what)


def good_rows(table: Dataset, data: Source, what: str) -> Dataset:
    """The rows of an unformatted ``table`` that have a ``text`` and, if labelled, a ``label``: a class by its name.

    Raises UserError for columns of other types, and for rows that may not be left out.
    """
    if data.labelled and (names := getattr(table.features["label"], "names", None)):
        labels = [names[n] if n in range(len(names)) else None for n in table["label"][:]]  # -1: a hidden label
        table = table.remove_columns("label").add_column("label", labels)  # type: ignore
        data.classes.extend(() if data.classes else names)  # of the first split, which is read to be trained on
    kinds = {"text": (data.text_column, ".*string", "text")}
    kinds["label"] = (data.label_column, r".*string|u?int\d+|float\d+|bool", "text or a number")
    columns = ["text", "label"] if data.labelled else ["text"]
    for column in columns:
        (name, pattern, needed), found = kinds[column], table.features[column]
        if not re.fullmatch(pattern, kind := str(getattr(found, "dtype", type(found).__name__.lower()))):
            raise UnusableError(f"{what}: column {name!r} holds {kind}; each row needs {needed}.")
    problems: list[str] = []
    parts: Any = table.select_columns(columns).iter(ROWS_AT_ONCE)
    for part in parts:
        problems += map(_problem, part["text"], part.get("label", itertools.repeat(0)))
    bad = [(f"{what}, row {number}", problem) for number, problem in enumerate(problems) if problem]
    settle(bad, len(table), data, what)
    return table.select(np.flatnonzero(np.array(problems) == "")) if bad else table


def _problem(text: str | None, label: Any) -> str:
    if text is None:
        return "no text"
    if "\0" in text:
        return "a NUL byte in its text"
    if label is None or (isinstance(label, float) and math.isnan(label)) or not str(label).strip():
        return "no label"
    return "" if text.strip() else EMPTY


def _choose(names: Sequence[str], data: Source) -> dict[str, str]:
    """Which of a dataset's splits (``names``) to train on, validate on and test on: those asked for, or named so."""
    train, left = data.dataset_split, set(names) - _names_in(data.dataset_split)
    asked = [data.validation_split, *(name for name in VALIDATION if name in left)]
    validation = None if data.validation_dataset else next(filter(None, asked), None)
    left -= _names_in(validation or "")
    chosen = {"train": train, "validation": validation, "test": "test" if "test" in left else None}
    if left := sorted(left - {"test"}):
        data.notes.append(f"{data.dataset}: splits that are not used: {', '.join(left)}")
    return {role: split for role, split in chosen.items() if split}


def _names_in(split: str) -> set[str]:
    """The names in an expression such as ``train[:10%]+unsupervised``."""
    return set(re.sub(r"\[.*?\]", "", split).split("+"))
