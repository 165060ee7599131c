"""Memory on CPUs and Apple's GPUs, which keep no peaks themselves: every operator of some steps is followed.

That makes a step slower by a fifth and a very short one by more, so only few are followed.
"""

import operator
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import mps

from train.extras.meter.memory import Inventory, LeakWatch, Measured, MemoryMeter, describe, peak_bytes
from train.extras.meter.tracker import HELD, StorageTracker, tag_gradients, tag_held
from train.extras.weightless import uncompiled
from train.records import MicroBatch

TRACK_EVERY_STEPS, TRACKED_SHARE = 50, 0.005
"""One of so many steps is followed, to see leaks, or fewer where that would cost a larger share of the time."""
Extent: TypeAlias = tuple[int, int, bool, bool, bool]
"""What the memory of a step grows with: B · S and B · S² (scores of attention, dense masks) of its largest micro-batch,
padding (a mask), several micro-batches (gradients are there when the second begins), state of the optimizer."""


class CpuMeter(MemoryMeter):
    """Follows the operators of some steps.

    A step's peak depends on its shapes, and does not shrink as they grow; a rehearsal has most targets. So the first
    step that no followed one covers is followed, and the others have the smallest peak that covers them. One step of
    :data:`TRACK_EVERY_STEPS` is followed, too, and some where memory seems to leak. Micro-batches do not count.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tracker = StorageTracker(self.device.type, num_classes=self.num_classes)
        self.leaks = LeakWatch(self._left_bytes, self._list_left, on_cuda=False)
        self._followed: dict[bool, dict[Extent, Measured]] = {True: {}, False: {}}
        """By whether it was a step (not an evaluation), and by its extent."""
        self._steps_since = 0
        self._seconds = {True: 0.0, False: 0.0}  # per position, of the last step that was followed, and that was not
        self._exit: ExitStack | None = None

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "peak_resident_bytes": peak_bytes(torch.device("cpu"))}

    def _begin(self, batches: Sequence[MicroBatch]) -> None:
        self._began, self._is_step = time.perf_counter(), self.phase == "forward"
        self._extent: Extent = (
            max((b * s for b, s in self.shapes), default=0),
            max((b * s * s for b, s in self.shapes), default=0),
            any(batch.num_tokens < b * s for batch, (b, s) in zip(batches, self.shapes, strict=True)),
            len(batches) > 1,
            len(self.optimizer.state) > 0,
        )
        self._steps_since += self._is_step
        followed, usual = self._seconds[True], self._seconds[False]
        every = max(TRACK_EVERY_STEPS, (followed / usual - 1) / TRACKED_SHARE if usual else 0)
        is_due = self._is_step and (self._steps_since >= every or self.leaks.suspects(self.shapes))
        if self._covering() and not is_due:
            return
        if self._is_step:
            self._steps_since = 0
        self._tracker.ignore(value for batch in batches for value in (*batch.inputs.values(), batch.labels))
        tag_held(self._tracker, self.network, self.optimizer)
        with ExitStack() as stack:
            for handle in tag_gradients(self._tracker, self.network.parameters()):
                stack.callback(handle.remove)
            self._tracker.mark(self.phase)
            self._tracker.reset_peak()
            stack.enter_context(uncompiled(self.network))
            stack.enter_context(self._tracker)
            self._exit = stack.pop_all()

    def _mark(self, phase: str) -> None:
        self._tracker.mark(phase)

    def _end(self, completed: bool) -> None:
        seconds = (time.perf_counter() - self._began) / max(1, sum(b * s for b, s in self.shapes))
        if self._is_step:
            self._seconds[self._exit is not None] = seconds
        if self._exit is None:
            self._add(min(self._covering(), key=lambda measured: measured.peak_allocated_bytes))
            return
        self._exit.close()
        self._exit = None
        peak = self._tracker.peak
        measured = Measured(peak.num_bytes, 0, self._tracker.peak_bytes_by_phase, peak.bytes_by_kind)
        self._add(measured)
        if not completed:  # the next step of this extent is followed again
            return
        followed = self._followed[self._is_step]
        followed[self._extent] = measured.merged(followed.get(self._extent, measured))
        if self._is_step:
            tag_held(self._tracker, self.network, self.optimizer)  # a first update makes the optimizer's state
            self.leaks.see(self.shapes)

    def _covering(self) -> list[Measured]:
        """Figures of followed steps, or evaluations, of which this one cannot need more."""
        return [m for extent, m in self._followed[self._is_step].items() if all(map(operator.ge, extent, self._extent))]

    def _left_bytes(self) -> int:
        return sum(size for kind, size in self._tracker.bytes_by_kind.items() if kind not in HELD)

    def _list_left(self) -> Inventory:
        left = [b for b in list(self._tracker.live.values()) if b.kind not in HELD]  # a copy: some may be freed
        return Counter((f"{describe(b.shape, b.dtype)} made in {b.phase}", b.num_bytes) for b in left)


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
