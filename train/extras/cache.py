"""Digests that identify data and tokenizers; data that is tokenised, packed or read once, kept on disk by them."""

import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, config
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from filelock import FileLock, Timeout
from tqdm import tqdm

from train.checkpoint import digest
from train.figures import FULL, write_whole
from train.records import UserError
from train.tasks import BYTES_AT_ONCE, Task

ROWS_AT_ONCE = 64  # that are read: documents can be megabytes each
LISTS = pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray
SECONDS_UNTIL_TOLD = 5.0  # that it waits for another process
logger = logging.getLogger(__name__)


def generated(generator: Callable[..., Iterator[Any]], features: Features, made_of: Any, **key: Any) -> Dataset:
    """The rows of ``generator(**key)``, :func:`stored`; equal ``made_of``, equal rows."""

    def write(writer: ArrowWriter) -> None:
        size = 0  # of rows that wait; each batch of rows costs whoever opens the file a kilobyte or more
        for row in tqdm(generator(**key), desc="Reading", unit=" rows"):
            writer.write(row)
            size += row.get("length", 0) + sum(len(v) for v in row.values() if hasattr(v, "__len__"))
            if size > BYTES_AT_ONCE:
                size = writer.write_examples_on_file() or 0

    return stored(write, features, [generator.__qualname__, made_of])


def stored(write: Callable[[ArrowWriter], object], features: Features, made_of: Any) -> Dataset:
    """The rows that ``write`` gives to a writer, :func:`intact` from the cache; equal ``made_of``, equal rows."""
    fingerprint = Hasher.hash(made_of)
    cache = Path(config.HF_DATASETS_CACHE, f"rows-{fingerprint}")
    path = f"{cache}.arrow"

    def make() -> Dataset:
        if not Path(path).exists():
            with ArrowWriter(features=features, path=path, writer_batch_size=1000) as writer:
                write(writer)
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
        return "".join(f"{digest(path)} {path.name}\n" for path in sorted(cache.parent.glob(f"{cache.name}*.arrow")))

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
        with suppress(OSError):  # files of another user may be unreadable
            if kept.read_text(encoding="utf-8", errors="replace") == digests():
                return make()  # a whole one, on a disk that can only be read
        remedy = "Set HF_DATASETS_CACHE (HF_HOME for all downloads) to a folder that can be written and has room"
        raise UserError(f"{cache.parent}: data cannot be cached there: {error.strerror}. {remedy}.") from None


def examples_digest(examples: Dataset) -> str:
    """Equal for equal examples in equal order, wherever the files lie that they were made from."""
    found = hashlib.sha256()
    for table in cast("Iterable[pa.Table]", examples.with_format("arrow").iter(ROWS_AT_ONCE)):
        for name in table.column_names:
            found.update(name.encode())
            array = pa.concat_arrays(table.column(name).chunks)
            while isinstance(array, LISTS):  # where each ends counts too: [[1], [2, 3]] is not [[1, 2], [3]]
                found.update(array.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                array = array.flatten()
            values = array.to_numpy(zero_copy_only=False)
            found.update(repr(values.tolist()).encode() if values.dtype == np.object_ else values.tobytes())
    return found.hexdigest()[:16]


def code_digest(*names: str) -> str:
    """Of the files of imported modules or, by path, of others; a name that stands for no file counts as it is."""
    files = [Path(getattr(sys.modules.get(name), "__file__", None) or name) for name in names]
    parts = [file.read_bytes() if file.is_file() else str(file).encode() for file in files]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@functools.cache  # asked before the first document is cut, which may import more
def task_digest(task: type[Task]) -> str:
    """Of the files of a task's classes, and of what else is loaded from their folders: they may have imported it."""
    classes = [cls.__module__ for cls in task.__mro__ if issubclass(cls, Task)]
    folders = {Path(str(sys.modules[name].__file__)).parent for name in classes}
    within = tuple(f"{folder / '_'}"[:-1] for folder in folders)
    loaded = [(name, str(getattr(module, "__dict__", {}).get("__file__"))) for name, module in [*sys.modules.items()]]
    near = {
        file
        for name, file in loaded  # by __dict__, since a lazy module loads when it is asked for an attribute
        if file.startswith(within) and not re.search("(site|dist)-packages", file) and Path(file).is_file()
        if not name.startswith(("__main__", "dataset_of")) and (name[:6] != "train." or Path(file).parent in folders)
    }
    return code_digest(*classes, *sorted(near))


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids: fast ones by their JSON, others by class, vocabulary, some ids."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Truncation and padding are those of its last call.
        text = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    else:
        text = f"{type(tokenizer)}{sorted(tokenizer.get_vocab().items())}"
        text += str(tokenizer(" ".join(sorted(tokenizer.get_vocab())[:9999]), verbose=False)["input_ids"])  # by merges
    text += str(getattr(tokenizer, "chat_template", None) or "")
    text += "split" if getattr(tokenizer, "split_special_tokens", False) else ""  # then a text's own marks are text
    return hashlib.sha256(f"{text}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest()[:16]
