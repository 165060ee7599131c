"""What 🤗 Datasets keeps on disk, checked before it is used: data that is tokenised, packed or read only once."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset, Features, config
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout
from tqdm import tqdm

from train.checkpoint import digest
from train.extras.digests import ROWS_AT_ONCE, task_digest, tokenizer_digest
from train.figures import FULL, write_whole
from train.records import UserError
from train.tasks import Task

SECONDS_UNTIL_TOLD = 5.0  # that it waits for another process
file_digest = partial(digest, kind=xxhash.xxh3_128)  # against accidents: several times faster than SHA-256
logger = logging.getLogger(__name__)


def generated(generator: Callable[..., Iterator[Any]], features: Features, made_of: Any, **key: Any) -> Dataset:
    """The rows of ``generator(**key)``, :func:`intact` from the cache; equal ``made_of``, equal rows."""
    fingerprint = Hasher.hash([generator.__qualname__, made_of])
    cache = Path(config.HF_DATASETS_CACHE, f"rows-{fingerprint}")
    path = f"{cache}.arrow"

    def make() -> Dataset:
        if not Path(path).exists():
            with ArrowWriter(features=features, path=path, writer_batch_size=ROWS_AT_ONCE) as writer:
                for row in tqdm(generator(**key), desc="Reading", unit=" rows"):
                    writer.write(row)
                writer.finalize()
        found = Dataset.from_file(path)
        found._fingerprint = fingerprint
        return found

    return intact(cache, make)


def examples_cache(documents: Dataset, task: Task, tokenizer: Any, label_names: Sequence[str]) -> tuple[str, Path]:
    """A fingerprint of the examples that ``task`` makes of ``documents``, and the prefix of their cache files."""
    settings = [(name, task.config.get(name)) for name in sorted(task.encode_settings)]
    source = task_digest(type(task)), type(task).__name__  # which a fork changes
    known = Hasher.hash([documents._fingerprint, source, settings, label_names, tokenizer_digest(tokenizer)])
    return known, Path(config.HF_DATASETS_CACHE, f"examples-{known}")


def intact(cache: Path, make: Callable[[], Dataset]) -> Dataset:
    """What ``make`` loads from Arrow files whose names begin with ``cache``, or makes where there are none.

    Files that differ from the digests kept of them, or that a killed run left without, are removed first. One process
    at a time. Raises UserError where the folder cannot be written.
    """

    def digests() -> str:
        files = sorted(cache.parent.glob(f"{cache.name}*.arrow"))
        return "".join(f"{file_digest(path)} {path.name}\n" for path in files)

    kept, lock = Path(f"{cache}.digests"), Path(f"{cache}.lock")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = FileLock(lock).acquire(timeout=SECONDS_UNTIL_TOLD)
        except Timeout:
            logger.warning("waiting for another process that makes the same data: %s", cache)
            held = FileLock(lock).acquire()
        with held:
            if (known := kept.read_text(encoding="utf-8", errors="replace") if kept.exists() else "") != digests():
                if known:
                    logger.warning("cached data was damaged and is made again: %s", cache)
                for path in set(cache.parent.glob(f"{cache.name}*")) - {lock}:
                    path.unlink()
            dataset = make()
            if not kept.exists():
                write_whole(kept, digests())
        return dataset
    except OSError as error:
        name = error.filename  # of Arrow's errors there is none
        is_own = isinstance(name, str) and (cache.is_relative_to(name) or Path(name).is_relative_to(cache.parent))
        if not is_own and (name is not None or error.errno not in FULL):  # a file that make() reads
            raise
        if kept.exists() and kept.read_text(encoding="utf-8", errors="replace") == digests():
            return make()  # a whole one, on a disk that can only be read
        remedy = "Set HF_DATASETS_CACHE (HF_HOME for all downloads) to a folder that can be written and has room"
        raise UserError(f"{cache.parent}: data cannot be cached there: {error.strerror}. {remedy}.") from None
