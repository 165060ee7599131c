"""Datasets that 🤗 Datasets loads itself: by name on the Hub, or from a folder that ``save_to_disk`` wrote.

Code that comes with a dataset never runs. All functions raise UserError for a dataset that cannot be reached or read,
or lacks the configuration, split or column; and for a bad record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import datasets
from datasets import config

from train.extras.readers import Source, rows
from train.extras.readers.readers import named
from train.records import UserError

_SECRET = re.compile(r"hf_\w+|(?<=\?)\S+|(?i:(?<=bearer )\S+)")


def load_named(data: Source) -> dict[str, Any]:
    """The splits of the dataset ``data.dataset`` on the Hub; under ``data.streaming`` nothing is downloaded ahead."""
    name, configuration = data.dataset, data.dataset_config
    with _advice(name):
        chosen = _choose(datasets.get_dataset_split_names(name, configuration), data, name)
    if data.streaming:
        # Its validation split comes over the network too, so it is cut short; a test split is not worth the wait.
        chosen.pop("test", None)

    def load_split(role: str, split: str) -> Any:
        with _advice(name):
            loaded = datasets.load_dataset(name, configuration, split=split, streaming=data.streaming)
            if data.streaming:
                stream = _documents(loaded, data, name, split, streams=True)
                if role == "train":
                    return stream
                head = list(islice(stream, data.max_eval_samples or 100))
                data.notes.append(f"streaming: validating on the first {len(head)} documents of {name}[{split}]")
                return datasets.Dataset.from_list(head)
        return _documents(loaded, data, name, split)

    return _gather(chosen, load_split, data)


@contextmanager
def _advice(name: str) -> Iterator[None]:
    """Turns whatever keeps the dataset ``name`` from being loaded into a UserError with advice."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # The causes come from half a dozen libraries (HTTP, file system, Parquet, YAML) with no common class.
        reason = shorten(_SECRET.sub("***", str(error)), 400, placeholder=" ...") or type(error).__name__
        advice = "A local file or folder is given by its path; a configuration by --dataset_config."
        if config.HF_HUB_OFFLINE:
            advice = "HF_HUB_OFFLINE is set: unset it to download (with a network), or give a local file or folder."
        elif isinstance(error, ConnectionError | TimeoutError):
            advice = "Without a network, set HF_HUB_OFFLINE=1 for what is cached, or give a local file or folder."
        elif "gated" in reason.lower() or "authent" in reason.lower():
            advice = "A private or gated dataset needs `hf auth login` by someone who was granted access."
        raise UserError(f"the dataset {name!r} on the Hub: {reason.rstrip('.')}. {advice}") from None


def is_saved(path: Path) -> bool:
    """Whether ``path`` was written by ``save_to_disk``."""
    has_info = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return has_info or (path / "dataset_dict.json").is_file()


def load_saved(path: Path, data: Source) -> dict[str, Any]:
    """The splits of a folder written by ``save_to_disk``; only the training split can be a stream."""
    saved = _from_disk(path)

    def load_split(role: str, split: str) -> Any:
        streams = role == "train" and data.streaming
        return _documents(_split_of(saved, split, path), data, path, split, streams)

    return _gather({"train": ""} if "" in saved else _choose(list(saved), data, str(path)), load_split, data)


def load_saved_validation(path: Path, data: Source) -> Any:
    """The documents to validate on of a folder written by ``save_to_disk``."""
    saved = _from_disk(path)
    split = data.validation_split or next((name for name in ("validation", *saved) if name in saved), "validation")
    split = "" if "" in saved else split
    return _documents(_split_of(saved, split, path), data, path, split)


def _from_disk(path: Path) -> dict[Any, Any]:
    """The splits of a saved DatasetDict by name; a Dataset is the only one, named ""."""
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        # Whatever is wrong with a damaged folder comes up as an error of Arrow, JSON or the system.
        raise UserError(f"{path}: cannot be loaded as saved by 🤗 Datasets: {' '.join(str(error).split())}") from None
    return dict(loaded) if isinstance(loaded, dict) else {"": loaded}


def _split_of(saved: dict[Any, Any], split: str, path: Path) -> Any:
    if split not in saved:  # an expression such as train[:10%] is for the Hub
        raise UserError(f"{path}: no split {split!r}; it has {', '.join(saved)}. Name one of these.")
    return saved[split]


def _documents(table: Any, data: Source, name: Any, split: str, streams: bool = False) -> Any:
    """The good records of a Dataset or an IterableDataset as documents."""
    what = f"{name}[{split}]" if split else str(name)
    if table.column_names is not None:  # a stream may not know them
        wanted = [data.text_column, *([data.label_column] if data.labelled else [])]
        if missing := [column for column in wanted if column not in table.column_names]:
            known = ", ".join(table.column_names)
            raise UserError(f"{what}: no column {missing[0]!r}; the columns are {known}. {rows.NAME_COLUMNS}")
        table = table.select_columns(wanted)
    # The fingerprint that a dataset was saved with need not stand for its content.
    files = () if streams else tuple(named(Path(file["filename"])) for file in table.cache_files)
    return rows.documents(table_rows, data, what, streams, table=table, shown=what, files=files)


def table_rows(table: Any, shown: str, files: Any, columns: rows.Columns) -> Iterator[dict[str, Any]]:
    """The records of ``table`` as rows, a class by its name; one out of range (-1: a hidden label) is empty."""
    label = columns[1]
    names = getattr((table.features or {}).get(label), "names", None)
    for index, record in enumerate(table):
        if names is not None:
            known = isinstance(record[label], int) and 0 <= record[label] < len(names)
            record = {**record, label: names[record[label]] if known else None}
        yield rows.row(record, shown, index, columns)


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


def _gather(chosen: Mapping[str, str], load_split: Callable[[str, str], Any], data: Source) -> dict[str, Any]:
    """The splits that ``load_split(role, split)`` gives; one to test on that it refuses is left out with a note."""
    loaded: dict[str, Any] = {}
    for role, split in chosen.items():
        try:
            loaded[role] = load_split(role, split)
        except UserError as error:
            # The test split of many public datasets has no labels; that must not stop a training.
            if role != "test":
                raise
            data.notes.append(f"left out the test split: {error}")
    return loaded
