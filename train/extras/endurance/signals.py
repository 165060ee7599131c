"""What could end a run from outside: signals, after which it saves a checkpoint, and readers of its output that leave.

Processes that load batches leave signals to the run. It continues where a pager, a pipe or a terminal is closed.
"""

import errno
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from train.records import StopAtOnce

NUMBERS = [n for n in signal.Signals if n.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")]  # Windows: the first two
SECONDS_OF_ONE_INTERRUPT = 2.0  # a launcher passes on the interrupt that the terminal has sent to both


class Signals:
    """Tells ``stop`` of SIGTERM, SIGINT, SIGHUP and SIGUSR1. A later second SIGINT ends the process at once."""

    def __init__(self, stop: list[str]) -> None:
        self.stop, self._is_at_once, self._process, self._since = stop, False, os.getpid(), float("inf")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker: the run tells it what to do
            if self._is_at_once and number == signal.SIGTERM:
                os._exit(0)
            return
        if not self.stop:
            self.stop.append(signal.Signals(number).name)
            if not self._is_at_once and os.environ.get("RANK", "0") == "0":  # a long step may come first
                if_whole = " if all processes are still there" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
                line = f"\n{self.stop[0]}: the run stops at the next safe point, with a checkpoint{if_whole}"
                if number == signal.SIGINT:  # accelerate launch ends at the first, and leaves the run behind
                    line += f"; to end it at once, interrupt again or kill -9 {os.getpid()}"
                with suppress(OSError):  # a terminal that is closed sends SIGHUP, and takes no more lines
                    os.write(2, f"{line}\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._since > SECONDS_OF_ONE_INTERRUPT:
            raise KeyboardInterrupt
        self._since = min(self._since, time.monotonic()) if number == signal.SIGINT else self._since  # the first one
        if self._is_at_once:
            raise StopAtOnce

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A request raises :class:`StopAtOnce` while the context is open: for long work that leaves nothing behind."""
        self._is_at_once = True
        try:
            if self.stop:
                raise StopAtOnce
            yield
        except Exception:
            if self.stop:  # a library that was cut short may put an error of its own in its place
                raise StopAtOnce from None
            raise
        finally:
            self._is_at_once = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens while the context is open. A process that was asked to stop is not ended by being asked once more."""

        def leave(number: signal.Signals, before: Any) -> None:
            signal.signal(number, signal.SIG_IGN if self.stop and before == signal.SIG_DFL else before)

        with ExitStack() as stack:
            for number in NUMBERS:
                if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup wants that
                    stack.callback(leave, number, signal.signal(number, self._on_signal))
            yield


def deliver(say: Callable[[str], object], loader: Callable[..., Any], id_lists: Iterable[Any]) -> Iterator[Any]:
    """What ``loader`` makes of each list, in order; where its processes die, new ones or this one load the rest."""
    (ahead, rest), has_delivered = itertools.tee(id_lists), False  # the loader takes lists before they are due
    obey_this = partial(_obey_parent, os.getpid())
    batches = _start(loader(sampler=ahead, worker_init_fn=obey_this, multiprocessing_context="fork"))
    try:
        for batch in batches:
            next(rest)
            has_delivered = True
            yield batch
        return
    except Exception as error:
        processes = batches._workers  # also those that died before the last had started
        wait([process.sentinel for process in processes], 1.0)  # connections break a little before a process ends
        ends = [process.exitcode for process in processes if process.exitcode is not None]
        if not ends and "file </torch_" not in str(error):  # which is shared memory
            raise
    batches._shutdown_workers()  # the error itself may keep them alive
    how = ", ".join(signal.Signals(-end).name if end < 0 else f"status {end}" for end in ends)
    what = f"a process that loads batches ended ({how})" if ends else "/dev/shm is full (docker run --shm-size: more)"
    next_ = "new ones continue" if (again := has_delivered and bool(ends)) else "this process loads the rest itself"
    say(f"{what}: {next_}. Memory may be full: use fewer --dataloader_num_workers.")
    yield from deliver(say, loader, rest) if again else loader(sampler=rest, num_workers=0)


def _start(loader: Any) -> Any:
    """Starts the processes of a DataLoader with signals blocked, because the run tells them when to end."""
    handler, mask = signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # torch's handler raises wherever the main thread stands when a process dies, even within an optimizer's update.
    # Without it the death is seen where it matters: by whoever waits for a batch.
    signal.signal(signal.SIGCHLD, handler)
    return batches


def _obey_parent(parent: int, worker: int) -> None:
    """Ends this forked process if ``parent`` itself sends SIGTERM, as Python does to a process that lingers."""

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()


class Lasting(io.FileIO):
    """Discards what is written once its reader is gone or its disk full, so that the run continues."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.dup2(nowhere := os.open(os.devnull, os.O_WRONLY), self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Puts such streams in place of this process's own; what notebooks and tests put there stays."""
    for name in "stdout", "stderr":
        stream: Any = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            stream.flush()
            raw: Any = Lasting(stream.fileno(), "w", closefd=False)
            buffer = io.BufferedWriter(raw) if hasattr(stream.buffer, "raw") else raw  # python -u has none
            style: Any = {"line_buffering": True, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", **style))
