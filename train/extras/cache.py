"""What 🤗 Datasets keeps on disk, checked before it is used: data that is tokenised, packed or read only once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import xxhash
from datasets import config
from filelock import FileLock

from train.figures import write_whole
from train.records import UserError

ROWS_IN_MEMORY = 64  # documents can be megabytes each: the library's default of 1,000 would need gigabytes
logger = logging.getLogger(__name__)


def generated(
    generator: Callable[..., Iterator[Any]], features: datasets.Features, fingerprint: str, **key: Any
) -> datasets.Dataset:
    """The rows of ``generator(**key)``, :func:`intact` from the cache; an equal ``fingerprint`` stands for equal rows.

    ``key`` holds no list: datasets would divide it among calls.
    """
    options: Any = {"features": features, "gen_kwargs": key, "writer_batch_size": ROWS_IN_MEMORY}
    make: Any = partial(datasets.Dataset.from_generator, generator, fingerprint=fingerprint, **options)
    cache = Path(config.HF_DATASETS_CACHE, "generator", f"default-fingerprint={fingerprint}")
    return intact(cache, ("/*/generator-*.arrow", "/*/dataset_info.json"), make)


def intact(cache: Path, patterns: Sequence[str], make: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    """What ``make`` loads from files whose names are ``cache`` and a pattern, or makes where they are not there.

    Files that differ from the digests kept of them, or that a killed run left without, are removed first. One process
    at a time. Raises UserError where the folder cannot be written.
    """

    def digests() -> str:
        files = sorted(path for pattern in patterns for path in cache.parent.glob(cache.name + pattern))
        return "".join(f"{file_digest(path)} {path.name}\n" for path in files)

    kept, lock = Path(f"{cache}.digests"), Path(f"{cache}.lock")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock).acquire()
    except OSError as error:
        remedy = "Name a folder that can be written with HF_DATASETS_CACHE, or with HF_HOME for all downloads"
        raise UserError(f"{cache.parent}: data cannot be cached there: {error.strerror}. {remedy}.") from None
    with held:
        known = kept.read_text(encoding="utf-8", errors="replace") if kept.exists() else ""
        if known != digests():
            if known:
                logger.warning("cached data was damaged and is made again: %s", cache)
            for path in set(cache.parent.glob(f"{cache.name}*")) - {lock}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dataset = make()
        if not kept.exists():
            write_whole(kept, digests())
    return dataset


def file_digest(path: Path) -> str:
    """Of a file's content, against accidents: at 0.06 s/GB, a tenth of the time that SHA-256 takes."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)
    return found.hexdigest()
