"""Finds what grows from step to step. One detector for all devices, which differ in how they count and list tensors."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from train.figures import gib

GROWING_STEPS = 4
"""So many steps in a row, each of which ends with more memory than the one of equal shapes before it, are a leak."""

LEAK_BYTES, LEAK_SHARE = 2**20, 0.001
"""On CUDA a growth is reported only from so many bytes on, in all, and from this share of what is allocated."""

SURVIVOR_BYTES = 2**16
"""On a CPU, where each step that might leak is followed at some cost, growth matters from so many bytes per step on."""

_MAX_SIGNATURES = 64
_NAMED = 3
"""How many kinds of tensors a report names."""

Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""(B, S) of each micro-batch of a step."""

Inventory: TypeAlias = Counter[tuple[str, int]]
"""How many live storages there are of each description and size in bytes."""


def describe(shape: Sequence[int], dtype: torch.dtype | None) -> str:
    """As a report names a tensor: ``(4, 80, 64) float32``."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


class LeakWatch:
    """Compares the memory that steps end with: between steps of equal shapes it should not grow.

    A step with a shape (B, S) that was not there before is not judged, since something may be kept for each shape.

    Args:
        live_bytes: counts what is allocated when it is called, except what may change at the end of a step.
        list_live: lists it.
        on_cuda: listing is slow there, so it is done late, and :data:`LEAK_BYTES` decides which growth counts instead
            of :data:`SURVIVOR_BYTES`.
    """

    def __init__(self, live_bytes: Callable[[], int], list_live: Callable[[], Inventory], on_cuda: bool) -> None:
        self._live_bytes, self._list_live, self._on_cuda = live_bytes, list_live, on_cuda
        self.leak: str | None = None
        """What leaks, in words, once that is certain."""
        self._known: set[tuple[int, int]] = set()
        self._ends: dict[Shapes, int] = {}
        self._step = self._growing_steps = self._first_step = self._first_bytes = self._listed_bytes = 0
        self._listed = Inventory()

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
        least = max(LEAK_BYTES, LEAK_SHARE * now) if self._on_cuda else 0
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
        large = [name for name, size in sizes.most_common() if size >= 0.01 * grown]
        named = [f"{more[name]} × {name}" for name in large[:_NAMED]]
        if large[_NAMED:]:
            named.append(f"{sum(more[name] for name in large[_NAMED:])} others")
        if grown - sizes.total() >= 0.01 * grown:  # graphs hold tensors that Python does not know of
            named.append(f"{gib(grown - sizes.total())} held by autograd graphs")
        num_steps = self._step - self._first_step
        return (
            f"memory leak: {gib((now - self._first_bytes) / num_steps)} more after each step, seen over {num_steps} "
            f"steps. What grows: {'; '.join(named)}. Look for what is kept from step to step: a list of tensors, or a "
            "loss or output kept without .detach() or .item(), which keeps its whole graph."
        )
