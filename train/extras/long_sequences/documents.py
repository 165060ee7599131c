"""Where documents begin and end in the rows of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """An input of the model next to ``input_ids`` (B, S); padding at a row's end counts as a document.

    The lengths are numbers, so that nobody has to wait for the device to know them.
    """

    lengths: tuple[tuple[int, ...], ...]  # tokens of each document, row by row; a row's add up to S
    boundaries: Tensor  # (documents + 1,) int32: where each begins in all rows laid end to end, and B · S

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]]) -> Documents:
        flat = [0, *(length for row in lengths for length in row)]
        return cls(tuple(map(tuple, lengths)), torch.tensor(flat).cumsum(0).to(torch.int32))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> Documents:
        return Documents.of(self.lengths[rows])

    @property
    def longest(self) -> int:
        return max(max(row) for row in self.lengths)

    def position_ids(self) -> Tensor:
        """(B, S) each token's place in its document, from 0."""
        return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.lengths])

    def to(self, device: torch.device, non_blocking: bool = True) -> Documents:
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Documents:
        return replace(self, boundaries=self.boundaries.pin_memory())
