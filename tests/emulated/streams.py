"""Streams whose copies run as late as waits permit, so that a missing wait is seen."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from emulated.card import Block, card

CUDA = torch.device("cuda", 0)


@dataclass
class Copy:
    """A copy that is not done yet."""

    run: Callable[[], None]
    stream: Any = None
    read: weakref.ref[Block] | None = None
    write: weakref.ref[Block] | None = None
    is_done: bool = False

    def finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.run()


class Event:
    """A point in a stream's work."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.stream: Stream | None = None
        self.place = self.clock = 0

    def record(self, stream: Stream | None = None) -> None:
        at: Stream = stream or streams.current
        self.stream, self.place = at, at.queued
        self.clock = card.clock if at is streams.compute else at.knows

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.place)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or streams.current).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.finished >= self.place


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """Work in order. That of the computing stream is done at once, except copies from and to page-locked memory."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device = CUDA
        self.cuda_stream = self.stream_id = id(self)
        self.work: deque[Copy] = deque()
        self.queued = self.finished = 0
        self.knows = 0  # what of the computing stream it has waited for
        _streams.add(self)

    def add(self, copy: Copy) -> None:
        self.work.append(copy)
        self.queued += 1

    def run_until(self, place: int) -> None:
        while self.finished < place and self.work:
            self.finished += 1
            self.work.popleft().finish()

    def synchronize(self) -> None:
        self.run_until(self.queued)

    def query(self) -> bool:
        return not self.work

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if self is streams.compute:
            event.synchronize()  # computing is never late, so neither is what it waits for
        else:
            self.add(Copy(event.synchronize))
            self.knows = max(self.knows, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


streams = SimpleNamespace(compute=Stream())
streams.current = streams.compute


def synchronize(device: Any = None) -> None:
    """Waits for all streams."""
    for stream in list(_streams):
        stream.synchronize()


@contextmanager
def within(stream: Stream | None) -> Iterator[None]:
    """What ``torch.cuda.stream`` does."""
    before, streams.current = streams.current, stream or streams.current
    try:
        yield
    finally:
        streams.current = before
