"""Where text comes from: functions, local files, datasets of 🤗 Datasets, the standard library's own text."""

import difflib
import itertools
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from train.config import Config, call_function
from train.extras.readers import Source, is_saved, readers, tables
from train.extras.readers.readers import RECORD_SUFFIXES, TEXT_SUFFIXES
from train.figures import several
from train.records import SPLITS, Corpus, UserError

SUFFIXES = (*RECORD_SUFFIXES, *TEXT_SUFFIXES)
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(tables.VALIDATION, "validation")


def load_corpus(data: Source, config: Config | None = None) -> Corpus:
    """The documents that ``data`` asks for, by split, with columns ``text``, ``source`` and, if labelled, ``label``.

    Where the data brings no validation split, some documents are held out, the same ones in every run and on every
    machine. Raises UserError for data that is not there or cannot be used, with the flag that would help. ``config``
    is given where ``--dataset`` names a function, whose documents need no ``source``.
    """
    if data.labelled and data.text_column == data.label_column:
        raise UserError(f"--label_column {data.label_column}: it is also --text_column. Give another.")
    splits = _load(data) if config is None else _returned(config, data)
    if data.validation_dataset is not None:
        if not Path(data.validation_dataset).exists():
            raise UserError(f"--validation_dataset {data.validation_dataset}: no such file or folder.")
        data.files.pop("validation", None)  # of the split that is replaced
        splits |= _load_path(Path(data.validation_dataset), data, only_validation=True)
        train, held = ({*map(os.path.realpath, data.files[split])} for split in ("train", "validation"))
        if both := train & held:
            also = f"{min(both)} would be trained on, too"
            raise UserError(f"--validation_dataset {data.validation_dataset}: {also}. Give other documents.")
    suffixes = {Path(file).suffix.lower() for files in data.files.values() for file in files}
    uses = {  # a recipe may be used with data of another kind
        "sample_by": ("text files", not suffixes.isdisjoint(TEXT_SUFFIXES)),
        "quoting": ("CSV and TSV files", not suffixes.isdisjoint((".csv", ".tsv"))),
        "label_column": ("tasks with labels", data.labelled),
        "dataset_options": ("functions", config is not None),
    }
    for name, (what, is_used) in uses.items():
        if not is_used and getattr(data, name) != getattr(Source, name):
            data.notes.append(f"{name} is only for {what}, so it is left out")
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], data)
    splits["train"] = _limit(splits["train"], data.max_train_samples)
    splits["validation"] = _limit(splits["validation"], data.max_eval_samples)
    return Corpus(data.dataset, {n: splits[n] for n in SPLITS if n in splits}, tuple(data.notes), tuple(data.classes))


def _load(data: Source) -> dict[str, Dataset]:
    name, path = data.dataset, Path(data.dataset)
    if name == "stdlib":
        if data.labelled:
            raise UserError("stdlib has no labels. Write --dataset recipes/stdlib_packages.py:documents.")
        return {"train": _load_stdlib(data)}
    if path.exists():
        return _load_path(path, data)
    is_path = path.suffix.lower() in SUFFIXES or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*")], n=1)
        found = f" Is it {path.parent / near[0]}?" if near else ""
        raise UserError(f"--dataset {name}: no such file or folder, and not a name on the Hub (user/name).{found}")
    return tables.load_named(data)


def _returned(config: Config, data: Source) -> dict[str, Dataset]:
    """What the function that ``--dataset`` names returns, without documents of only space; classes by their names.

    Raises UserError for an unknown split, and for a row without text or label.
    """
    found = call_function(data.dataset, "dataset", config)
    splits: dict[str, Any] = dict(found) if isinstance(found, dict) else {"train": found}
    name = f"dataset {data.dataset!r}"
    if not {"train"} <= splits.keys() <= {*SPLITS} or not all(isinstance(split, Dataset) for split in splits.values()):
        give = "return a 🤗 Dataset (Dataset.from_list(rows) makes one), or a dict of them: train, validation, test"
        names = f" of {', '.join(map(str, splits))}" if isinstance(found, dict) and splits else ""
        raise UserError(f"{name} returned {type(found).__name__}{names}: {give}.")
    loaded = {}
    for split in filter(splits.__contains__, SPLITS):  # train first, whose order of classes counts
        documents, what = splits[split], f"{name}: the {split} split"
        if documents.format["type"] == "custom":
            raise UserError(f"{what} has a transform, which is not applied: use map().")
        with tables.optional_test(split, data):
            known = documents.column_names
            if missing := [n for n in ("text", "label")[: 1 + data.labelled] if n not in known]:
                raise readers.UnusableError(f"{what} has no column {missing[0]!r}, only {known or 'no rows'}.")
            loaded[split] = tables.good_rows(documents.with_format(None), data, what)
    return loaded


