"""Local data: a file, a folder of files whose names may say which split they are, or the standard library.

All functions raise UserError where there is nothing to read, or its content cannot be used.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.extras.readers import readers, rows, tables
from train.extras.readers.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, FileKey
from train.records import UserError

if TYPE_CHECKING:
    import datasets

    from train.extras.readers import Source

SUFFIXES = (*RECORD_SUFFIXES, *TEXT_SUFFIXES)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLIT_NAMES |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SHARD = re.compile(r"[-_.]\d.*$")  # the number of a shard
_WORD = re.compile(r"[^\W\d_]+")


def may_be_on_hub(name: str) -> bool:
    """Whether ``name`` can be a dataset on the Hub rather than a file or folder that is missing."""
    path = Path(name)
    is_path = path.suffix.lower() in (*SUFFIXES, *_PACKED) or (len(path.parts) == 2 and path.parent.is_dir())
    return _NAME.fullmatch(name) is not None and not is_path


def load(path: Path, data: Source) -> dict[str, Any]:
    """The splits of a file or folder; only the training split can be a stream."""
    found = _find(path, data)
    if None in found:
        found["train"] = found.pop(None)
        if len(found) > 1:
            count = len(found["train"])
            data.notes.append(f"{path}: no file is named train; the {count} that name no split are for training")
    if "train" not in found:
        names = [str(Path(key[0]).relative_to(path)) for keys in found.values() for key in keys]
        raise UserError(
            f"{path}: nothing to train on: by their names {rows.some(names)} are for validation or test. "
            "Rename one (train.jsonl), or name a file with --dataset."
        )
    loaded: dict[Any, Any] = {}
    for split, keys in found.items():
        what = str(path) if len(found) == 1 else f"the {split} split of {path}"
        loaded[split] = _documents(keys, data, what, split == "train" and data.streaming)
    return loaded


def load_validation(path: Path, data: Source) -> datasets.Dataset:
    """The documents of ``data.validation_dataset``: of files that are named so where there are some, else of all."""
    if not path.exists():
        raise UserError(f"--validation_dataset {path}: no such file or folder.")
    if tables.is_saved(path):
        return tables.load_saved_validation(path, data)
    found = _find(path, data)
    if len(found) > 1 and "validation" in found:
        data.notes.append(f"{path}: only its files that are for validation by their names were read")
        found = {"validation": found["validation"]}
    return _documents(tuple(key for members in found.values() for key in members), data, str(path))


def _documents(files: tuple[FileKey, ...], data: Source, what: str, streams: bool = False) -> Any:
    if data.labelled and not readers.has_records(files[0][1]):
        suffixes = " ".join(RECORD_SUFFIXES)
        raise UserError(
            f"{files[0][0]}: a text file carries no label. Classification needs records with a label ({suffixes})."
        )
    return rows.documents(readers.file_rows, data, what, streams, files=files, sample_by=data.sample_by)


def _find(path: Path, data: Source) -> dict[str | None, tuple[FileKey, ...]]:
    """A single file, or the files of each split that a folder's names tell."""
    if not path.is_dir():
        suffix = path.suffix.lower()
        if suffix in _PACKED:
            raise UserError(f"{path}: archives are not read. Unpack it first.")
        if suffix not in SUFFIXES:
            raise UserError(f"{path}: cannot tell what it is. It must end in one of {' '.join(SUFFIXES)}.")
        return {"train": (readers.file_key(path),)}
    files, outside = _walk(path)
    records = [file for file in files if readers.has_records(file)]
    chosen = records or [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not chosen:
        links = f" {outside} links lead out of the folder and are not followed." if outside else ""
        raise UserError(f"{path}: no file in it ends in one of {' '.join(SUFFIXES)}.{links}")
    splits = _by_split(path, chosen, bool(records))
    if (used := sum(map(len, splits.values()))) < len(files):
        data.notes.append(f"{path}: ignored {len(files) - used} other files, read {used}")
    if outside:
        data.notes.append(f"{path}: {outside} links lead out of the folder and were not followed")
    return {name: tuple(map(readers.file_key, members)) for name, members in splits.items()}


def _walk(folder: Path, left_out: Sequence[str] = ("__pycache__",)) -> tuple[list[Path], int]:
    """Visible regular files below ``folder`` in sorted order, and how many links lead out of it."""
    root, found, outside = folder.resolve(), [], 0
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".") and name not in left_out]
        for file in (Path(parent, name) for name in files if not name.startswith(".")):
            if file.is_symlink() and root not in file.resolve().parents:
                outside += 1
            elif file.is_file():
                found.append(file)
        outside += sum(Path(parent, name).is_symlink() for name in names)
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix()), outside


def _by_split(folder: Path, files: Sequence[Path], are_records: bool) -> dict[str | None, list[Path]]:
    """Files by the split that their names tell; those that name none (None) are left out where some are named train."""
    named = {file: _split_in_words(file.relative_to(folder)) for file in files}
    if not are_records and None in named.values():
        # The name of a text may be its title, and "test" a word of that: only whole names at the top count.
        tops = [_SHARD.sub("", file.relative_to(folder).with_suffix("").parts[0]).lower() for file in files]
        named = {file: _SPLIT_NAMES.get(top) for file, top in zip(files, tops, strict=True)}
    splits: dict[str | None, list[Path]] = {}
    for file, split in named.items():
        if split or "train" not in named.values():
            splits.setdefault(split, []).append(file)
    return splits


def _split_in_words(file: Path) -> str | None:
    """The split of the first folder or file name with such a word in it, the last where it has several."""
    for part in file.with_suffix("").parts:
        if splits := [_SPLIT_NAMES[word] for word in _WORD.findall(part.lower()) if word in _SPLIT_NAMES]:
            return splits[-1]
    return None


def load_stdlib(data: Source) -> datasets.Dataset:
    """The source and texts of this Python's standard library, all for training."""
    from datasets import Features, Value

    folder = Path(sysconfig.get_paths()["stdlib"])
    found, _ = _walk(folder, ("site-packages", "dist-packages", "__pycache__"))
    texts = [file for file in found if file.suffix in (".py", ".txt", ".rst", ".html")]
    keys = tuple(readers.file_key(file, file.relative_to(folder).as_posix()) for file in texts)
    columns = Features({name: Value("string") for name in ("text", "source")})
    documents = rows.cached(stdlib_rows, columns, files=keys, version=rows.FORMAT)
    if len(documents) < 2:
        raise UserError(f"stdlib: {folder} holds no source files. Use another Python, or --dataset FILE.")
    size, python = sum(key[2] for key in keys) / 1e6, platform.python_version()
    data.notes.append(f"stdlib: {len(documents):,} of {len(keys):,} files, {size:.1f} MB, of Python {python}")
    return documents


def stdlib_rows(files: Sequence[FileKey], version: int) -> Iterator[dict[str, str]]:
    """Each file's text once, with its path; ``version`` only tells cache entries apart.

    Files that are not UTF-8 are left out: some tests of Python's own are made to be unreadable.
    """
    seen: set[str] = set()
    for shown, path, *_ in files:
        with contextlib.suppress(UnicodeDecodeError, OSError):
            text = Path(path).read_text(encoding="utf-8")
            if text.strip() and "\0" not in text and text not in seen:
                seen.add(text)
                yield {"text": text, "source": shown}
