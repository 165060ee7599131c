"""The card itself: its memory, the host memory that is page-locked for it, and what happened on it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class RaceError(AssertionError):
    """The program has not waited for what it uses; a real card would compute with whatever is there."""


@dataclass(frozen=True)
class Refusal:
    """Allocations that fail although there is room."""

    phase: str  # forward, backward, clip or optimizer
    time: int = 1  # in which of the phases of this name, from 1
    first: int = 1  # of the phase's allocations, from 1
    count: int = 1


@dataclass(frozen=True)
class Settings:
    """A card, and what is to go wrong on it."""

    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 2**40
    pinned_bytes: int = 2**40
    refusals: tuple[Refusal, ...] = ()


@dataclass
class Seen:
    """What happened on the card."""

    operators: int = 0
    late_copies: int = 0  # begun when something waited for them
    on_other_streams: int = 0
    out_of_memory: Counter[str] = field(default_factory=Counter)  # by phase
    peak_bytes: int = 0
    pinned_bytes: int = 0
    peak_pinned_bytes: int = 0
    races: list[str] = field(default_factory=list)
    dtypes: Counter[str] = field(default_factory=Counter)  # of matrix products


class Block:
    """Memory on the card; it is free when no tensor has it any more."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = 0
        card.allocate(num_bytes)
        self.num_bytes = num_bytes
        self.written = self.used = card.clock  # when the computing stream last did
        self.copies: list[Any] = []  # those of it that may not be done yet

    def __del__(self) -> None:
        card.live_bytes -= self.num_bytes


class Card:
    """The one card of this process."""

    def __init__(self) -> None:
        self.settings, self.seen, self.phase = Settings(), Seen(), ""
        self.clock = self.live_bytes = self.live_peak = self.num_ooms = self.in_phase = 0
        self.times: Counter[str] = Counter()
        self.blocks: dict[int, weakref.ref[Block]] = {}  # by the storage in host memory
        self.random = torch.Generator()
        self.locked: dict[int, int] = {}  # bytes by address
        self.error = ""  # of a failed call, which the next kernel reports
        self.observers: list[Callable[..., None]] = []
        self.is_recording = False
        self.kernels: set[str] = set()  # of attention

    def begin(self, phase: str) -> None:
        """The step says where it is."""
        self.phase, self.in_phase = phase, 0
        self.times[phase] += 1

    def allocate(self, num_bytes: int) -> None:
        """Counts ``num_bytes``, or raises torch.OutOfMemoryError."""
        self.in_phase += 1
        refused = any(
            r.phase == self.phase and r.time == self.times[self.phase] and r.first <= self.in_phase < r.first + r.count
            for r in self.settings.refusals
        )
        total, free = self.settings.memory_bytes, self.settings.memory_bytes - self.live_bytes
        if refused or num_bytes > free:
            self.num_ooms += 1
            self.seen.out_of_memory[self.phase] += 1
            for observer in self.observers:
                observer(0, num_bytes, total, free)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. GPU 0 has a total capacity of "
                f"{total / 2**30:.2f} GiB of which {free / 2**20:.2f} MiB is free. Of the allocated memory "
                f"{self.live_bytes / 2**20:.2f} MiB is allocated by PyTorch."
            )
        self.live_bytes += num_bytes
        self.live_peak = max(self.live_peak, self.live_bytes)
        self.seen.peak_bytes = max(self.seen.peak_bytes, self.live_bytes)

    def lock(self, address: int, num_bytes: int) -> bool:
        """Page-locks host memory, if there may be more of it."""
        if self.seen.pinned_bytes + num_bytes > self.settings.pinned_bytes:
            self.error = "CUDA error: out of memory"
            return False
        self.locked[address] = num_bytes
        self.seen.pinned_bytes += num_bytes
        self.seen.peak_pinned_bytes = max(self.seen.peak_pinned_bytes, self.seen.pinned_bytes)
        return True

    def unlock(self, address: int) -> None:
        self.seen.pinned_bytes -= self.locked.pop(address, 0)

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether all of a tensor in host memory is page-locked."""
        if not tensor.numel():
            return True
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(address <= start and end <= address + size for address, size in self.locked.items())

    def race(self, what: str) -> None:
        self.seen.races.append(what)
        raise RaceError(what)


card = Card()
