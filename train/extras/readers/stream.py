"""The order of a stream of documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.batching import Batches, without_targets
from train.records import MicroBatch


@dataclass
class StreamBatches(Batches):
    """Batches of a stream: blocks of ``buffer_size`` examples, each shuffled by (seed, epoch, block).

    Every rank reads the whole stream and keeps its part; a resumed run reads up to where it was. The order is as
    independent of the world size as that of other :class:`Batches`.
    """

    buffer_size: int
    steps_per_epoch = None  # pyright: ignore - where a stream ends is not known

    def longest(self) -> MicroBatch:
        """The longest of the first examples, as many as three steps take: the rest of a stream is not known yet."""
        rows = list(itertools.islice(self._shuffled(0), 3 * self.arithmetic.global_batch_size))
        ids = self.loading.rounds.longest(np.array([row["length"] for row in rows]), self.arithmetic)
        return self._batch(rows, ids, 0)

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of ``epoch`` from ``first_step``."""
        size = self.arithmetic.global_batch_size
        stream = itertools.islice(self._shuffled(epoch), first_step * size, None)
        while rows := list(itertools.islice(stream, size)):
            parts = self.loading.rounds.form(range(len(rows)), [row["length"] for row in rows], self.arithmetic)
            yield [self._batch(rows, part[self.rank], epoch) for part in parts]

    def _batch(self, rows: list[dict[str, Any]], ids: list[int], epoch: int) -> MicroBatch:
        batch = self.loading.collate([rows[i] for i in ids or [0]], (self.seed, epoch))
        return batch if ids else without_targets(batch)

    def _shuffled(self, epoch: int) -> Iterator[dict[str, Any]]:
        numbered = ({**row, "id": i} for i, row in enumerate(self.examples))
        for block in itertools.count():
            rows = list(itertools.islice(numbered, self.buffer_size))
            if not rows:
                return
            for i in np.random.Generator(np.random.PCG64([self.seed, epoch, block])).permutation(len(rows)):
                yield rows[i]
