"""Real text that every Python brings along: the source and texts of its standard library, no download needed."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.errors import UserError
from train.extras.readers.readers import FileKey, file_key
from train.extras.readers.rows import cached
from train.extras.readers.splits import Splits

SUFFIXES = (".py", ".txt", ".rst", ".html")
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}

VERSION = 1
"""Part of the cache key: raise it when other text is made of a file."""


def load() -> Splits:
    """All text files of the standard library as training documents; the caller holds some of them out.

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
    size, python = sum(key[2] for key in keys) / 1e6, platform.python_version()
    note = f"stdlib: {len(documents):,} of {len(keys):,} files, {size:.1f} MB, of Python {python}"
    return Splits(documents, notes=(note,))


def _walk(folder: Path) -> list[str]:
    """Relative paths of the text files below ``folder``, without installed packages, in sorted order."""
    found = []
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _NOT_OURS]
        inside = Path(parent).relative_to(folder)
        found += [(inside / file).as_posix() for file in files if file.endswith(SUFFIXES)]
    return sorted(path for path in found if (folder / path).is_file())


def text_rows(files: Sequence[FileKey], version: int) -> Iterator[dict[str, str]]:
    """Each file's text once, with its path; ``version`` only tells cache entries apart.

    Files that are not UTF-8 are left out: some tests of Python's own are made to be unreadable.
    """
    seen: set[str] = set()
    for shown, path, *_ in files:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and "\0" not in text and text not in seen:
            seen.add(text)
            yield {"text": text, "source": shown}
