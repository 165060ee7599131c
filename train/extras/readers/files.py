"""Local data: a file, a folder of files, or a folder that 🤗 Datasets saved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.extras.readers import readers, rows
from train.extras.readers.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, FileKey
from train.extras.readers.splits import Splits, choose, gather
from train.records import UserError

if TYPE_CHECKING:
    import datasets

    from train.config import Data

SUFFIXES = (*RECORD_SUFFIXES, *TEXT_SUFFIXES)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4")
_WORDS_FOR = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
_SPLIT_NAMES = {word: split for split, words in _WORDS_FOR.items() for word in words}
_UNNAMED = ""
"""Stands for the split of files whose names say none."""
_SHARD = re.compile(r"[-_.]\d.*$")
_WORD = re.compile(r"[^\W\d_]+")


def looks_like_path(name: str) -> bool:
    """Whether ``name`` was meant as a file or folder rather than as a dataset on the Hub."""
    path = Path(name)
    return (
        name.startswith((".", "~"))
        or path.is_absolute()
        or "\\" in name
        or len(path.parts) > 2
        or path.suffix.lower() in (*SUFFIXES, *_PACKED)
        or (len(path.parts) == 2 and path.parent.is_dir())
    )


def local_path(name: str) -> Path:
    """The path that ``name`` would be, with ~ as the home folder where there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def load(data: Data, labelled: bool) -> Splits:
    """The splits of the file or folder ``data.dataset``; only the training split of it is a stream.

    Raises:
        UserError: nothing to read there, or what it holds cannot be used.
    """
    path = local_path(data.dataset)
    if is_saved(path):
        return _load_saved(path, data, labelled)
    found, notes = _find(path)
    if _UNNAMED in found:
        found["train"] = found.pop(_UNNAMED)
        if len(found) > 1:
            count = len(found["train"].keys)
            notes += (f"{path}: no file is named train; the {count} that name no split are for training",)
    if "train" not in found:
        names = [str(Path(key[0]).relative_to(path)) for files in found.values() for key in files.keys]
        raise UserError(
            f"{path}: nothing to train on: by their names {rows.some(names)} are for validation or test. "
            "Rename one (train.jsonl), or name a file with --dataset."
        )
    loaded: dict[str, Any] = {}
    for split, files in found.items():
        what = str(path) if len(found) == 1 else f"the {split} split of {path}"
        if split == "train" and data.streaming:
            loaded[split] = _stream(files, data, labelled, what)
        else:
            loaded[split], skipped = _documents(files, data, labelled, what)
            notes += skipped
    return Splits(**loaded, notes=notes)


def load_validation(data: Data, labelled: bool) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """The documents of ``data.validation_dataset``, and notes: of files that are named so, where there are, else all.

    Raises:
        UserError: nothing to read there, or what it holds cannot be used.
    """
    path = local_path(data.validation_dataset or "")
    if not path.exists():
        raise UserError(f"--validation_dataset {path}: no such file or folder.")
    if is_saved(path):
        names = _saved_splits(path)
        split = data.validation_split or next((name for name in ("validation", *names) if name in names), "")
        if names and split not in names:
            raise UserError(f"{path}: no split {split!r}; it has {', '.join(names)}. Name one with --validation_split.")
        return _saved_documents(path, split, data, labelled)
    found, notes = _find(path)
    if len(found) > 1 and "validation" in found:
        notes += (f"{path}: of its files those were read that are for validation by their names",)
        found = {"validation": found["validation"]}
    files = tuple(key for keys in found.values() for key in keys.keys)
    are_records = any(keys.are_records for keys in found.values())
    documents, skipped = _documents(_Files(files, are_records), data, labelled, str(path))
    return documents, notes + skipped


@dataclass(frozen=True)
class _Files:
    """Files of one split and whether they hold records or are text."""

    keys: tuple[FileKey, ...]
    are_records: bool


def _find(path: Path) -> tuple[dict[str, _Files], tuple[str, ...]]:
    """The files of each split that is named, or a single file's, and notes about files that are left aside."""
    if not path.is_dir():
        suffix = path.suffix.lower()
        if suffix in _PACKED:
            raise UserError(f"{path}: archives are not read. Unpack it first.")
        if suffix not in SUFFIXES:
            raise UserError(f"{path}: cannot tell what it is. It must end in one of {' '.join(SUFFIXES)}.")
        return {"train": _Files((readers.file_key(path),), suffix in RECORD_SUFFIXES)}, ()
    files, outside = _walk(path)
    records = [file for file in files if file.suffix.lower() in RECORD_SUFFIXES]
    chosen = records or [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not chosen:
        links = f" {outside} links lead out of the folder and are not followed." if outside else ""
        raise UserError(f"{path}: no file in it ends in one of {' '.join(SUFFIXES)}.{links}")
    splits = _by_split(path, chosen, bool(records))
    used = sum(map(len, splits.values()))
    notes = [f"{path}: ignored {len(files) - used} other files, read {used}"] if used < len(files) else []
    if outside:
        notes.append(f"{path}: {outside} links lead out of the folder and were not followed")
    keys = {name: tuple(map(readers.file_key, members)) for name, members in splits.items()}
    return {name: _Files(members, bool(records)) for name, members in keys.items()}, tuple(notes)


def _walk(folder: Path) -> tuple[list[Path], int]:
    """Visible regular files below ``folder`` in sorted order, and how many links lead out of it."""
    root, found, outside = folder.resolve(), [], 0
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        for file in (Path(parent, name) for name in files if not name.startswith(".")):
            if file.is_symlink() and root not in file.resolve().parents:
                outside += 1
            elif file.is_file():
                found.append(file)
        outside += sum(Path(parent, name).is_symlink() for name in names)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix()), outside


