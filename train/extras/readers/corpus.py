"""Where text comes from: local files, datasets of 🤗 Datasets, the standard library's own text."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from train.extras.readers import Source, readers, rows, tables
from train.extras.readers.readers import RECORD_SUFFIXES, TEXT_SUFFIXES, File
from train.figures import several
from train.records import Corpus, UsageError, UserError

RECIPES = ("listops", "stdlib_packages")  # datasets that functions in recipes/ generate
LONG = 10_000_000  # characters
NEARBY = 2000  # a text is cut at the end of a line if there is one within so many characters
SUFFIXES = (*RECORD_SUFFIXES, *TEXT_SUFFIXES)
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".lz4")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLIT_NAMES |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SHARD = re.compile(r"[-_.]\d.*$")  # the number of a shard
_WORD = re.compile(r"[^\W\d_]+")


def load_corpus(data: Source) -> Corpus:
    """The documents that ``data`` asks for, by split, with columns ``text``, ``source`` and, if labelled, ``label``.

    The training split is a stream under ``data.streaming``; the others never are. Where the data brings no validation
    split, some documents are held out, the same ones in every run and on every machine. Raises UsageError for flags
    that contradict each other, UserError for data that is not there or cannot be used, with the flag that would help.
    """
    if data.dataset in RECIPES:
        raise UsageError(f"dataset: {data.dataset} is generated. Write --dataset recipes/{data.dataset}.py:documents.")
    if data.dataset_options is not None:
        data.notes.append("dataset_options: only a function takes them, so they are left out")
    splits = _load(data)
    if data.validation_dataset is not None:
        splits["validation"] = _load_validation(Path(data.validation_dataset), data)
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], data)
    train = _limit(splits["train"], data.max_train_samples)
    validation = _limit(splits["validation"], data.max_eval_samples)
    return Corpus(data.dataset, train, validation, splits.get("test"), tuple(data.notes))


def _load(data: Source) -> dict[str, Any]:
    name = data.dataset
    if name == "stdlib":
        if data.streaming:
            raise UsageError("streaming: stdlib is on this machine already; there is nothing to stream.")
        if data.labelled:
            raise UserError("stdlib has no labels. Write --dataset recipes/stdlib_packages.py:documents.")
        return {"train": _load_stdlib(data)}
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where there is no home folder
    if tables.is_saved(path):
        return tables.load_saved(path, data)
    if path.exists():
        return _load_files(path, data)
    is_path = path.suffix.lower() in (*SUFFIXES, *_PACKED) or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path or not _NAME.fullmatch(name):
        raise UserError(f"--dataset {name}: no such file or folder, and not a name on the Hub (user/name).")
    return tables.load_named(data)


# Files and folders


def _load_files(path: Path, data: Source) -> dict[str, Any]:
    """The splits of a file or folder; only the training split can be a stream."""
    found = _find(path, data)
    if None in found:
        found["train"] = found.pop(None)
        if len(found) > 1:
            count = len(found["train"])
            data.notes.append(f"{path}: no file is named train; the {count} that name no split are for training")
    if "train" not in found:
        names = [Path(shown).name for members in found.values() for shown, _ in members]
        raise UserError(
            f"{path}: nothing to train on: by their names {rows.some(names)} are for validation or test. "
            "Rename one (train.jsonl), or name a file with --dataset."
        )
    loaded: dict[Any, Any] = {}
    for split, keys in found.items():
        what = str(path) if len(found) == 1 else f"the {split} split of {path}"
        loaded[split] = _documents(keys, data, what, split == "train" and data.streaming)
    return loaded


def _load_validation(path: Path, data: Source) -> datasets.Dataset:
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


def _documents(files: tuple[File, ...], data: Source, what: str, streams: bool = False) -> Any:
    if data.labelled and not readers.has_records(files[0][1]):
        suffixes = " ".join(RECORD_SUFFIXES)
        raise UserError(
            f"{files[0][0]}: a text file carries no label. Classification needs records with a label ({suffixes})."
        )
    how = data.sample_by, data.encoding, data.quoting
    return rows.documents(readers.file_rows, data, what, streams, files=files, how=how)


def _find(path: Path, data: Source) -> dict[str | None, tuple[File, ...]]:
    """A single file, or the files of each split that a folder's names tell."""
    if not path.is_dir():
        suffix = path.suffix.lower()
        if suffix in _PACKED:
            raise UserError(f"{path}: archives are not read. Unpack it first.")
        if suffix not in SUFFIXES:
            raise UserError(f"{path}: cannot tell what it is. It must end in one of {' '.join(SUFFIXES)}.")
        return {"train": (readers.named(path),)}
    files, outside = _walk(path)
    records = [file for file in files if readers.has_records(file)]
    chosen = records or [file for file in files if file.suffix.lower() in TEXT_SUFFIXES]
    if not chosen:
        links = f" Did not follow {several(outside, 'link')} out of the folder." if outside else ""
        raise UserError(f"{path}: no file in it ends in one of {' '.join(SUFFIXES)}.{links}")
    splits = _by_split(path, chosen, bool(records))
    if (used := sum(map(len, splits.values()))) < len(files):
        data.notes.append(f"{path}: ignored {several(len(files) - used, 'other file')}, read {used}")
    if outside:
        data.notes.append(f"{path}: did not follow {several(outside, 'link')} out of the folder")
    return {name: tuple(map(readers.named, members)) for name, members in splits.items()}


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


