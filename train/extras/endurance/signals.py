"""Signals that ask a run to stop, so that it ends with a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from train.records import StopAtOnce, StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SECONDS_OF_ONE_INTERRUPT = 2.0  # a launcher passes on the interrupt that the terminal has sent to both


class Signals:
    """Tells ``stop`` of SIGTERM, SIGINT, SIGHUP and SIGUSR1. A later second SIGINT ends the process at once."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop, self._is_at_once, self._process, self._since = stop, False, os.getpid(), 0.0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker: the run tells it what to do
            if self._is_at_once and number == signal.SIGTERM:
                os._exit(0)
            return
        if not self._stop:
            self._stop.received, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > SECONDS_OF_ONE_INTERRUPT:
            raise KeyboardInterrupt
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
            for number in NUMBERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup wants that
                    stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            yield
