"""Memory on Apple's GPUs: operators are followed as on a CPU, and torch.mps says what is held between them."""

from __future__ import annotations

from dataclasses import replace

from torch import mps

from train.extras.meter.cpu import CpuMeter
from train.extras.meter.memory import Measured


class MpsMeter(CpuMeter):
    """A :class:`CpuMeter` that also asks torch.mps, which keeps no peaks, where a phase begins.

    No peak is below what was allocated then. Reserved is what Metal's driver holds, blocks that torch keeps included.
    """

    _allocated_bytes = _driver_bytes = 0  # the most since the step began

    def _mark(self, phase: str) -> None:
        super()._mark(phase)
        self._ask()

    def _end(self, completed: bool) -> None:
        self._ask()
        super()._end(completed)
        self._allocated_bytes = self._driver_bytes = 0
        # Lengths that vary leave blocks that fit no other step, and beyond this the machine begins to swap.
        if mps.driver_allocated_memory() > mps.recommended_max_memory():
            mps.empty_cache()

    def _ask(self) -> None:
        self._allocated_bytes = max(self._allocated_bytes, mps.current_allocated_memory())
        self._driver_bytes = max(self._driver_bytes, mps.driver_allocated_memory())

    def _add(self, measured: Measured) -> None:
        peak = max(measured.peak_allocated_bytes, self._allocated_bytes)
        super()._add(replace(measured, peak_allocated_bytes=peak, peak_reserved_bytes=self._driver_bytes))
