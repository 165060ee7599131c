"""Which examples each optimizer step sees, and how they form micro-batches: a pure function of (seed, epoch, step).

The world size, the number of workers and earlier stops change only where an example is computed, never in which
step. Within one step examples are grouped by length: the gradient of a step is a sum, so that costs nothing and saves
padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from train.records import IGNORE, BatchArithmetic, MicroBatch, UsageError, column

if TYPE_CHECKING:
    import datasets

Collate = Callable[[Sequence[Mapping[str, Any]], Sequence[int]], MicroBatch]
"""Examples and a seed to a batch: a task's ``collate`` with its padding token filled in."""


@dataclass(frozen=True)
class Loading:
    """How examples are fetched and become a batch."""

    collate: Collate
    num_workers: int = 0
    pin_memory: bool = False


def batch_arithmetic(
    micro_batch_size: int,
    accumulation_steps: int | None,
    global_batch_size: int | None,
    world_size: int,
    max_tokens: int | None = None,
) -> BatchArithmetic:
    """What the user gave, completed.

    Args:
        max_tokens: padded tokens of a micro-batch, where these form it and not a number of examples.

    Raises:
        UsageError: the three numbers contradict each other.
    """
    per_round = micro_batch_size * world_size
    if global_batch_size is None:
        return BatchArithmetic(micro_batch_size, accumulation_steps or 1, world_size, max_tokens)
    if global_batch_size % per_round:
        below = global_batch_size // per_round * per_round
        near = f"{below} or {below + per_round}" if below else f"{per_round}"
        raise UsageError(
            f"global_batch_size: {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} × "
            f"{world_size} process(es): {near} would be, or another micro_batch_size."
        )
    steps = global_batch_size // per_round
    if accumulation_steps is not None and accumulation_steps != steps:
        raise UsageError(
            f"gradient_accumulation_steps: {accumulation_steps} contradicts global_batch_size {global_batch_size} = "
            f"micro_batch_size {micro_batch_size} × {steps} × {world_size} process(es). Give one of the two."
        )
    return BatchArithmetic(micro_batch_size, steps, world_size, max_tokens)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """(num_examples,) a permutation that depends on nothing else."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_examples)


def micro_batches(
    ids: Sequence[int], lengths: Sequence[int], micro_batch_size: int, world_size: int
) -> list[list[list[int]]]:
    """The examples of one step as ``[round][rank]`` lists of ids.

    Every rank gets the same number of rounds, each of at most ``micro_batch_size`` examples of similar length, the
    longest first. Sizes within a step differ by at most one; a list is empty only where there are fewer examples than
    ranks.
    """
    rounds = -(-len(ids) // (micro_batch_size * world_size))
    by_length = [ids[i] for i in np.argsort([-int(length) for length in lengths], kind="stable")]
    parts = np.array_split(np.asarray(by_length), rounds * world_size) if rounds else []
    return [[part.tolist() for part in parts[r * world_size : (r + 1) * world_size]] for r in range(rounds)]


def micro_batches_by_tokens(
    ids: Sequence[int], lengths: Sequence[int], max_tokens: int, world_size: int
) -> list[list[list[int]]]:
    """The examples of one step as ``[round][rank]`` lists of ids, each of at most ``max_tokens`` with its padding.

    The longest come first, and each list takes as many as fit. Every rank gets the same number of rounds: where the
    lists do not divide, those of most examples are halved.
    """
    order = np.argsort([-int(length) for length in lengths], kind="stable")
    parts: list[list[int]] = []
    width = 0
    for i in order:
        if not parts or (len(parts[-1]) + 1) * width > max_tokens:
            parts.append([])
            width = int(lengths[i])
        parts[-1].append(ids[i])
    while len(parts) % world_size:
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        part = parts[largest]
        if len(part) < 2:
            parts.append([])
        else:
            middle = len(part) // 2
            parts[largest : largest + 1] = [part[:middle], part[middle:]]
    return [parts[first : first + world_size] for first in range(0, len(parts), world_size)]


def _rounds(ids: Sequence[int], lengths: Sequence[int], arithmetic: BatchArithmetic) -> list[list[list[int]]]:
    """The examples of one step as ``[round][rank]`` lists of ids."""
    if arithmetic.max_tokens is not None:
        return micro_batches_by_tokens(ids, lengths, arithmetic.max_tokens, arithmetic.world_size)
    return micro_batches(ids, lengths, arithmetic.micro_batch_size, arithmetic.world_size)


class MapBatches:
    """Batches of examples that can be fetched by number."""

    def __init__(
        self, examples: datasets.Dataset, loading: Loading, arithmetic: BatchArithmetic, rank: int, seed: int
    ) -> None:
        self.arithmetic, self.rank, self.seed = arithmetic, rank, seed
        self.lengths = column(examples, "length")
        self.steps_per_epoch: int | None = -(-len(examples) // arithmetic.global_batch_size)
        self._examples, self._loading = examples, loading

    def longest(self) -> MicroBatch:
        """The longest examples of all, whatever step they belong to."""
        ids = longest_ids(self.lengths, self.arithmetic)
        return next(load(self._examples, self._loading, [ids], (self.seed, 0)))

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of ``epoch`` from ``first_step``."""
        size = self.arithmetic.global_batch_size
        order = epoch_order(len(self.lengths), self.seed, epoch)
        plan = []
        for first in range(first_step * size, len(order), size):
            ids = order[first : first + size]
            parts = _rounds(ids.tolist(), self.lengths[ids].tolist(), self.arithmetic)
            plan.append([part[self.rank] for part in parts])
        batches = load(self._examples, self._loading, [ids for step in plan for ids in step], (self.seed, epoch))
        for step in plan:
            yield list(itertools.islice(batches, len(step)))


