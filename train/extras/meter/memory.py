"""Measures the memory of a run: the peak of each phase of a step, what it consists of, and whether something leaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from train.extras.meter.leaks import LeakWatch, Shapes
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


class MemoryMeter:
    """Tells phases and kinds of memory apart, and finds leaks. Each type of device has a subclass.

    Args:
        device: where the run trains.
        network: the model, as prepared but unwrapped.
        optimizer: over the parameters of ``network``.
        num_classes: C of the logits (..., C); None: logits count as activations on a CPU.
        say: told once, in a line, that memory leaks.
    """

    leaks: LeakWatch

    def __init__(
        self,
        device: torch.device,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_classes: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.device, self.network, self.optimizer, self.num_classes = device, network, optimizer, num_classes
        self.phase = ""
        """The phase that is running, or was the last to run."""
        self.shapes: Shapes = ()
        self._say, self._is_measuring = say, False
        self._step = self._interval = self._run = Measured()

    @property
    def last_shape(self) -> tuple[int, int] | None:
        """(B, S) of the largest micro-batch of the last step or evaluation."""
        return max(self.shapes, key=math.prod, default=None)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """At the peak of the last step or evaluation, also of one that failed."""
        return self._step.bytes_by_kind

    @contextmanager
    def measure(self, phase: str, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Measures an optimizer step, which begins with the phase ``forward``, or the ``evaluation`` of one batch."""
        self.phase, self.shapes = phase, tuple(batch.shape for batch in batches)
        self._step, known_leak = Measured(), self.leaks.leak
        self._begin(batches)
        self._is_measuring, completed = True, False
        try:
            yield
            completed = True
        finally:
            self._end(completed)
            self._is_measuring = False
        if self.leaks.leak is not None and known_leak is None:
            self._say(self.leaks.leak)

    def mark(self, phase: str) -> None:
        """A phase of the step begins; ignored outside a step."""
        if self._is_measuring:
            self.phase = phase
            self._mark(phase)

    def interval(self) -> dict[str, Any]:
        """Bytes since the last call; names as of :meth:`summary`.

        On a CPU the peak of a step that was not followed is the smallest that was measured of a step at least as
        large: exact where a step of the same shapes was followed, never too small.
        """
        self._between()
        interval, self._interval = self._interval, Measured()
        return interval.figures()

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, those that do not apply left out.

        peak_allocated_bytes; peak_reserved_bytes (CUDA); peak_bytes_by_phase and bytes_by_kind (at the peak), mappings;
        num_alloc_retries and num_ooms (CUDA); peak_resident_bytes of the process (CPU); memory_leak, a text.
        """
        self._between()
        figures = self._run.figures()
        return figures if self.leaks.leak is None else {**figures, "memory_leak": self.leaks.leak}

    def _add(self, measured: Measured) -> None:
        self._interval, self._run = self._interval.merged(measured), self._run.merged(measured)
        if self._is_measuring:
            self._step = self._step.merged(measured)

    def _begin(self, batches: Sequence[MicroBatch]) -> None:
        """A step or an evaluation begins."""

    def _mark(self, phase: str) -> None:
        """Its next phase begins."""

    def _end(self, completed: bool) -> None:
        """It ended, by an exception if not ``completed``."""

    def _between(self) -> None:
        """Someone asks for figures between two steps."""
