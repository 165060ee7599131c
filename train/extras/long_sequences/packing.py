"""Several examples in one row: rows that are nearly full instead of batches that are partly padding.

A packed row is one example to everything that batches, orders, counts and resumes. It keeps its members apart, and
becomes one sequence only in a batch, which says where each begins (:class:`.documents.Documents`).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F

from train.data import PreparedData
from train.extras.long_sequences.documents import Documents
from train.records import IGNORE, MicroBatch, UserError, column

SUMMED = ("length", "num_bytes")  # columns of which a row has the sum of its members'; of the others it has a list
LAYOUT = "1"  # change it when rows look different, so that rows cached before are not reused


def packed(data: PreparedData, max_length: int) -> PreparedData:
    """``data`` with all splits in rows of at most ``max_length`` tokens, and the ``collate`` for them."""
    splits: dict[str, Any] = {}
    notes = list(data.examples.notes)
    for name in ("train", "validation", "test"):
        split = getattr(data.examples, name)
        if isinstance(split, datasets.Dataset):
            rows = splits[name] = pack_split(split, max_length)
            empty = 1 - int(column(rows, "length").sum()) / (len(rows) * max_length)
            size = f"{len(rows):,} rows of {max_length:,} tokens"
            notes.append(f"packing: {len(split):,} {name} examples in {size}, {empty:.1%} empty")
        elif split is not None:
            splits[name] = pack_stream(split, max_length)
            notes.append(f"packing: the {name} stream in rows of up to {max_length:,} tokens, in its order")
    pad_id = data.loading.collate.keywords["pad_id"]  # pyright: ignore[reportFunctionMemberAccess]
    collate = partial(collate_packed, pad_id=pad_id, collate=data.task.collate)
    examples = replace(data.examples, **splits, notes=tuple(notes))
    return replace(data, examples=examples, loading=replace(data.loading, collate=collate))


# Which examples share a row


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """The numbers of the examples in each row of ``room`` tokens: the longest first, each where it leaves the least.

    Best-fit decreasing needs at most 11/9 of the fewest rows possible (Johnson 1973), and depends on nothing but the
    lengths and their order.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # by the room that is left
    rooms: list[int] = []  # those that there are, ascending
    for number in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), room - length
            rows.append([])
        else:
            row, left = open_rows[rooms[place]].pop(), rooms[place] - length
            if not open_rows[rooms[place]]:
                del open_rows[rooms.pop(place)]
        rows[row].append(number)
        if left > 0:
            if left not in open_rows:
                insort(rooms, left)
                open_rows[left] = []
            open_rows[left].append(row)
    return rows


def in_order(examples: Iterable[Mapping[str, Any]], room: int) -> Iterator[list[Mapping[str, Any]]]:
    """The examples of each row, taken as they come: a row ends where the next example does not fit."""
    row: list[Mapping[str, Any]] = []
    left = room
    for example in examples:
        if row and example["length"] > left:
            yield row
            row, left = [], room
        row.append(example)
        left -= example["length"]
    if row:
        yield row


def joined(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of ``members``, each with its ``id`` in what was packed."""
    names = {"member_ids" if name == "id" else name: name for name in members[0]}
    return {
        new: sum(m[old] for m in members) if old in SUMMED else [m[old] for m in members] for new, old in names.items()
    }


def members(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What :func:`joined` made a row of, without the sums."""
    names = [name for name in row if name not in (*SUMMED, "id")]
    return [
        {"id" if name == "member_ids" else name: row[name][number] for name in names}
        for number in range(len(row["member_ids"]))
    ]


def pack_split(examples: datasets.Dataset, room: int) -> datasets.Dataset:
    """Rows of at most ``room`` tokens by :func:`best_fit`."""
    fingerprint = hashlib.sha256(f"{examples._fingerprint} {room} {LAYOUT}".encode()).hexdigest()[:32]
    features = {
        name: feature if name in SUMMED else datasets.Sequence(feature) for name, feature in examples.features.items()
    }
    packed = datasets.Dataset.from_generator(
        _rows,
        features=datasets.Features(features | {"member_ids": datasets.Sequence(datasets.Value("int64"))}),
        gen_kwargs={"examples": examples, "room": room},
        fingerprint=fingerprint,
    )
    assert isinstance(packed, datasets.Dataset)
    return packed


def _rows(examples: datasets.Dataset, room: int) -> Iterator[dict[str, Any]]:
    numpy = examples.with_format("numpy")
    for numbers in best_fit(column(examples, "length"), room):
        found = numpy[numbers]
        yield joined([{**{name: found[name][i] for name in found}, "id": n} for i, n in enumerate(numbers)])


def pack_stream(examples: datasets.IterableDataset, room: int) -> datasets.IterableDataset:
    """Rows of at most ``room`` tokens :func:`in_order`."""
    return datasets.IterableDataset.from_generator(_stream_of_rows, gen_kwargs={"examples": examples, "room": room})


def _stream_of_rows(examples: datasets.IterableDataset, room: int) -> Iterator[dict[str, Any]]:
    numbered = ({**example, "id": number} for number, example in enumerate(examples))
    yield from map(joined, in_order(numbered, room))


# From rows to a batch


def collate_packed(
    rows: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int, collate: Callable[..., MicroBatch]
) -> MicroBatch:
    """Packed rows, each with its ``id``, as one batch of (B, S), with positions that start at 0 in each document.

    Every member becomes by ``collate`` what it would be alone, randomness included.

    Raises:
        UserError: the task's labels are of whole examples, so that they cannot share a row.
    """
    parts = [[collate([member], seed, pad_id=pad_id) for member in members(row)] for row in rows]
    lengths = [[part.inputs["input_ids"].shape[1] for part in row] for row in parts]
    if any(part.labels.shape != part.inputs["input_ids"].shape for row in parts for part in row):
        raise UserError("packing: this task has one label for a whole example: leave packing out.")
    width = max(map(sum, lengths))

    def laid_out(row: list[torch.Tensor], value: int) -> torch.Tensor:
        whole = torch.cat(row, dim=1)
        return F.pad(whole, (0, width - whole.shape[1]), value=value)

    documents = Documents.of([[*row, width - sum(row)] if sum(row) < width else row for row in lengths])
    inputs = {}
    for name in parts[0][0].inputs:
        value = pad_id if name == "input_ids" else 0
        inputs[name] = torch.cat([laid_out([part.inputs[name] for part in row], value) for row in parts])
    return MicroBatch(
        inputs={**inputs, "position_ids": documents.position_ids(), "documents": documents},
        labels=torch.cat([laid_out([part.labels for part in row], IGNORE) for row in parts]),
        num_targets=sum(part.num_targets for row in parts for part in row),
        example_ids=tuple(int(row["id"]) for row in rows),
        num_tokens=sum(map(sum, lengths)),
    )