def _load_path(path: Path, data: Source, only_validation: bool = False) -> dict[str, Dataset]:
    """The splits of a file or folder, or the documents to validate on: those of files named so, else all."""
    if is_saved(path):
        return tables.load_saved(path, data, only_validation)
    found = _find(path, data)
    if only_validation:
        found = {"validation": found.get("validation") or list(itertools.chain(*found.values()))}
    elif "train" not in found:
        raise UserError(f"{path}: by their names all files are for validation or test. Rename one (train.jsonl).")
    loaded = {}
    for split, files in found.items():
        data.files[split].update(files)
        name = str(path) if len(found) == 1 else f"the {split} split of {path}"
        with tables.optional_test(split, data):
            loaded[split] = readers.documents(files, data, name)
    return loaded


def _find(path: Path, data: Source) -> dict[str, list[str]]:
    """A single file, or a folder's files by the splits that their names tell; if none is train, others train."""
    if not path.is_dir():
        if path.suffix.lower() not in SUFFIXES:
            packed = " Decompress it first." if path.suffix.lower() in (".gz", ".zip", ".zst", ".bz2", ".xz") else ""
            raise UserError(f"{path}: cannot tell what it is.{packed} It must end in one of {' '.join(SUFFIXES)}.")
        return {"train": [str(path)]}
    files = _walk(path)
    kinds = RECORD_SUFFIXES if any(file.suffix.lower() in RECORD_SUFFIXES for file in files) else TEXT_SUFFIXES
    if not (chosen := [file for file in files if file.suffix.lower() in kinds]):
        raise UserError(f"{path}: no file in it ends in one of {' '.join(SUFFIXES)}.")
    named = {file: _split_of(file.relative_to(path).with_suffix("").parts) for file in chosen}
    if None in named.values() and kinds is TEXT_SUFFIXES:
        # The name of a text may be its title, and "test" a word of that: only whole names at the top count.
        named = {file: _split_of(file.relative_to(path).with_suffix("").parts[:1], whole=True) for file in chosen}
    if "train" in named.values():
        named = {file: split for file, split in named.items() if split}
    if ignored := [file.suffix.lower() in TEXT_SUFFIXES for file in files if file not in named]:
        is_mixed = kinds is RECORD_SUFFIXES and sum(ignored) > 1  # 1: a README
        texts = f" ({sum(ignored)} of them texts: give a folder of one kind)" if is_mixed else ""
        read = repr(next(iter(named)).name) if len(named) == 1 else len(named)
        data.notes.append(f"{path}: ignored {several(len(ignored), 'other file')}{texts}, read {read}")
    above = {file.relative_to(path).parts[0] for file, split in named.items() if split}
    if len(parts := sorted(name for name in above if not _split_of([name]))) > 1:  # as configurations of a Hub dataset
        data.notes.append(f"{path}: read {', '.join(parts[:9])} together; give one of these folders to read it alone")
    found: dict[str, list[str]] = {}
    for file, split in named.items():
        found.setdefault(split or "train", []).append(str(file))
    if None in named.values() and len(found) > 1:
        held = ", ".join(f"{Path(files[0]).name!r} for {split}" for split, files in found.items() if split != "train")
        data.notes.append(f"{path}: by their names, {held}; all others for training")
    return found


def _split_of(names: Sequence[str], whole: bool = False) -> str | None:
    """The split of the first folder or file name with such a word in it, the last where it has several."""
    for name in names:
        words = [word for word in re.findall(r"[^\W\d_]+", name.lower()) if word != "of"]  # as in train-00000-of-00001
        if (splits := [_SPLITS[word] for word in words if word in _SPLITS]) and not (whole and len(words) > 1):
            return splits[-1]
    return None


