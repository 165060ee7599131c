"""The order of a stream of documents."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.batching import Batches, without_targets
from train.figures import append, read_metrics, row_of, to_json
from train.records import MicroBatch

BETWEEN_POSITIONS = 1000  # examples of a stream, at least


@dataclass
class StreamBatches(Batches):
    """Batches of a stream: blocks of ``buffer_size`` examples, each shuffled by (seed, epoch, block).

    Every rank reads the whole stream and keeps its part. The order is as independent of the world size as that of other
    :class:`Batches`. The first rank keeps in ``positions`` where blocks begin: a resumed run starts to read there.
    """

    buffer_size: int
    positions: Path | None = None
    steps_per_epoch = None  # pyright: ignore - where a stream ends is not known

    def longest(self) -> MicroBatch:
        """The longest of the first examples, as many as three steps take: the rest of a stream is not known yet."""
        rows = list(itertools.islice(self._shuffled(0), 3 * self.arithmetic.global_batch_size))
        ids = self.loading.rounds.longest(np.array([row["length"] for row in rows]), self.arithmetic)
        return self._batch(rows, ids, 0)

    def steps(self, epoch: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of ``epoch`` from ``first_step``."""
        size = self.arithmetic.global_batch_size
        block, done = divmod(first_step * size, self.buffer_size)
        stream = itertools.islice(self._shuffled(epoch, block), done, None)
        while rows := list(itertools.islice(stream, size)):
            parts = self.loading.rounds.form(range(len(rows)), [row["length"] for row in rows], self.arithmetic)
            yield [self._batch(rows, part[self.rank], epoch) for part in parts]

    def _batch(self, rows: list[dict[str, Any]], ids: list[int], epoch: int) -> MicroBatch:
        batch = self.loading.collate([rows[i] for i in ids or [0]], (self.seed, epoch))
        return batch if ids else without_targets(batch)

    def _shuffled(self, epoch: int, first_block: int = 0) -> Iterator[dict[str, Any]]:
        for block, rows in self._blocks(first_block):
            for i in np.random.Generator(np.random.PCG64([self.seed, epoch, block])).permutation(len(rows)):
                yield rows[i]

    def _blocks(self, first: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The number and the examples of each block from ``first``, read from the nearest position that is known."""
        known = {row["step"]: row for row in read_metrics(self.positions)} if self.positions else {}
        numbered, rows = iter(()), []
        for start in (max((block for block in known if block <= first), default=0), 0):
            # A position may be one in other data, or in a stream that was read in another way.
            with suppress(LookupError, TypeError) if start else nullcontext():
                self.examples.load_state_dict(known[start]["state"] if start else None)
                numbered = ({**row, "id": i} for i, row in enumerate(self.examples, start * self.buffer_size))
                rows = list(itertools.islice(numbered, self.buffer_size))
                if not start or (rows and known[start]["begins"] == _digest(rows[0])):
                    break
        for block in itertools.count(start):
            if not rows:
                return
            state = self.examples.state_dict()
            if block >= first:
                yield block, rows
            rows = list(itertools.islice(numbered, self.buffer_size))
            is_due = (block + 1) % -(-BETWEEN_POSITIONS // self.buffer_size) == 0
            if self.positions and self.rank == 0 and is_due and rows and block + 1 not in known:
                append(self.positions, [row_of("block", block + 1, {"state": state, "begins": _digest(rows[0])})])


def _digest(row: Mapping[str, Any]) -> int:
    return zlib.crc32(to_json(row).encode())
