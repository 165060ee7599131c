"""Memory on a CPU, which counts nothing itself: every operator of some steps is followed.

That makes a step slower by a fifth and a very short one by more, so only few are followed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch import nn

from train.extras.meter.gauge import Gauge, Measured
from train.extras.meter.leaks import Inventory, LeakWatch, Shapes, describe
from train.extras.meter.tracker import HELD, StorageTracker, tag_gradients, tag_held
from train.records import MicroBatch

TRACK_EVERY_STEPS, TRACKED_SHARE = 50, 0.005
"""One of so many steps is followed, to see leaks, or fewer where that would cost a larger share of the time."""


Extent: TypeAlias = tuple[bool, int, int, bool, bool, bool]
"""What the memory of a step grows with: whether it is a training step (not an evaluation); B · S and B · S² (scores of
attention, dense masks) of its largest micro-batch; whether there is padding, which needs a mask; whether gradients are
there when a later micro-batch begins; whether the optimizer has state, which the first update makes."""


class CpuGauge(Gauge):
    """Follows the operators of some steps.

    A step's peak depends on its shapes alone, and does not shrink as they grow. So the first step that no followed
    one covers is followed, and the largest peak of those is that of the run. (Only a chunked loss also looks at how
    many positions are targets.) In addition, one of :data:`TRACK_EVERY_STEPS` steps is followed, and the next few where
    memory seems to leak.

    Micro-batches were made before the step and do not count.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, num_classes: int | None) -> None:
        self._network, self._optimizer = network, optimizer
        self._tracker = StorageTracker("cpu", 1, num_classes)
        self._leaks = LeakWatch(on_cuda=False)
        self._followed: dict[Extent, Measured] = {}
        self._steps_since, self._track_every = 0, float(TRACK_EVERY_STEPS)
        self._began = self._usual_seconds = 0.0
        """The latter per position, of a step that is not followed."""
        self._exit: ExitStack | None = None
        self._is_step = False
        self._extent: Extent = (False, 0, 0, False, False, False)
        self._shapes: Shapes = ()

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        self._began = time.perf_counter()
        self._shapes = tuple(batch.shape for batch in batches)
        self._is_step = phase == "forward"
        self._extent = (
            self._is_step,
            max((b * s for b, s in self._shapes), default=0),
            max((b * s * s for b, s in self._shapes), default=0),
            any(batch.num_tokens < b * s for batch, (b, s) in zip(batches, self._shapes, strict=True)),
            len(batches) > 1,
            len(self._optimizer.state) > 0,
        )
        self._steps_since += self._is_step
        if not self._is_due():
            return
        if self._is_step:
            self._steps_since = 0
        self._tracker.ignore(value for batch in batches for value in (*batch.inputs.values(), batch.labels))
        tag_held(self._tracker, self._network, self._optimizer)
        with ExitStack() as stack:
            for handle in tag_gradients(self._tracker, self._network.parameters()):
                stack.callback(handle.remove)
            self._tracker.mark(phase)
            self._tracker.reset_peak()
            if any(getattr(module, "_compiled_call_impl", None) is not None for module in self._network.modules()):
                # torch would never compile a function that it first met while operators were followed
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._tracker)
            self._exit = stack.pop_all()

    def mark(self, phase: str) -> None:
        if self._exit is not None:
            self._tracker.mark(phase)

    def end(self, completed: bool) -> Measured:
        seconds = (time.perf_counter() - self._began) / max(1, sum(b * s for b, s in self._shapes))
        if self._exit is None:
            if self._is_step:
                self._usual_seconds = seconds
            return min(self._covering(), key=lambda measured: measured.peak_allocated_bytes)
        self._exit.close()
        self._exit = None
        peak = self._tracker.peak
        measured = Measured(peak.num_bytes, 0, self._tracker.peak_bytes_by_phase, peak.bytes_by_kind)
        if not completed:  # what it reached; the next step of this extent is followed again
            return measured
        before = self._followed.get(self._extent, measured)
        self._followed[self._extent] = max(before, measured, key=lambda each: each.peak_allocated_bytes)
        if not self._is_step:
            return measured
        if self._usual_seconds:
            extra = (seconds - self._usual_seconds) / self._usual_seconds
            self._track_every = max(TRACK_EVERY_STEPS, extra / TRACKED_SHARE)
        if self.leak is None:
            tag_held(self._tracker, self._network, self._optimizer)  # a first update makes the optimizer's state
            self.leak = self._leaks.see(self._shapes, self._left_bytes, self._list_left)
        return measured

    def between(self) -> Measured:
        return Measured()

    def _is_due(self) -> bool:
        """Whether the step that begins is to be followed."""
        suspicious = self.leak is None and self._leaks.suspects(self._shapes)
        if self._is_step and (suspicious or self._steps_since >= self._track_every):
            return True
        return not self._covering()

    def _covering(self) -> list[Measured]:
        """Figures of followed steps, or evaluations, of which this one cannot need more."""
        return [
            measured
            for (is_step, *sizes), measured in self._followed.items()
            if is_step == self._is_step and all(a >= b for a, b in zip(sizes, self._extent[1:], strict=True))
        ]

    def _left_bytes(self) -> int:
        """What followed steps made and left behind."""
        sizes = self._tracker.bytes_by_kind
        return sum(sizes.values()) - sum(sizes[kind] for kind in HELD)

    def _list_left(self) -> Inventory:
        blocks = list(self._tracker.live.values())  # a copy: what is freed meanwhile leaves it
        left = [block for block in blocks if block.kind not in HELD]
        return Counter((f"{describe(b.shape, b.dtype)} made in {b.phase}", b.num_bytes) for b in left)