def _walk(folder: Path, left_out: Sequence[str] = ("__pycache__",)) -> list[Path]:
    """Visible files below ``folder``, in linked folders too, in sorted order; a link to nothing is found as a file."""
    found, seen, failed = list[Path](), set[str](), list[OSError]()
    for parent, names, files in os.walk(folder, onerror=failed.append, followlinks=True):
        is_new = (real := os.path.realpath(parent)) not in seen
        seen.add(real)
        names[:] = [name for name in names if is_new and not name.startswith(".") and name not in left_out]
        names.sort(key=lambda name: (os.path.islink(os.path.join(parent, name)), name))  # noqa: PTH114, PTH118
        found += [Path(parent, name) for name in files if is_new and not name.startswith(".")]
    if failed:
        raise UserError(f"{failed[0].filename}: {failed[0].strerror}.")
    found = [file for file in found if file.is_file() or not file.exists()]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _load_stdlib(data: Source) -> Dataset:
    """The source and texts of this Python's standard library, all for training."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = _walk(folder, ("site-packages", "dist-packages", "__pycache__"))
    texts = [file for file in found if file.suffix in (".py", ".txt", ".rst", ".html") and file.is_file()]
    columns = Features({name: Value("string") for name in ("text", "source")})
    documents = readers.cached(stdlib_rows, columns, files=tuple(map(str, texts)), folder=str(folder))
    if len(documents) < 2:
        raise UserError(f"stdlib: {folder} holds no source files. Use another Python, or --dataset FILE.")
    data.notes.append(f"stdlib: {len(documents):,} of {len(texts):,} files of Python {platform.python_version()}")
    return documents


def stdlib_rows(files: Sequence[str], folder: str) -> Iterator[dict[str, str]]:
    """Each file's text once, with its path."""
    seen: set[str] = set()
    for path in files:
        with suppress(UnicodeDecodeError, OSError):  # some tests of Python's own are made to be unreadable
            text = Path(path).read_text(encoding="utf-8")
            if text.strip() and "\0" not in text and text not in seen:
                seen.add(text)
                yield {"text": text, "source": Path(path).relative_to(folder).as_posix()}


def _hold_out(documents: Dataset, data: Source) -> tuple[Dataset, Dataset]:
    """Documents to train on, and documents held out for validation.

    A single document without a label is cut in two near its end. Every label keeps a document to train on, unless
    labels are numbers that mostly differ. Raises UserError where there is too little for two splits.
    """
    name, fraction = data.dataset, data.validation_fraction
    if len(documents) == 1 and not data.labelled:
        # Not in memory: the parts land in the cache.
        if len(parts := readers.cached(halves, documents.features, document=documents, fraction=fraction)) < 2:
            notes = "".join(f" {note}." for note in data.notes)
            raise UserError(f"{name}: one document, too short to split or JSON: add text or a validation split.{notes}")
        data.notes.append(f"{name} is one document; its last {fraction:.0%} is the validation split")
        return parts.select([0]), parts.select([1])
    order = np.random.default_rng(0).permutation(len(documents))
    count = min(max(round(len(documents) * fraction), 1), len(documents) - 1)
    if data.labelled:
        labels = list(map(str, documents["label"][:]))
        last = {labels[p]: p for p in order}
        if 2 * len(last) <= len(labels) or not all(re.fullmatch(r"[-+.,\deE]*\d", label) for label in last):
            order = np.array([p for p in order if last[labels[p]] != p], dtype=int)
    if not len(validation := np.sort(order[:count])):
        advice = "Add records, or --validation_dataset (a function: a validation split); or take another --label_column"
        raise UserError(f"{name}: each label occurs in one record only, and training needs all of these. {advice}.")
    data.notes.append(f"held out {len(validation):,} of {len(documents):,} documents for validation")
    return documents.select(np.delete(np.arange(len(documents)), validation)), documents.select(validation)


def halves(document: Sequence[Mapping[str, str]], fraction: float) -> Iterator[dict[str, str]]:
    """The only text of ``document`` in two, the second its last ``fraction``; without parts that are only space."""
    text = document[0]["text"]
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return  # of which no half is JSON
    place = round(len(text) * (1 - fraction))
    near = place - min(2000, len(text) - place)  # the held-out part at most doubles
    cut = text.rfind("\n", max(near, 0), place) + 1 or place  # after a line if one ends nearby
    yield from ({**document[0], "text": part} for part in (text[:cut], text[cut:]) if part.strip())


def _limit(documents: Dataset, count: int | None) -> Dataset:
    """``count`` documents, evenly spaced, as they may be sorted; None: all."""
    if count is None or count >= len(documents):
        return documents
    return documents.select([number * len(documents) // count for number in range(count)])
