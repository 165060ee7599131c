"""Which examples each optimizer step sees, and how they form micro-batches: a pure function of (seed, epoch, step).

The world size, the number of workers and earlier stops change only where an example is computed, never in which step.
Within a step examples are grouped by length: the gradient is a sum, so this only affects padding.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from torch.utils.data import DataLoader, get_worker_info

from train.records import BatchArithmetic, MicroBatch, column

Collate = Callable[[Sequence[Mapping[str, Any]], Sequence[int]], MicroBatch]  # examples and a seed to a batch


class Rounds:
    """The order of an epoch, and how the examples of a step form micro-batches; an extra may have its own."""

    def order(self, lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """(examples,) a permutation that depends on nothing else."""
        return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths))

    def form(self, ids: Sequence[int], lengths: Sequence[int], arithmetic: BatchArithmetic) -> list[list[list[int]]]:
        """The examples of one step as ``[round][rank]`` lists of ids.

        Every rank gets the same number of rounds, each at most a micro-batch of similar lengths, the longest first.
        Sizes within a step differ by at most one. With fewer examples than ranks the last lists are empty.
        """
        size, ranks = arithmetic.micro_batch_size, arithmetic.dp_size
        longest_first = np.array(ids)[np.argsort(-np.array(lengths), kind="stable")]
        rounds = -(-len(ids) // (size * ranks))
        parts = [part.tolist() for part in np.array_split(longest_first, rounds * ranks)]
        return [parts[r * ranks : (r + 1) * ranks] for r in range(rounds)]


@dataclass(frozen=True)
class Loading:
    """How examples are fetched and become a batch."""

    collate: Collate
    num_workers: int = 0
    pin_memory: bool = False
    rounds: Rounds = field(default_factory=Rounds)
    deliver: Callable[..., Iterator[MicroBatch]] | None = None  # of an extra that looks after the processes


@dataclass
class Batches:
    """What each optimizer step of an epoch sees on this rank; examples can be fetched by number."""

    examples: Any
    loading: Loading
    arithmetic: BatchArithmetic
    rank: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.arithmetic.global_batch_size)

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step on this rank, from ``first_step`` of ``epoch``."""
        size, lengths = self.arithmetic.global_batch_size, column(self.examples, "length")
        order = self.loading.rounds.order(lengths, self.seed, epoch)

        def planned() -> Iterator[list[list[int]]]:
            for first in range(first_step * size, len(order), size):
                ids = order[first : first + size]
                rounds = self.loading.rounds.form(ids.tolist(), lengths[ids].tolist(), self.arithmetic)
                yield [parts[self.rank] or [~parts[0][0]] for parts in rounds]  # ~: another's, to stay in step

        steps, to_load = itertools.tee(planned())  # workers load ahead of the steps
        batches = load(self.examples, self.loading, itertools.chain.from_iterable(to_load), (self.seed, epoch))
        for id_lists in steps:
            yield list(itertools.islice(batches, len(id_lists)))


def load(examples: Dataset, loading: Loading, ids: Iterable[list[int]], seed: Sequence[int]) -> Iterator[MicroBatch]:
    """A batch for each list, by torch's DataLoader; ``[~id]`` is another rank's example, which counts for nothing."""
    fetch: Any = _Fetch(examples.with_format("arrow"), loading.collate, seed)  # numpy's takes four times as long
    options = {"num_workers": loading.num_workers, "pin_memory": loading.pin_memory}
    loader: Any = partial(DataLoader, fetch, batch_size=None, **options)
    return loading.deliver(loader, ids) if loading.deliver else iter(loader(sampler=ids))


@dataclass(frozen=True)
class _Fetch:
    """A dataset whose indices are lists of ids, and whose items are micro-batches."""

    table: Dataset
    collate: Collate
    seed: Sequence[int]

    def __getitem__(self, ids: list[int]) -> MicroBatch:
        """The examples of the Arrow-formatted table, lists as numpy arrays, collated."""
        ids, is_counted = (ids, True) if ids[0] >= 0 else ([~ids[0]], False)
        found: Any = self.table[ids]
        rows: list[dict[str, Any]] = [{"id": i} for i in ids]
        for name in found.column_names:
            for row, value in zip(rows, found.column(name), strict=True):
                is_list = pa.types.is_list(value.type) and not pa.types.is_nested(value.type.value_type)
                row[name] = value.values.to_numpy(zero_copy_only=False) if is_list else value.as_py()
        batch = self.collate(rows, self.seed)
        for value in (*batch.inputs.values(), batch.labels) if get_worker_info() else ():
            if hasattr(value, "share_memory_"):  # raises here where no room is left: torch's own thread would lose
                value.share_memory_()  # the batch, and the run would wait for it for ever
        return batch if is_counted else without_targets(batch)


def without_targets(batch: MicroBatch) -> MicroBatch:
    """``batch``, to be computed although it counts for nothing."""
    return replace(batch, num_targets=0, example_ids=(), num_tokens=0)
