"""Several examples in one row: rows that are nearly full instead of batches that are partly padding.

A packed row is one example to everything that batches, orders, counts and resumes. It keeps its members apart, and
becomes one sequence only in a batch, which says where each begins (:class:`.attention.Documents`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.arrow_writer import ArrowWriter

from train.data import PreparedData
from train.extras.cache import examples_digest, stored
from train.extras.long_sequences.attention import Documents
from train.figures import several
from train.records import IGNORE, MicroBatch, Run, column
from train.tasks import BYTES_AT_ONCE, pad, pad_token_id

SUMMED = ("length", "num_bytes")  # columns of which a row has the sum of its members'; of the others it has a list


def packed(run: Run, data: PreparedData) -> PreparedData:
    """``data`` with all splits in rows of at most ``max_length`` tokens, and the ``collate`` for them."""
    max_length = run.config.data.max_length
    splits = {name: pack_split(split, max_length) for name, split in data.examples.items()}
    for name, rows in splits.items():
        empty = 1 - int(column(rows, "length").sum()) / (len(rows) * max_length)
        size = f"{several(len(rows), 'row')} of {max_length:,} tokens"
        made = f"{several(len(data.examples[name]), f'{name} example')} in {size}, {empty:.1%} empty"
        run.outputs.note(f"packing: {made}")
    collate = partial(collate_packed, pad_id=pad_token_id(data.tokenizer), collate=data.task.collate)
    return replace(data, examples=splits, loading=replace(data.loading, collate=collate))


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """The numbers of the examples in each row of ``room`` tokens: the longest first, each where it leaves the least.

    Best-fit decreasing needs at most 11/9 of the fewest rows possible (Johnson 1973). Lengths and order alone matter.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # the room that is left, and the number of the row, ascending
    for number in np.argsort(-np.asarray(lengths), kind="stable").tolist():  # type: ignore
        length = int(lengths[number])
        if (place := bisect_left(open_rows, (length, 0))) < len(open_rows):
            left, row = open_rows.pop(place)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        if left > length:
            insort(open_rows, (left - length, row))
    return rows


def members(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The examples that :func:`pack_split` made a row of, without the sums."""
    columns = {name: values for name, values in row.items() if name not in (*SUMMED, "id")}
    columns["id"] = columns.pop("member_ids")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def pack_split(examples: datasets.Dataset, room: int) -> datasets.Dataset:
    """``examples`` in rows of ``room`` tokens, each with the values of its ``member_ids`` in lists; kept on disk."""
    features = {n: kind if n in SUMMED else datasets.Sequence(kind) for n, kind in examples.features.items()}
    columns = datasets.Features(features | {"member_ids": datasets.Sequence(datasets.Value("int64"))})

    def write(writer: ArrowWriter) -> None:
        rows = best_fit(column(examples, "length"), room)
        part_of = np.cumsum([max(room, 32 * len(row)) for row in rows]) // BYTES_AT_ONCE  # short ones take more
        for part in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(part_of)) + 1):
            writer.write_table(joined(examples, [rows[number] for number in part]))

    return stored(write, columns, ["packed, 4", examples_digest(examples), room])  # raise it if rows change


def joined(examples: datasets.Dataset, rows: Sequence[Sequence[int]]) -> pa.Table:
    """A table of one row for each of ``rows``, which are the numbers of its members."""
    numbers, ends = np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int32)
    found: Any = examples.with_format("arrow")[numbers]
    columns = {name: found[name].combine_chunks() for name in found.column_names} | {"member_ids": pa.array(numbers)}
    for name, values in columns.items():
        columns[name] = np.add.reduceat(values, ends[:-1]) if name in SUMMED else pa.ListArray.from_arrays(ends, values)
    return pa.table(columns)


def collate_packed(
    rows: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int, collate: Callable[..., MicroBatch]
) -> MicroBatch:
    """Packed rows, each with its ``id``, as one batch of (B, S), with positions that start at 0 in each document.

    Every member becomes by ``collate`` what it would be alone, randomness included.
    """
    parts = [[collate([member], seed, pad_id=pad_id) for member in members(row)] for row in rows]
    lengths = [[part.inputs["input_ids"].shape[1] for part in row] for row in parts]
    width = max(sum(row) for row in lengths)

    def laid_out(rows: list[list[torch.Tensor]], value: int) -> torch.Tensor:
        return pad([torch.cat(row, dim=1).squeeze(0) for row in rows], value)

    documents = Documents.of([[*row, width - sum(row)] if sum(row) < width else row for row in lengths])
    inputs = {
        name: laid_out([[part.inputs[name] for part in row] for row in parts], pad_id if name == "input_ids" else 0)
        for name in parts[0][0].inputs
    }
    return MicroBatch(
        inputs={**inputs, "position_ids": documents.position_ids(), "documents": documents},
        labels=laid_out([[part.labels for part in row] for row in parts], IGNORE),
        num_targets=sum(part.num_targets for row in parts for part in row),
        example_ids=tuple(int(row["id"]) for row in rows),
        num_tokens=sum(map(sum, lengths)),
    )
