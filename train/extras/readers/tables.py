"""Datasets that 🤗 Datasets loads itself: by name on the Hub, or from a folder that ``save_to_disk`` wrote.

Code that comes with a dataset never runs. All functions raise UserError for a dataset that cannot be reached or read,
or lacks the configuration, split or column; and for a bad record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import config

from train.extras.readers import Source, rows
from train.extras.readers.readers import named
from train.figures import without_secrets
from train.records import UserError, one_line


def load_named(data: Source) -> dict[str, datasets.Dataset]:
    """The splits of the dataset ``data.dataset`` on the Hub."""
    name, configuration = data.dataset, data.dataset_config

    def load_split(split: str) -> Any:
        with _advice(name):
            return datasets.load_dataset(name, configuration, split=split)

    with _advice(name):
        names = datasets.get_dataset_split_names(name, configuration)
    return _gather(names, load_split, data, name)


@contextmanager
def _advice(name: str) -> Iterator[None]:
    """Turns whatever keeps the dataset ``name`` from being loaded into a UserError with advice."""
    try:
        yield
    except Exception as error:
        # The causes come from half a dozen libraries (HTTP, file system, Parquet, YAML) with no common class.
        reason = without_secrets(one_line(error, 400)) or type(error).__name__
        advice = "A local file or folder is given by its path, a configuration by --dataset_config; a private or gated "
        advice += "dataset needs `hf auth login`; without a network, HF_HUB_OFFLINE=1 takes what is cached."
        if config.HF_HUB_OFFLINE:
            advice = "HF_HUB_OFFLINE is set: unset it to download (with a network), or give a local file or folder."
        raise UserError(f"the dataset {name!r} on the Hub: {reason.rstrip('.')}. {advice}") from None


def is_saved(path: Path) -> bool:
    """Whether ``path`` was written by ``save_to_disk``."""
    has_info = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return has_info or (path / "dataset_dict.json").is_file()


def load_saved(path: Path, data: Source) -> dict[str, datasets.Dataset]:
    """The splits of a folder written by ``save_to_disk``; a Dataset without splits is the one called train."""
    saved = _from_disk(path)
    return _gather(list(saved), lambda split: _split_of(saved, split, path), data, str(path))


def load_saved_validation(path: Path, data: Source) -> datasets.Dataset:
    """The documents to validate on of a folder written by ``save_to_disk``."""
    saved = _from_disk(path)
    split = data.validation_split or ("validation" if "validation" in saved else next(iter(saved)))
    return _documents(_split_of(saved, split, path), data, f"{path}[{split}]")


def _from_disk(path: Path) -> dict[str, Any]:
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        # Whatever is wrong with a damaged folder comes up as an error of Arrow, JSON or the system.
        raise UserError(f"{path}: cannot be loaded as saved by 🤗 Datasets: {one_line(error)}") from None
    return {str(name): split for name, split in loaded.items()} if isinstance(loaded, dict) else {"train": loaded}


def _split_of(saved: dict[str, Any], split: str, path: Path) -> Any:
    if split not in saved:  # an expression such as train[:10%] is for the Hub
        raise UserError(f"{path}: no split {split!r}; it has {', '.join(saved)}. Name one of these.")
    return saved[split]


def _documents(table: datasets.Dataset, data: Source, what: str) -> datasets.Dataset:
    """The good records of a Dataset as documents."""
    wanted = [data.text_column, *([data.label_column] if data.labelled else [])]
    if missing := [column for column in wanted if column not in table.column_names]:
        known = ", ".join(table.column_names)
        raise UserError(f"{what}: no column {missing[0]!r}; the columns are {known}. {rows.NAME_COLUMNS}.")
    # The fingerprint that a dataset was saved with need not stand for its content.
    files = tuple(named(Path(file["filename"])) for file in table.cache_files)
    return rows.documents(table_rows, data, what, table=table.select_columns(wanted), shown=what, files=files)


def table_rows(table: Any, shown: str, files: Any, columns: rows.Columns) -> Iterator[dict[str, Any]]:
    """The records of ``table`` as rows, a class by its name; one out of range (-1: a hidden label) is empty."""
    label = columns[1]
    names = getattr(table.features.get(label), "names", None)
    for index, record in enumerate(table):
        if names is not None:
            known = isinstance(record[label], int) and 0 <= record[label] < len(names)
            record = {**record, label: names[record[label]] if known else None}
        yield rows.row(record, shown, index, columns)


def _gather(
    names: Sequence[str], load_split: Callable[[str], Any], data: Source, what: str
) -> dict[str, datasets.Dataset]:
    """The documents of the splits that are asked for, of those with ``names``, by what they are for."""
    loaded: dict[str, datasets.Dataset] = {}
    for role, split in _choose(names, data, what).items():
        try:
            loaded[role] = _documents(load_split(split), data, f"{what}[{split}]")
        except UserError as error:
            # The test split of many public datasets has no labels; that must not stop a training.
            if role != "test":
                raise
            data.notes.append(f"left out the test split: {error}")
    return loaded


def _choose(names: Sequence[str], data: Source, name: str) -> dict[str, str]:
    """Which of a dataset's splits (``names``) to train on, validate on and test on, as far as it has them.

    Raises UserError for a split that is not there, and for one that would be trained and validated on.
    """
    train, validation = data.dataset_split, data.validation_split
    if validation is None and "validation" in names and "validation" not in _names_in(train):
        validation = "validation"
    for flag, split in (("--dataset_split", train), ("--validation_split", validation)):
        if split is not None and not set(_names_in(split)) <= set(names):
            raise UserError(f"{name}: no split {split!r}; it has {', '.join(names)}. Name one with {flag}.")
    if train == validation:
        raise UserError(f"{name}: --dataset_split and --validation_split both name {train!r}.")
    used = {*_names_in(train), *_names_in(validation or "")}
    test = "test" if "test" in names and "test" not in used else None
    return {role: split for role, split in (("train", train), ("validation", validation), ("test", test)) if split}


def _names_in(split: str) -> list[str]:
    """The names in an expression such as ``train[:10%]+unsupervised``."""
    return re.sub(r"\[.*?\]", "", split).split("+")
