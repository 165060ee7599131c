"""Micro-batches formed by tokens, padding included, instead of by a number of examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.batching import Rounds
from train.extras.longest import with_padding
from train.records import BatchArithmetic


@dataclass(frozen=True)
class TokenRounds(Rounds):
    """Micro-batches of at most ``max_tokens`` positions."""

    max_tokens: int

    def describe(self, arithmetic: BatchArithmetic) -> str:
        made = f"{arithmetic.global_batch_size} per step, in micro-batches of up to {self.max_tokens:,} tokens"
        return f"{made} on {arithmetic.dp_size} process{'es' if arithmetic.dp_size > 1 else ''}"

    def form(self, ids: Sequence[int], lengths: Sequence[int], arithmetic: BatchArithmetic) -> list[list[list[int]]]:
        """The examples of one step as ``[round][rank]`` lists of ids, each of at most ``max_tokens`` with its padding.

        The longest come first, as many as fit. Where lists do not divide by ranks, those of most examples are halved.
        """
        order, world_size = np.argsort([-int(length) for length in lengths], kind="stable"), arithmetic.dp_size
        parts: list[list[int]] = []
        width = 0
        for i in order:
            if not parts or (len(parts[-1]) + 1) * width > self.max_tokens:
                parts.append([])
                width = int(lengths[i])
            parts[-1].append(ids[i])
        while len(parts) % world_size:
            largest = max(range(len(parts)), key=lambda number: len(parts[number]))
            part, middle = parts[largest], (len(parts[largest]) + 1) // 2
            parts[largest : largest + 1] = [part[:middle], part[middle:]]  # of a single example the second is empty
        return [parts[first : first + world_size] for first in range(0, len(parts), world_size)]

    def longest(self, lengths: np.ndarray, arithmetic: BatchArithmetic) -> list[list[int]]:
        """The micro-batch of most positions, padding included, and that of most pairs of them if it is another one."""
        order = np.argsort(-lengths, kind="stable")
        widths = lengths[order]
        most = arithmetic.global_batch_size - arithmetic.dp_size + 1  # the other ranks have one each
        sizes = np.minimum(np.minimum(self.max_tokens // widths, most), np.arange(len(order), 0, -1))
        firsts = dict.fromkeys(int(np.argmax(sizes * widths**power)) for power in (1, 2))  # attention may keep pairs
        return [with_padding(order[i : i + int(sizes[i])].tolist(), lengths) for i in firsts]  # type: ignore
