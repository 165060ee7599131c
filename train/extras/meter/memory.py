"""Measures the memory of a run: the peak of each phase of a step, what it consists of, and whether something leaks.

A step leaks if memory grows between steps of equal shapes. Devices differ in how they count and list tensors.
"""

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from train.figures import gib
from train.records import MicroBatch

GROWING_STEPS = 4  # in a row, each ending with more than the one of equal shapes before it, are a leak
LEAK_BYTES, LEAK_SHARE = 2**20, 0.001  # on CUDA, in 512 steps (losses wait for the log), and of what is allocated
SURVIVOR_BYTES = 2**16  # per step, on a CPU, where following a step that might leak costs time
_MAX_SIGNATURES = 64
_NAMED = 3  # how many kinds of tensors a report names

Shapes: TypeAlias = tuple[tuple[int, int], ...]  # (B, S) of each micro-batch of a step
Inventory: TypeAlias = Counter[tuple[str, int]]  # number of live storages by description and bytes


def describe(shape: Sequence[int], dtype: torch.dtype | None) -> str:
    """As a report names a tensor: ``(4, 80, 64) float32``."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Measured:
    """Figures of one step, or the most of several; named as in a line of the log."""

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_bytes_by_phase: dict[str, int] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)  # at the peak
    num_alloc_retries: int = 0
    num_ooms: int = 0

    def merged(self, other: "Measured") -> "Measured":
        """The larger of each figure; counts are added."""
        higher = max(other, self, key=lambda measured: measured.peak_allocated_bytes)
        reserved = max(self.peak_reserved_bytes, other.peak_reserved_bytes)
        phases = dict(Counter(self.peak_bytes_by_phase) | Counter(other.peak_bytes_by_phase))
        counts = self.num_alloc_retries + other.num_alloc_retries, self.num_ooms + other.num_ooms
        return Measured(higher.peak_allocated_bytes, reserved, phases, higher.bytes_by_kind, *counts)

    def figures(self) -> dict[str, Any]:
        """For a line of the log; figures that are zero or empty are left out, except the peak."""
        return {name: value for name, value in vars(self).items() if value or name == "peak_allocated_bytes"}


class MemoryMeter:
    """Tells phases and kinds of memory apart, and finds leaks, of which ``say`` hears. Each device has a subclass.

    ``network`` is prepared but unwrapped; by the ``num_classes`` of logits a CPU tells them from activations.
    """

    leaks: "LeakWatch"

    def __init__(
        self, device: torch.device, network: nn.Module, optimizer: Any, num_classes: int | None, say: Callable[..., Any]
    ) -> None:
        self.device, self.network, self.optimizer, self.num_classes = device, network, optimizer, num_classes
        self.phase = ""  # the phase that is running, or failed
        self.shapes: Shapes = ()
        self._say, self._is_measuring = say, False
        self._step = self._interval = self._run = Measured()

    @property
    def last_shape(self) -> tuple[int, int] | None:
        """(B, S) of the largest micro-batch of the step or evaluation that is running, or failed."""
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
        self.phase, self.shapes = "", ()
        if self.leaks.leak is not None and known_leak is None:
            self._say(self.leaks.leak)

    def mark(self, phase: str) -> None:
        """A phase of the step begins; ignored outside a step."""
        if self._is_measuring:
            self.phase = phase
            self._mark(phase)

    def interval(self) -> dict[str, Any]:
        """Bytes since the last call; names as of :meth:`summary`."""
        self._between()
        interval, self._interval, self._run = self._interval, Measured(), self._run.merged(self._interval)
        return interval.figures()

    def summary(self) -> dict[str, Any]:
        """Of the whole run the figures of :class:`Measured`; peak_resident_bytes of the process (CPU); memory_leak."""
        self._between()
        figures = self._run.merged(self._interval).figures()
        return figures if self.leaks.leak is None else {**figures, "memory_leak": self.leaks.leak}

    def _add(self, measured: Measured) -> None:
        self._interval = self._interval.merged(measured)
        if self._is_measuring:
            self._step = self._step.merged(measured)

    # Of each device: a step or an evaluation begins; its next phase does; it ended, by an exception if not completed;
    # someone asks for figures between two of them. They add what they measured.
    def _begin(self, batches: Sequence[MicroBatch]) -> None: ...
    def _mark(self, phase: str) -> None: ...
    def _end(self, completed: bool) -> None: ...
    def _between(self) -> None: ...


def peak_bytes(device: torch.device) -> int:
    """The highest use so far: CUDA's own count, what Metal's driver holds, or the process's largest resident set."""
    if device.type in ("cuda", "mps"):
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        import psutil  # comes with accelerate

        memory: Any = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class LeakWatch:
    """Compares the memory that steps end with.

    A step with a shape (B, S) that was not there before is not judged, since something may be kept for each shape.
    ``live_bytes`` leaves out what may change at the end of a step. On CUDA ``list_live`` is slow, so it is called late.
    """

    def __init__(self, live_bytes: Callable[[], int], list_live: Callable[[], Inventory], on_cuda: bool) -> None:
        self._live_bytes, self._list_live, self._on_cuda = live_bytes, list_live, on_cuda
        self.leak: str | None = None  # what leaks, in words, once that is certain
        self._known: set[tuple[int, int]] = set()
        self._ends: dict[Shapes, int] = {}
        self._step = self._growing_steps = 0

    def suspects(self, shapes: Shapes) -> bool:
        """Whether memory has begun to grow, and a step of these shapes would tell more."""
        return self.leak is None and self._growing_steps > 0 and shapes in self._ends

    def see(self, shapes: Shapes) -> None:
        """A step over micro-batches of ``shapes`` has ended."""
        if self.leak is not None:
            return
        self._step += 1
        now = self._live_bytes()
        is_new, before = not self._known.issuperset(shapes), self._ends.pop(shapes, None)
        self._known.update(shapes)
        self._ends[shapes] = now
        if len(self._ends) > _MAX_SIGNATURES:
            del self._ends[next(iter(self._ends))]
        if before is None and not is_new:
            return  # nothing to compare with
        if before is None or now - before < (1 if self._on_cuda else SURVIVOR_BYTES):
            self._restart(now)
            return
        self._growing_steps += 1
        if self._on_cuda and self._growing_steps == GROWING_STEPS // 2:
            self._listed_bytes, self._listed = now, self._list_live()
        grown = now - self._first_bytes
        least = max(LEAK_BYTES * max(1, self._growing_steps / 512), LEAK_SHARE * now) if self._on_cuda else 0
        if self._growing_steps < GROWING_STEPS or grown < least:
            return
        gc.collect()  # a cycle of objects is not a leak
        after = self._live_bytes()
        if after - self._first_bytes >= grown / 2:
            self.leak = self._report(now, self._list_live() - self._listed)
        else:
            self._ends.clear()
            self._restart(after)

    def _restart(self, now: int) -> None:
        self._growing_steps, self._first_step, self._first_bytes = 0, self._step, now
        if not self._on_cuda:
            self._listed_bytes, self._listed = now, self._list_live()

    def _report(self, now: int, left: Inventory) -> str:
        more, sizes = Counter[str](), Counter[str]()
        for (name, size), number in left.items():
            more[name] += number
            sizes[name] += number * size
        grown = now - self._listed_bytes
        named = [f"{more[name]} × {name}" for name, size in sizes.most_common(_NAMED) if size >= 0.01 * grown]
        if grown - sizes.total() >= 0.01 * grown:  # graphs hold tensors that Python does not know of
            named.append(f"{gib(grown - sizes.total())} held by autograd graphs")
        num_steps = self._step - self._first_step
        return (
            f"memory leak: {gib((now - self._first_bytes) / num_steps)} more after each step, seen over {num_steps} "
            f"steps. What grows: {'; '.join(named)}. Look for what is kept from step to step: a list of tensors, or a "
            "loss or output kept without .detach() or .item(), which keeps its whole graph."
        )
