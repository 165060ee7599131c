"""Local data: a file, or a folder of files whose names may say which split they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.extras.readers import readers, rows, tables
from train.extras.readers.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, FileKey
from train.extras.readers.splits import Splits

if TYPE_CHECKING:
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
"""Stands for the split of files that do not name one."""
_SHARD = re.compile(r"[-_.]\d.*$")
_WORD = re.compile(r"[^\W\d_]+")

_Found = tuple[dict[str, tuple[FileKey, ...]], tuple[str, ...]]
"""The files of each split, and notes about files that are not read."""


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
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where there is none


def load(path: Path, data: Data, labelled: bool) -> Splits:
    """The splits of a file or folder; only the training split of it is a stream.

    Raises:
        UserError: nothing to read there, or its content cannot be used.
    """
    found, notes = _find(path)
    if _UNNAMED in found:
        found["train"] = found.pop(_UNNAMED)
        if len(found) > 1:
            count = len(found["train"])
            notes += (f"{path}: no file is named train; the {count} that name no split are for training",)
    if "train" not in found:
        names = [str(Path(key[0]).relative_to(path)) for keys in found.values() for key in keys]
        raise UserError(
            f"{path}: nothing to train on: by their names {rows.some(names)} are for validation or test. "
            "Rename one (train.jsonl), or name a file with --dataset."
        )
    loaded: dict[str, Any] = {}
    for split, keys in found.items():
        what = str(path) if len(found) == 1 else f"the {split} split of {path}"
        loaded[split], skipped = _documents(keys, data, labelled, what, split == "train" and data.streaming)
        notes += skipped
    return Splits(**loaded, notes=notes)


def load_validation(path: Path, data: Data, labelled: bool) -> rows.Documents:
    """The documents of ``data.validation_dataset``, and notes: of files that are named so, where there are, else all.

    Raises:
        UserError: nothing to read there, or its content cannot be used.
    """
    if not path.exists():
        raise UserError(f"--validation_dataset {path}: no such file or folder.")
    if tables.is_saved(path):
        return tables.load_saved_validation(path, data, labelled)
    found, notes = _find(path)
    if len(found) > 1 and "validation" in found:
        notes += (f"{path}: only its files that are for validation by their names were read",)
        found = {"validation": found["validation"]}
    keys = tuple(key for members in found.values() for key in members)
    documents, skipped = _documents(keys, data, labelled, str(path), False)
    return documents, notes + skipped


def _documents(files: tuple[FileKey, ...], data: Data, labelled: bool, what: str, streams: bool) -> rows.Documents:
    from datasets import IterableDataset

    if labelled and not readers.has_records(files[0][1]):
        raise UserError(
            f"{files[0][0]}: a text file carries no label. Classification needs records with a label "
            f"({' '.join(RECORD_SUFFIXES)})."
        )
    # The generator's arguments are also the key in the cache.
    key: dict[str, Any] = {
        "files": files,
        "text_column": data.text_column,
        "label_column": data.label_column if labelled else None,
        "sample_by": data.sample_by,
        "version": rows.FORMAT,
    }
    if not streams:
        found = rows.cached(readers.file_rows, rows.features(), **key)
    else:
        key["files"] = list(files)  # datasets divides a list among the workers of a loader, file by file
        found = IterableDataset.from_generator(readers.file_rows, features=rows.features(), gen_kwargs=key)
    return rows.settle(found, data, labelled, what)


def _find(path: Path) -> _Found:
    """A single file, or the files of each split that a folder's names tell."""
    if not path.is_dir():
        suffix = path.suffix.lower()
        if suffix in _PACKED:
            raise UserError(f"{path}: archives are not read. Unpack it first.")
        if suffix not in SUFFIXES:
            raise UserError(f"{path}: cannot tell what it is. It must end in one of {' '.join(SUFFIXES)}.")
        return {"train": (readers.file_key(path),)}, ()
    files, outside = _walk(path)
    records = [file for file in files if readers.has_records(file)]
    chosen = records or [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not chosen:
        links = f" {outside} links lead out of the folder and are not followed." if outside else ""
        raise UserError(f"{path}: no file in it ends in one of {' '.join(SUFFIXES)}.{links}")
    splits = _by_split(path, chosen, bool(records))
    used = sum(map(len, splits.values()))
    notes = [f"{path}: ignored {len(files) - used} other files, read {used}"] if used < len(files) else []
    if outside:
        notes.append(f"{path}: {outside} links lead out of the folder and were not followed")
    return {name: tuple(map(readers.file_key, members)) for name, members in splits.items()}, tuple(notes)


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
    """Files by the split that their names tell; those that name none are left out where some are named train."""
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
    """The split that is the whole name at the top, except for the number of a shard."""
    return _SPLIT_NAMES.get(_SHARD.sub("", file.with_suffix("").parts[0]).lower())
