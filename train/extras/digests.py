"""Digests that identify data and tokenizers."""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa

from train.tasks import Task

ROWS_AT_ONCE = 64  # documents can be megabytes each: the library's default of 1,000 would need gigabytes
LISTS = pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray


def examples_digest(examples: datasets.Dataset) -> str:
    """Equal for equal examples in equal order, wherever the files lie that they were made from."""
    digest = hashlib.sha256()
    for table in cast("Iterable[pa.Table]", examples.with_format("arrow").iter(ROWS_AT_ONCE)):
        for name in table.column_names:
            digest.update(name.encode())
            array = pa.concat_arrays(table.column(name).chunks)
            while isinstance(array, LISTS):  # where each ends counts too: [[1], [2, 3]] is not [[1, 2], [3]]
                digest.update(array.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                array = array.flatten()
            values = array.to_numpy(zero_copy_only=False)
            digest.update(repr(values.tolist()).encode() if values.dtype == np.object_ else values.tobytes())
    return digest.hexdigest()[:16]


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
    held = {name: getattr(module, "__dict__", {}) for name, module in list(sys.modules.items())}  # loads no lazy one
    loaded = {name: Path(names.get("__file__") or "") for name, names in held.items()}
    near = [
        name
        for name, file in loaded.items()
        if not folders.isdisjoint(file.parents) and not re.search("(site|dist)-packages", str(file)) and file.is_file()
        if (not name.startswith("train.") or file.parent in folders) and not name.startswith(("__main__", "dataset_of"))
    ]
    return code_digest(*classes, *sorted({str(loaded[name]) for name in near}))


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids: fast ones by their JSON, others by class and vocabulary."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Truncation and padding are those of its last call.
        text = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    else:
        text = f"{type(tokenizer)}{sorted(tokenizer.get_vocab().items())}"
    text += str(getattr(tokenizer, "chat_template", None) or "")
    text += "split" * getattr(tokenizer, "split_special_tokens", False)  # then a text's own marks are text
    return hashlib.sha256(f"{text}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest()[:16]
