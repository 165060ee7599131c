"""Signals that ask a run to stop, so that it ends with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from train.records import StopAtOnce, StopRequest


class Signals:
    """Tells ``stop`` of SIGTERM, SIGINT and SIGUSR1. A second SIGINT ends the process at once."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._is_at_once, self._process = stop, False, os.getpid()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker: the run tells it what to do
            if self._is_at_once and number == signal.SIGTERM:
                os._exit(0)
            return
        if self._stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop.received = signal.Signals(number).name
        if self._is_at_once:
            raise StopAtOnce

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A request raises :class:`StopAtOnce` while the context is open: for long work that leaves nothing behind."""
        self._is_at_once = True
        try:
            if self._stop:
                raise StopAtOnce
            yield
        except Exception:
            if self._stop:  # a library that was cut short may put an error of its own in its place
                raise StopAtOnce from None
            raise
        finally:
            self._is_at_once = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens while the context is open."""
        with ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            yield