def longest_ids(lengths: Sequence[int] | np.ndarray, arithmetic: BatchArithmetic) -> list[int]:
    """The micro-batch of the longest examples, or where tokens form it, that of most tokens with their padding.

    If all of these are of one length and others are not, the last is one of those others: then the batch has padding,
    and with it whatever mask the model makes for it.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    size = arithmetic.micro_batch_size
    if arithmetic.max_tokens is not None:
        widths = np.asarray(lengths)[order]
        most = arithmetic.global_batch_size - arithmetic.world_size + 1  # the other ranks have one each
        sizes = np.minimum(np.minimum(arithmetic.max_tokens // widths, most), np.arange(len(order), 0, -1))
        first = int(np.argmax(sizes * widths))
        order, size = order[first:], int(sizes[first])
    ids = order[:size].tolist()
    shorter = order[np.asarray(lengths)[order] < lengths[ids[0]]]
    if size > 1 and len(shorter) and lengths[ids[-1]] == lengths[ids[0]]:
        ids[-1] = int(shorter[0])
    return ids


def evaluation_batches(
    examples: datasets.Dataset, loading: Loading, arithmetic: BatchArithmetic, rank: int
) -> Iterator[MicroBatch]:
    """Every example exactly once over all ranks, the same number of batches on each, the longest first."""
    lengths = column(examples, "length")
    rounds = _rounds(range(len(lengths)), lengths.tolist(), arithmetic)
    return load(examples, loading, [parts[rank] for parts in rounds], (0, 0))


def load(
    examples: datasets.Dataset, loading: Loading, id_lists: list[list[int]], seed: Sequence[int]
) -> Iterator[MicroBatch]:
    """One batch a list, through torch's DataLoader; an empty list gives a batch without a target, so that this rank
    keeps step with the others."""
    arrow = examples.with_format("arrow")  # numpy's formatter takes four times as long
    loader = DataLoader(
        _IdLists(arrow, id_lists),  # pyright: ignore[reportArgumentType]
        batch_size=None,
        collate_fn=_Collated(loading.collate, seed),  # pyright: ignore[reportArgumentType]
        num_workers=loading.num_workers,
        pin_memory=loading.pin_memory,
    )
    return iter(loader)


class _IdLists:
    """A sequence of lists of examples, each with its ``id``."""

    def __init__(self, examples: datasets.Dataset, id_lists: list[list[int]]) -> None:
        self._examples, self._id_lists = examples, id_lists

    def __len__(self) -> int:
        return len(self._id_lists)

    def __getitem__(self, index: int) -> tuple[list[dict[str, Any]], bool]:
        ids = self._id_lists[index]
        return rows_of(self._examples[ids or [0]], ids or [0]), bool(ids)


def rows_of(table: pa.Table, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of an Arrow table, lists as numpy arrays, each with its ``id``."""
    rows: list[dict[str, Any]] = [{"id": i} for i in ids]
    for name in table.column_names:
        for row, value in zip(rows, table.column(name), strict=True):
            row[name] = value.values.to_numpy(zero_copy_only=False) if pa.types.is_list(value.type) else value.as_py()
    return rows


