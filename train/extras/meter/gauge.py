"""How one type of device is measured: the figures of a step, and a gauge for devices that count nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from train.launch import peak_bytes
from train.records import MicroBatch


@dataclass(frozen=True)
class Measured:
    """Figures of one step, or the most of several; named as in a line of the log."""

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_bytes_by_phase: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    """At the peak."""
    num_alloc_retries: int = 0
    num_ooms: int = 0

    def merged(self, other: Measured) -> Measured:
        """The larger of each figure; counts are added."""
        phases = {**self.peak_bytes_by_phase, **other.peak_bytes_by_phase}
        return Measured(
            max(self.peak_allocated_bytes, other.peak_allocated_bytes),
            max(self.peak_reserved_bytes, other.peak_reserved_bytes),
            {phase: max(size, self.peak_bytes_by_phase.get(phase, 0)) for phase, size in phases.items()},
            (other if other.peak_allocated_bytes >= self.peak_allocated_bytes else self).bytes_by_kind,
            self.num_alloc_retries + other.num_alloc_retries,
            self.num_ooms + other.num_ooms,
        )

    def figures(self) -> dict[str, Any]:
        """For a line of the log; figures that are zero or empty are left out, except the peak."""
        return {name: value for name, value in vars(self).items() if value or name == "peak_allocated_bytes"}


class Gauge:
    """Measures steps; ``begin`` and ``end`` alternate, ``mark`` comes between them.

    This one knows the process's largest resident set alone. Gauges of other devices override what they can do better.
    """

    leak: str | None = None
    """What leaks, in words, once it is known."""

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        """A step begins with the phase ``forward``, or the ``evaluation`` of one batch."""

    def mark(self, phase: str) -> None:
        """The step's next phase begins."""

    def end(self, completed: bool) -> Measured:
        """The figures of what just ended, by an exception if not ``completed``."""
        return self.between()

    def between(self) -> Measured:
        """The figures since the last end."""
        return Measured(peak_resident_bytes())


def peak_resident_bytes() -> int:
    """The most that this process had in memory, libraries and files included."""
    return peak_bytes(torch.device("cpu"))
