"""Source files of the standard library, each labelled with the package it belongs to. No download needed.

Use it with ``dataset: recipes/stdlib_packages.py:documents``. Of each class the same share (``validation_fraction``) is
held out for validation; there is no test split.
"""

from __future__ import annotations

import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train.records import UserError

if TYPE_CHECKING:
    import datasets

    from train.config import Config

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
"""The classes: a package's modules with the tests of it, wherever this or another Python keeps them.

``http`` includes its relatives urllib and wsgiref. ``encodings`` is left out: its files are one table over and over.
"""

FEWEST_FILES = 20
"""A package with fewer files on this Python does not become a class."""
SHORTEST_FILE = 200
"""Characters; an ``__init__`` of two lines says nothing about its package."""

_HEADER = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+")

logger = logging.getLogger(__name__)


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Training and validation split, with the columns ``text``, ``label`` (the package) and ``source`` (the path).

    Raises:
        UserError: fewer than two packages with enough files.
    """
    from datasets import Features, Value
    from datasets.fingerprint import Hasher

    from train.extras.cache import generated

    folder = Path(sysconfig.get_paths()["stdlib"])
    found = list(package_rows(folder))
    counts = Counter(row["label"] for row in found)
    kept = [label for label in PACKAGES if counts[label] >= FEWEST_FILES]
    if len(kept) < 2:
        raise UserError(
            f"stdlib_packages: {folder} has not enough source files (some systems package Python without its tests). "
            "Use another Python, or --dataset FILE."
        )
    if left_out := [label for label in PACKAGES if label not in kept]:
        logger.warning("stdlib_packages: too few files on this Python for %s", ", ".join(left_out))
    rows = tuple(row for row in found if row["label"] in kept)
    sizes = ", ".join(f"{label} {counts[label]}" for label in kept)
    logger.info("stdlib_packages: %d files in %d classes (%s)", len(rows), len(kept), sizes)
    columns = Features({name: Value("string") for name in ("text", "label", "source")})
    every = generated(_each, columns, Hasher.hash(rows), rows=rows)  # known by the texts themselves
    train, validation = _stratified(every["label"][:], kept, config.data.validation_fraction)
    return {"train": every.select(train), "validation": every.select(validation)}


def _each(rows: Sequence[dict[str, str]]) -> Iterator[dict[str, str]]:
    yield from rows


def package_rows(folder: Path) -> Iterator[dict[str, str]]:
    """Each text below ``folder`` that is long enough once, without what gives its place away."""
    seen: set[str] = set()
    for label, globs in PACKAGES.items():
        for path in sorted({path.relative_to(folder).as_posix() for glob in globs for path in folder.glob(glob)}):
            try:
                text = without_place((folder / path).read_text(encoding="utf-8"), path)
            except (UnicodeDecodeError, OSError):
                continue  # some tests of Python's own are made to be unreadable
            if len(text) >= SHORTEST_FILE and "\0" not in text and text not in seen:
                seen.add(text)
                yield {"text": text, "label": label, "source": path}


def without_place(text: str, path: str) -> str:
    """The text without the comments at its head and without lines that hold the file's own path."""
    header = _HEADER.match(text)
    lines = text[header.end() if header else 0 :].splitlines(keepends=True)
    return "".join(line for line in lines if path not in line)


def _stratified(labels: Sequence[str], kept: Sequence[str], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions to train on and to validate on, in ascending order, each class in both; always the same ones."""
    held_out = []
    for label in kept:
        members = np.flatnonzero(np.array(labels) == label)
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held_out.append(members[np.random.default_rng(0).permutation(len(members))[:count]])
    validation = np.sort(np.concatenate(held_out))
    return np.delete(np.arange(len(labels)), validation), validation