def _load_stdlib(data: Source) -> datasets.Dataset:
    """The source and texts of this Python's standard library, all for training."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found, _ = _walk(folder, ("site-packages", "dist-packages", "__pycache__"))
    texts = [file for file in found if file.suffix in (".py", ".txt", ".rst", ".html")]
    keys = tuple(readers.named(file, file.relative_to(folder).as_posix()) for file in texts)
    columns = datasets.Features({name: datasets.Value("string") for name in ("text", "source")})
    documents = rows.cached(stdlib_rows, columns, files=keys)
    if len(documents) < 2:
        raise UserError(f"stdlib: {folder} holds no source files. Use another Python, or --dataset FILE.")
    size, python = sum(file.stat().st_size for file in texts) / 1e6, platform.python_version()
    data.notes.append(f"stdlib: {len(documents):,} of {len(keys):,} files, {size:.1f} MB, of Python {python}")
    return documents


def stdlib_rows(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Each file's text once, with its path.

    Files that are not UTF-8 are left out: some tests of Python's own are made to be unreadable.
    """
    seen: set[str] = set()
    for shown, path in files:
        with contextlib.suppress(UnicodeDecodeError, OSError):
            text = Path(path).read_text(encoding="utf-8")
            if text.strip() and "\0" not in text and text not in seen:
                seen.add(text)
                yield {"text": text, "source": shown}


# Splits


def _hold_out(documents: Any, data: Source) -> tuple[Any, Any]:
    """Documents to train on, and documents held out for validation.

    Of a stream the first ones are held out. A single document without a label is cut in two near its end; every label
    keeps a document to train on. Raises UserError where there is too little for two splits.
    """
    if data.streaming:
        return _hold_out_head(documents, data)
    if len(documents) == 1 and not data.labelled:
        return _divide(documents, data)
    order = np.random.default_rng(0).permutation(len(documents))
    count = min(max(round(len(documents) * data.validation_fraction), 1), len(documents) - 1)
    labels = list(documents["label"]) if data.labelled else []
    if labels:
        last = {labels[position]: position for position in order}
        order = np.array([position for position in order if last[labels[position]] != position], dtype=int)
    validation = np.sort(order[:count])
    if not len(validation):
        raise UserError(
            f"{data.dataset}: every label is that of a single record, which training needs. Add records, or "
            "--validation_dataset; or choose another --label_column."
        )
    note = f"held out {len(validation):,} of {len(documents):,} documents for validation"
    if labels and (unseen := set(labels) - {labels[i] for i in validation}):
        note += f", none of them with the label {rows.some([repr(label) for label in sorted(unseen)])}"
    data.notes.append(note)
    return documents.select(np.delete(np.arange(len(documents)), validation)), documents.select(validation)


def _divide(document: datasets.Dataset, data: Source) -> tuple[Any, Any]:
    name, fraction = data.dataset, data.validation_fraction
    # Not in memory: the parts land in the cache.
    parts = rows.cached(halves, document.features, document=document, fraction=fraction)
    if len(parts) < 2:
        raise UserError(f"{name}: one document, too short to be split in two. Add text, or --validation_dataset.")
    slow = ", which is long: tokenising it may take minutes without showing progress" * (len(parts[0]["text"]) > LONG)
    data.notes.append(f"{name} is one document{slow}; its last {fraction:.0%} is the validation split")
    return parts.select([0]), parts.select([1])


def halves(document: Sequence[Mapping[str, str]], fraction: float) -> Iterator[dict[str, str]]:
    """The only text of ``document`` in two, the second its last ``fraction``; without parts that are only space."""
    text = document[0]["text"]
    place = round(len(text) * (1 - fraction))
    # At the start of a line near there that leaves something on both sides, if one does.
    lines = (text.rfind("\n", max(place - NEARBY, 0), place) + 1, text.find("\n", place, place + NEARBY) + 1)
    good = [at for at in lines if at and text[:at].strip() and text[at:].strip()]
    cut = min(good, key=lambda at: abs(at - place), default=place)
    yield from ({**document[0], "text": part} for part in (text[:cut], text[cut:]) if part.strip())


def _hold_out_head(stream: datasets.IterableDataset, data: Source) -> tuple[Any, Any]:
    count = data.max_eval_samples or 100
    head = list(islice(stream, count + 1))
    if len(head) <= count:
        raise UserError(
            f"{data.dataset}: the first {count} documents of a stream are held out for validation, and it has "
            f"{len(head)}. Lower --max_eval_samples, give --validation_dataset, or do without --streaming."
        )
    data.notes.append(f"streaming: the first {count} documents are held out for validation")
    return stream.skip(count), datasets.Dataset.from_list(head[:count])


def _limit(documents: Any, count: int | None) -> Any:
    """``count`` documents: of a stream the first, of a Dataset, which may be sorted, evenly spaced ones; None: all."""
    if count is None:
        return documents
    if hasattr(documents, "select"):
        count = min(count, len(documents))
        return documents.select([number * len(documents) // count for number in range(count)])
    return documents.take(count)
