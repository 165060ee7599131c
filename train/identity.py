"""What a checkpoint and a run that resumes from it must have in common: the examples, the model, how they are met."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from train.config import LORA_FIELDS, Config, to_values
from train.errors import UserError
from train.outputs_log import write_whole

ROWS_AT_ONCE = 64
"""Rows of long sequences are large."""
STREAMED = 64
"""Examples of a stream that are compared: the rest of it is not known before it is trained on."""

_WHOLE = re.compile("[0-9a-f]{16}")


def run_identity(
    config: Config, tokenizer_digest: str, training_data: str, global_batch_size: int, precision: str
) -> dict[str, Any]:
    """The settings that a run may not change on the way, by the names that a person knows them by.

    Args:
        training_data: the digest of the examples (:func:`examples_digest`).
        precision: the mixed precision in use.
    """
    values = to_values(config)
    same = ("task", "mlm_probability", "model", "model_config", "dtype", "optimizer", "seed")
    scaled = ("rope_scaling", "sliding_window")
    if config.architecture.adapter != "none":
        same += ("adapter", *LORA_FIELDS)
    if config.data.streaming:
        same += ("shuffle_buffer_size",)
    return {
        **{name: values[name] for name in same},
        **{name: values[name] for name in scaled if values[name] not in (None, "none")},
        "tokenizer": tokenizer_digest,
        "training data": training_data,
        "packing": config.data.packing,
        "global_batch_size": global_batch_size,
        "mixed_precision": precision,
    }


def examples_digest(examples: datasets.Dataset | datasets.IterableDataset) -> str:
    """Equal for equal examples in equal order, wherever the files lie that they were made from.

    Of a stream it is the digest of the first ``STREAMED`` examples. For a data set on disk it is kept beside its cache,
    whose fingerprint it shares, so that further ranks and runs need not read all examples.
    """
    if isinstance(examples, datasets.IterableDataset):
        return "stream " + _digest(pa.Table.from_pylist([row]) for row in itertools.islice(examples, STREAMED))
    kept = _kept(examples)
    if kept is not None and kept.is_file() and _WHOLE.fullmatch(found := kept.read_text(encoding="utf-8")):
        return found
    tables: Any = examples.with_format("arrow").iter(ROWS_AT_ONCE)
    digest = _digest(tables)
    if kept is not None:
        with suppress(UserError):  # training does not need this cache
            write_whole(kept, digest)
    return digest


def _kept(examples: datasets.Dataset) -> Path | None:
    """Where the digest is kept; None for a data set in memory."""
    files = examples.cache_files
    return Path(files[0]["filename"]).parent / f"examples-{examples._fingerprint}.sha256" if files else None


def _digest(tables: Iterable[pa.Table]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        for name in table.column_names:
            digest.update(name.encode())
            _add(digest, pa.concat_arrays(table.column(name).chunks))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, array: pa.Array) -> None:
    """The values of ``array``, and of lists where each ends: [[1], [2, 3]] is not [[1, 2], [3]]."""
    while isinstance(array, pa.ListArray):
        digest.update(array.value_lengths().to_numpy().tobytes())
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    digest.update(repr(values.tolist()).encode() if values.dtype == np.object_ else values.tobytes())
