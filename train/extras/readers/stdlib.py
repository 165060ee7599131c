"""Real text that every Python brings along: the source and texts of its standard library, no download needed."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train.extras.readers.readers import FileKey, file_key
from train.extras.readers.rows import cached
from train.extras.readers.splits import Splits, held_out
from train.records import UserError

if TYPE_CHECKING:
    from train.config import Data

SUFFIXES = (".py", ".txt", ".rst", ".html")
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}

PACKAGES = {
    "asyncio": ("asyncio/**/*.py", "test/test_asyncio/**/*.py"),
    "ctypes": ("ctypes/**/*.py", "test/test_ctypes/**/*.py"),
    "distutils": ("distutils/**/*.py",),
    "email": ("email/**/*.py", "test/test_email/**/*.py"),
    "http": (
        "http/**/*.py",
        "urllib/**/*.py",
        "wsgiref/**/*.py",
        "test/test_http*.py",
        "test/test_url*.py",
        "test/test_wsgiref.py",
        "test/test_robotparser.py",
    ),
    "idlelib": ("idlelib/**/*.py",),
    "importlib": ("importlib/**/*.py", "test/test_importlib/**/*.py"),
    "json": ("json/**/*.py", "test/test_json/**/*.py"),
    "lib2to3": ("lib2to3/**/*.py",),
    "multiprocessing": (
        "multiprocessing/**/*.py",
        "test/_test_multiprocessing.py",
        "test/test_multiprocessing*.py",
        "test/test_multiprocessing*/**/*.py",
    ),
    "tkinter": ("tkinter/**/*.py", "test/test_tkinter/**/*.py", "test/test_ttk/**/*.py"),
    "unittest": ("unittest/**/*.py", "test/test_unittest/**/*.py"),
    "xml": (
        "xml/**/*.py",
        "test/test_xml*.py",
        "test/test_sax.py",
        "test/test_minidom.py",
        "test/test_pulldom.py",
        "test/test_pyexpat.py",
    ),
}
"""Classes of stdlib_packages: a package's modules with the tests of it, wherever this or another Python keeps them.

``http`` counts its kin urllib and wsgiref in. ``encodings`` is left out: its files are the same table over and over.
"""

FEWEST_FILES = 20
"""A package with fewer on this Python is no class."""
SHORTEST_FILE = 200
"""Characters; an ``__init__`` of two lines says nothing about its package."""

VERSION = 1
"""Part of the cache key: raise it when what is made of a file changes."""

_HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+")


def load(data: Data) -> Splits:
    """All text files of the standard library; the caller holds some of them out.

    Raises:
        UserError: this Python comes without its library as files.
    """
    from datasets import Features, Value

    folder = Path(sysconfig.get_paths()["stdlib"])
    keys = tuple(file_key(folder / path, path) for path in _walk(folder))
    columns = Features({name: Value("string") for name in ("text", "source")})
    documents = cached(text_rows, columns, files=keys, version=VERSION)
    if len(documents) < 2:
        raise UserError(f"stdlib: {folder} holds no source files. Use another Python, or --dataset FILE.")
    size = sum(key[2] for key in keys) / 1e6
    return Splits(
        documents,
        notes=(
            f"stdlib: {len(documents):,} of {len(keys):,} files, {size:.1f} MB, of Python {platform.python_version()}",
        ),
    )


def _walk(folder: Path) -> list[str]:
    """Relative paths of the text files below ``folder``, but for installed packages, in sorted order."""
    found = []
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _NOT_OURS]
        inside = Path(parent).relative_to(folder)
        found += [(inside / file).as_posix() for file in files if file.endswith(SUFFIXES)]
    return sorted(path for path in found if (folder / path).is_file())


def text_rows(files: Sequence[FileKey], version: int) -> Iterator[dict[str, str]]:
    """Each file's text once, with its path; ``version`` only tells cache entries apart."""
    seen: set[str] = set()
    for shown, path, *_ in files:
        text = _read(path)
        if text is not None and text.strip() and text not in seen:
            seen.add(text)
            yield {"text": text, "source": shown}


def _read(path: str) -> str | None:
    """The file's text, or None: some tests of Python's own are meant not to be readable."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def load_packages(data: Data, labelled: bool) -> Splits:
    """Source files, each labelled with the package it belongs to; of each class the same share is held out.

    Raises:
        UserError: fewer than two packages with enough files.
    """
    from datasets import Features, Value

    folder = Path(sysconfig.get_paths()["stdlib"])
    files = tuple(
        (label, file_key(folder / path, path)) for label, globs in PACKAGES.items() for path in _glob(folder, globs)
    )
    columns = Features({name: Value("string") for name in ("text", "label", "source")})
    documents = cached(package_rows, columns, files=files, version=VERSION)
    counts = {label: documents["label"][:].count(label) for label in PACKAGES}
    kept = [label for label, count in counts.items() if count >= FEWEST_FILES]
    if len(kept) < 2:
        raise UserError(
            f"stdlib_packages: {folder} has not enough source files (some systems package Python without its tests). "
            "Use another Python, or --dataset FILE."
        )
    train, validation = _stratified(documents["label"][:], kept, data.validation_fraction)
    notes = [f"stdlib_packages: {len(train) + len(validation):,} files in {len(kept)} classes ("]
    notes[0] += ", ".join(f"{label} {counts[label]}" for label in kept) + ")"
    if left_out := [label for label in PACKAGES if label not in kept]:
        notes.append(f"stdlib_packages: too few files on this Python for {', '.join(left_out)}")
    if not labelled:
        documents = documents.remove_columns("label")
    return Splits(documents.select(train), documents.select(validation), notes=tuple(notes))


def _glob(folder: Path, globs: Sequence[str]) -> list[str]:
    return sorted({path.relative_to(folder).as_posix() for glob in globs for path in folder.glob(glob)})


def package_rows(files: Sequence[tuple[str, FileKey]], version: int) -> Iterator[dict[str, str]]:
    """Each file's text once, without what gives its place away; ``version`` only tells cache entries apart."""
    seen: set[str] = set()
    for label, (shown, path, *_) in files:
        text = without_place(_read(path) or "", shown)
        if len(text) >= SHORTEST_FILE and text not in seen:
            seen.add(text)
            yield {"text": text, "label": label, "source": shown}


def without_place(text: str, path: str) -> str:
    """The text without the comments at its head and without lines that hold the file's own path."""
    header = _HEADER.match(text)
    lines = text[header.end() if header else 0 :].splitlines(keepends=True)
    return "".join(line for line in lines if path not in line)


def _stratified(labels: Sequence[str], kept: Sequence[str], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions to train on and to validate on, each class in both."""
    train, validation = [], []
    for label in kept:
        members = np.flatnonzero(np.array(labels) == label)
        for side, chosen in zip((train, validation), held_out(len(members), fraction), strict=True):
            side.append(members[chosen])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))