class _Collated:
    """A collate function for DataLoader, picklable for its workers."""

    def __init__(self, collate: Collate, seed: Sequence[int]) -> None:
        self._collate, self._seed = collate, seed

    def __call__(self, item: tuple[list[dict[str, Any]], bool]) -> MicroBatch:
        rows, counts = item
        batch = self._collate(rows, self._seed)
        return batch if counts else without_targets(batch)


def without_targets(batch: MicroBatch) -> MicroBatch:
    """The same shapes, but nothing to learn."""
    labels = torch.full_like(batch.labels, IGNORE)
    return replace(batch, labels=labels, num_targets=0, example_ids=(), num_tokens=0)


class StreamBatches:
    """Batches of a stream: blocks of ``buffer_size`` examples, each shuffled by (seed, epoch, block).

    Every rank reads the whole stream and keeps its part; a resumed run reads up to where it was. The order is as
    independent of the world size as that of :class:`MapBatches`.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self,
        examples: datasets.IterableDataset,
        loading: Loading,
        arithmetic: BatchArithmetic,
        rank: int,
        seed: int,
        buffer_size: int,
    ) -> None:
        self.arithmetic, self.rank, self.seed = arithmetic, rank, seed
        self._examples, self._collate, self._buffer_size = examples, loading.collate, buffer_size

    def longest(self) -> MicroBatch:
        """The longest of the first examples, as many as three steps take: the rest of a stream is not known yet."""
        rows = list(itertools.islice(self._shuffled(0), 3 * self.arithmetic.global_batch_size))
        ids = longest_ids([row["length"] for row in rows], self.arithmetic)
        return self._batch(rows, ids, 0)

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of ``epoch`` from ``first_step``."""
        size = self.arithmetic.global_batch_size
        stream = itertools.islice(self._shuffled(epoch), first_step * size, None)
        while rows := list(itertools.islice(stream, size)):
            parts = _rounds(range(len(rows)), [row["length"] for row in rows], self.arithmetic)
            yield [self._batch(rows, part[self.rank], epoch) for part in parts]

    def _batch(self, rows: list[dict[str, Any]], ids: list[int], epoch: int) -> MicroBatch:
        batch = self._collate([rows[i] for i in ids or [0]], (self.seed, epoch))
        return batch if ids else without_targets(batch)

    def _shuffled(self, epoch: int) -> Iterator[dict[str, Any]]:
        numbered = ({**row, "id": i} for i, row in enumerate(self._examples))
        for block in itertools.count():
            rows = list(itertools.islice(numbered, self._buffer_size))
            if not rows:
                return
            for i in np.random.Generator(np.random.PCG64([self.seed, epoch, block])).permutation(len(rows)):
                yield rows[i]