def _by_split(folder: Path, files: Sequence[Path], are_records: bool) -> dict[str, list[Path]]:
    """Files by the split that their names say; those that say none are left out where some say train."""
    named = {file: _split_in_words(file.relative_to(folder)) for file in files}
    if not are_records and None in named.values():
        # The name of a text may be its title, and "test" a word of that.
        named = {file: _split_at_top(file.relative_to(folder)) for file in files}
    splits: dict[str, list[Path]] = {}
    for file, split in named.items():
        if split or "train" not in named.values():
            splits.setdefault(split or _UNNAMED, []).append(file)
    return splits


def _split_in_words(file: Path) -> str | None:
    """The split of the first folder or file name with such a word in it, the last where it has several."""
    for part in file.with_suffix("").parts:
        if splits := [_SPLIT_NAMES[word] for word in _WORD.findall(part.lower()) if word in _SPLIT_NAMES]:
            return splits[-1]
    return None


def _split_at_top(file: Path) -> str | None:
    """The split that is the whole name at the top, but for the number of a shard."""
    return _SPLIT_NAMES.get(_SHARD.sub("", file.with_suffix("").parts[0]).lower())


def _documents(files: _Files, data: Data, labelled: bool, what: str) -> tuple[datasets.Dataset, tuple[str, ...]]:
    generator, key = _generator(files, data, labelled)
    return rows.settle(rows.cached(generator, rows.features(), **key), data, labelled, what)


def _stream(files: _Files, data: Data, labelled: bool, what: str) -> datasets.IterableDataset:
    from datasets import IterableDataset

    generator, key = _generator(files, data, labelled)
    # A list is what datasets splits among the workers of a loader, file by file.
    key |= {"files": list(files.keys)}
    return rows.settle_stream(
        IterableDataset.from_generator(generator, features=rows.features(), gen_kwargs=key), data, labelled, what
    )


def _generator(files: _Files, data: Data, labelled: bool) -> tuple[Any, dict[str, Any]]:
    """The generator of these files' rows and its arguments, which are also the key in the cache."""
    if files.are_records:
        key = {"text_column": data.text_column, "label_column": data.label_column if labelled else None}
        return readers.record_rows, {"files": files.keys, "version": rows.FORMAT} | key
    if labelled:
        raise UserError(
            f"{files.keys[0][0]}: a text file carries no label. Classification needs records with a label "
            f"({' '.join(RECORD_SUFFIXES)}) or a dataset such as stdlib_packages."
        )
    return readers.document_rows, {"files": files.keys, "sample_by": data.sample_by, "version": rows.FORMAT}


def is_saved(path: Path) -> bool:
    """Whether ``path`` was written by ``save_to_disk``."""
    has_info = (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    return has_info or (path / "dataset_dict.json").is_file()


def _load_saved(path: Path, data: Data, labelled: bool) -> Splits:
    names = _saved_splits(path)
    chosen = choose(names, data, str(path)) if names else {"train": ""}

    def load_split(role: str, split: str) -> tuple[Any, tuple[str, ...]]:
        if role == "train" and data.streaming:
            return _saved_stream(path, split, data, labelled), ()
        return _saved_documents(path, split, data, labelled)

    return gather(chosen, load_split)


def _saved_splits(path: Path) -> list[str]:
    """Names of the splits of a saved DatasetDict; none for a Dataset.

    Raises:
        UserError: the folder cannot be loaded.
    """
    dataset = _load_from_disk(str(path))
    return list(dataset) if isinstance(dataset, dict) else []


def _load_from_disk(path: str) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(path)
    except Exception as error:
        # Whatever is wrong with a damaged folder comes up as an error of Arrow, JSON or the system.
        raise UserError(f"{path}: cannot be loaded as saved by 🤗 Datasets: {' '.join(str(error).split())}") from None


def _saved_key(path: Path, split: str, data: Data, labelled: bool) -> dict[str, Any]:
    label_column = data.label_column if labelled else None
    files = tuple(readers.file_key(file) for file in sorted(path.rglob("*")) if file.suffix in (".arrow", ".json"))
    columns = {"text_column": data.text_column, "label_column": label_column}
    return {"path": str(path), "files": files, "split": split, "version": rows.FORMAT} | columns


def _saved_documents(path: Path, split: str, data: Data, labelled: bool) -> tuple[datasets.Dataset, tuple[str, ...]]:
    key = _saved_key(path, split, data, labelled)
    return rows.settle(rows.cached(saved_rows, rows.features(), **key), data, labelled, _saved_name(path, split))


def _saved_stream(path: Path, split: str, data: Data, labelled: bool) -> datasets.IterableDataset:
    from datasets import IterableDataset

    key = _saved_key(path, split, data, labelled)
    stream = IterableDataset.from_generator(saved_rows, features=rows.features(), gen_kwargs=key)
    return rows.settle_stream(stream, data, labelled, _saved_name(path, split))


def _saved_name(path: Path, split: str) -> str:
    return f"{path}[{split}]" if split else str(path)


def saved_rows(
    path: str, files: tuple[FileKey, ...], split: str, text_column: str, label_column: str | None, version: int
) -> Iterator[dict[str, Any]]:
    """The rows of a saved split; ``files`` and ``version`` only tell cache entries apart."""
    loaded = _load_from_disk(path)
    dataset = loaded[split] if split else loaded
    name = _saved_name(Path(path), split)
    for number, record in enumerate(rows.records(dataset, text_column, label_column)):
        yield rows.row(record, name, number, text_column, label_column)
