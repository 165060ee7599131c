"""Measures the memory of a run: the peak of each phase of a step, what it consists of, and whether something leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from train.extras.meter.cpu_gauge import CpuGauge
from train.extras.meter.cuda_gauge import CudaGauge
from train.extras.meter.gauge import Gauge, Measured, peak_resident_bytes
from train.records import MicroBatch


class MemoryMeter:
    """Tells phases and kinds of memory apart, and finds leaks.

    On CUDA it resets the allocator's peaks, so ``torch.cuda.max_memory_allocated`` is no longer that of the run. On a
    CPU it follows the operators of some steps. Elsewhere it knows the process's resident set alone.

    Args:
        device: where the run trains.
        network: the model, as prepared but unwrapped.
        optimizer: over the parameters of ``network``.
        num_classes: C of the logits (..., C); None: logits count as activations on a CPU.
        say: told once, in a line, that memory leaks.

    Attributes:
        phase: the phase that is running, or was the last to run.
        last_shape: (B, S) of the largest micro-batch of the last step or evaluation.
        bytes_by_kind: at the peak of the last step or evaluation, also of one that failed.
    """

    def __init__(
        self,
        device: torch.device,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_classes: int | None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._device, self._say = device, say
        if device.type == "cuda":
            self._gauge = CudaGauge(device, network, optimizer)
        else:
            self._gauge = CpuGauge(network, optimizer, num_classes) if device.type == "cpu" else Gauge()
        self.phase = ""
        self.last_shape: tuple[int, int] | None = None
        self.bytes_by_kind: dict[str, int] = {}
        self._measuring = self._leak_told = False
        self._run = self._interval = Measured()

    def step(self, window: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Measures an optimizer step over ``window``."""
        return self._measured("forward", window)

    def evaluation(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Measures the evaluation of ``batch``."""
        return self._measured("evaluation", [batch])

    def mark(self, phase: str) -> None:
        """A phase of the step begins; ignored outside a step."""
        if self._measuring:
            self.phase = phase
            self._gauge.mark(phase)

    def interval(self) -> dict[str, Any]:
        """Bytes since the last call; names as of :meth:`summary`.

        On a CPU the peak of a step that was not followed is the smallest that was measured of a step at least as
        large: exact where a step of the same shapes was followed, never too small.
        """
        self._add(self._gauge.between())
        interval, self._interval = self._interval, Measured()
        return interval.figures()

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, those that do not apply left out.

        peak_allocated_bytes; peak_reserved_bytes (CUDA); peak_bytes_by_phase and bytes_by_kind (at the peak), mappings;
        num_alloc_retries and num_ooms (CUDA); peak_resident_bytes of the process (CPU); memory_leak, a text.
        """
        self._add(self._gauge.between())
        figures = self._run.figures()
        if self._device.type == "cpu":
            figures["peak_resident_bytes"] = peak_resident_bytes()
        return figures if self._gauge.leak is None else {**figures, "memory_leak": self._gauge.leak}

    @contextmanager
    def _measured(self, phase: str, batches: Sequence[MicroBatch]) -> Iterator[None]:
        self.last_shape = max((batch.shape for batch in batches), key=lambda shape: shape[0] * shape[1], default=None)
        self.phase = phase
        self._gauge.begin(phase, batches)
        self._measuring, completed = True, False
        try:
            yield
            completed = True
        finally:
            self._measuring = False
            measured = self._gauge.end(completed)
            self.bytes_by_kind = measured.bytes_by_kind or self.bytes_by_kind
            self._add(measured)
        if self._gauge.leak is not None and not self._leak_told:
            self._leak_told = True
            self._say(self._gauge.leak)

    def _add(self, measured: Measured) -> None:
        self._interval, self._run = self._interval.merged(measured), self._run.merged(measured)
