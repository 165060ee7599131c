"""Digests that identify data and tokenizers."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa

ROWS_AT_ONCE = 64  # of long sequences
LIBRARY = sysconfig.get_path("stdlib")
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
    """Of the files of imported modules or, by path, of others; a name that stands for no file counts as it is.

    What else is loaded from their folders counts, too, as they may have imported it; Python and its packages do not.
    """
    own = [Path(getattr(sys.modules.get(name), "__file__", None) or name) for name in names]
    folders = {file.resolve().parent for file in own if file.is_file()}
    loaded = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    users = {n: Path(f).resolve() for n, f in loaded.items() if "-packages" not in f and not f.startswith(LIBRARY)}
    near = [
        file
        for name, file in users.items()
        if name != "__main__" and not folders.isdisjoint(file.parents) and file.is_file()
        if not name.startswith("train.") or file.parent in folders
    ]
    parts = sorted({file.read_bytes() if file.is_file() else str(file).encode() for file in (*own, *near)})
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


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
