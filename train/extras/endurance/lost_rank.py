"""Which rank was lost, when the processes of a run no longer reach each other; and the end of those without launcher.

Every rank counts up a key in the store through which the processes met, from a thread, so that it answers even while
a collective blocks it. A rank whose collective fails, or whose next neighbour has not counted for too long, calls the
roll; whoever does not count on is lost. docs/multi_node.md tells what is seen under which backend.
"""

import ctypes
import functools
import itertools
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch.distributed import DistError, DistNetworkError, PrefixStore, TCPStore, distributed_c10d

from train.launch import Launch
from train.records import EXIT_ERROR, one_line

POLL_SECONDS = 1.0
ANSWER_SECONDS = 6.0  # how long a roll call waits: long enough for every living rank to look several times
STORE_SECONDS = 10.0  # how long the store may take to answer before its host counts as gone
SECONDS_TO_FAIL = 60.0  # an error of all ranks has ended them by then, each with its message and its last checkpoint
LEFT, FAILED, DONE = "left", "failed", "done"
T = TypeVar("T")

# gloo has no type of its own for these and raises RuntimeError; NCCL and the store raise a DistError, which is one too.
_BROKEN = re.compile("gloo|nccl|(connection|pair|peer|socket) (clos|reset|refused)|timed out waiting|broken pipe", re.I)


class RankLeftError(DistNetworkError):
    """A rank that is waited for has ended of itself."""


class Store:
    """The store through which the processes met; each call gives up after ``STORE_SECONDS`` with a RuntimeError.

    A TCPStore waits without a limit, also for a host that can no longer be reached, from which nothing will ever come.
    """

    def __init__(self, host: str, port: int) -> None:
        options = {"is_master": False, "wait_for_workers": False, "timeout": timedelta(seconds=STORE_SECONDS)}
        # A launcher that starts its processes again keeps the store: their keys differ by the number of the start.
        prefix = f"rank_watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = _answer(lambda: PrefixStore(prefix, TCPStore(host, port, **options)), 2 * STORE_SECONDS)

    def set(self, key: str, value: str) -> bool:
        """Sets ``key``; True, as it has succeeded."""
        return _answer(lambda: self._store.set(key, value), STORE_SECONDS) is None

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at ``key``, which is 0 before it was set; what it comes to."""
        return _answer(lambda: self._store.add(key, amount), STORE_SECONDS)

    def check(self, *keys: str) -> bool:
        return _answer(lambda: self._store.check(list(keys)), STORE_SECONDS)

    def value(self, key: str) -> str:
        """The value of ``key``; empty where it was never set, for which a TCPStore's ``get`` would wait."""
        return _answer(lambda: self._store.get(key).decode() if self._store.check([key]) else "", STORE_SECONDS)


def in_background(work: Callable[[], T]) -> Future[T]:
    """What ``work`` gives or raises, on a thread of its own, for which a process that has to end does not wait."""
    future: Future[T] = Future()

    def fulfil() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=fulfil, daemon=True).start()
    return future


def _answer(question: Callable[[], T], seconds: float) -> T:
    """What ``question`` gives in time; otherwise a thread that waits for it is left behind."""
    try:
        return in_background(question).result(seconds)
    except TimeoutError:
        raise DistNetworkError(f"timed out waiting for the store, {seconds:.0f} s") from None


class RankWatch:
    """Watches, while its context is open, whether all ranks are there; not for a process that is alone.

    A rank may say nothing for ``seconds``. When one is lost, ``tell`` shows a message that ends with the
    ``remedy``: on one of all ranks, or on one of each host if the store itself is gone.
    """

    def __init__(self, launch: Launch, seconds: float, remedy: Callable[[], str], tell: Callable[[str], None]) -> None:
        self._rank, self._ranks = launch.rank, range(launch.world_size)
        self._is_local_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._address, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._host = os.environ.get("GROUP_RANK") or socket.gethostname()  # ranks may be dealt to hosts in any order
        self._timeout_seconds, self._remedy, self._tell = seconds, remedy, tell
        self._store: Store | None = None
        self._connected, self._closing = threading.Event(), threading.Event()
        self._lock, self._thread = threading.Lock(), threading.Thread(target=self._watch, daemon=True)
        self._has_concluded = self._is_preparing = False

    def __enter__(self) -> "RankWatch":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._closing.set()
        self._thread.join(POLL_SECONDS)
        if self._store is not None:
            with suppress(RuntimeError):  # the store may have gone with its host
                self._store.set(f"beat/{self._rank}", LEFT)
                self._store.set(LEFT, "1")
                if kind is not None:
                    self._store.set(FAILED, "1")
                if self._rank == 0 and self._is_preparing and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
                    time.sleep(3 * POLL_SECONDS)  # so that other hosts see it: the store ends with this one's launcher

    def concludes(self, error: Exception) -> bool:
        """Whether a lost rank caused ``error``; if so, one rank has reported it by then. Takes seconds."""
        is_broken = isinstance(error, RuntimeError) and (isinstance(error, DistError) or _BROKEN.search(str(error)))
        if not is_broken or "EADDRINUSE" in str(error):  # the port of another run
            return False
        self._connected.wait(ANSWER_SECONDS)
        if self._store is not None:
            return self._conclude(self._store)
        if self._is_local_first:
            what = "rank 0 did not come" if self._rank else "this process is rank 0, and is not to be found"
            where = f"nothing answers at {self._address}:{self._port} (MASTER_ADDR and MASTER_PORT)"
            self._tell(f"{what}: {where}. Start all launchers with rank 0's address. The error was: {one_line(error)}")
        return True

    def confirms_stop(self) -> bool:
        """Whether a request to stop was meant for the run; if not, a rank has failed, and one rank has reported it."""
        if not self._connected.wait(ANSWER_SECONDS) or self._store is None:
            return True
        with suppress(RuntimeError):
            self._store.set(f"asked to stop/{self._rank}", "1")
        return not self._conclude(self._store, is_stopping=True)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """The first rank of a host before its others, and all leave together, however long the work takes.

        A barrier has a timeout; here a rank is waited for while it lives. Raises RankLeftError where one has ended.
        """
        if not self._is_local_first:
            self._until(lambda store: store.check(f"went first/{self._host}"))
        self._is_preparing = True
        yield
        if self._is_local_first:
            self._until(lambda store: store.set(f"went first/{self._host}", "1"))
        self._until(lambda store: store.set(f"prepared/{self._rank}", "1"))
        self._until(lambda store: store.check(*(f"prepared/{rank}" for rank in self._ranks)))
        self._is_preparing = False

    def wait_for_first(self) -> None:
        """Ends no rank before rank 0, which may still write: launchers do not wait long for those of other hosts."""
        with suppress(RuntimeError):  # it has failed, or is out of reach
            self._until(lambda store: store.check(DONE) if self._rank else store.set(DONE, "1"), STORE_SECONDS)

    def gather(self, name: str, text: str) -> list[str]:
        """The ``text`` of every rank, for which rank 0 waits; a ``name`` is used once. RankLeftError if one ended."""
        self._until(lambda store: store.set(f"{name}/{self._rank}", text), POLL_SECONDS)
        if self._rank != 0:
            return []
        keys = [f"{name}/{rank}" for rank in self._ranks]
        self._until(lambda store: store.check(*keys), patience_seconds=0)
        texts = list(map(self._met().value, keys))
        with suppress(RuntimeError):  # the store is held by a launcher, for as long as the run takes
            for key in keys:
                self._met().set(key, "")
        return texts

    def _until(self, succeeds: Callable[[Store], bool], patience_seconds: float = math.inf) -> None:
        """Asks until it ``succeeds``; waits for the thread to connect again, where that was cut, with patience."""
        patience_seconds, answered = min(patience_seconds, self._timeout_seconds), time.monotonic()
        for seconds in itertools.chain((POLL_SECONDS / 2**n for n in (4, 3, 2, 1)), itertools.repeat(POLL_SECONDS)):
            try:
                if succeeds(self._met()):
                    return
                if self._met().check(LEFT):
                    raise RankLeftError("a rank ended before the others")
                answered = time.monotonic()
            except RuntimeError as error:
                if isinstance(error, RankLeftError) or time.monotonic() - answered >= patience_seconds:
                    raise
            time.sleep(seconds)

    def _met(self) -> Store:
        """The store, once it is open; after a cut that was mended, the one over a new connection."""
        self._connected.wait()
        return cast("Store", self._store)

    def _watch(self) -> None:
        """The thread, over a connection of its own: the process group's may be waiting in a blocked collective.

        Rank 0 may open the store only when it meets the others. If it is then gone for too long, this process ends.
        """
        gone_since = time.monotonic()
        while not self._closing.is_set():
            try:
                store = Store(self._address, self._port)
                store.set(f"who/{self._rank}", f"{socket.gethostname()}, process {os.getpid()}")
                self._store, gone_since = store, math.inf
                self._connected.set()
                self._look(store)
                break
            except RuntimeError:
                gone_since = min(gone_since, time.monotonic())
                if self._store is not None and time.monotonic() - gone_since > self._timeout_seconds:
                    self._conclude(self._store)
                    break
                self._closing.wait(POLL_SECONDS)
        # Connections that break end the main thread by themselves; where none does, it waits in a collective.
        if not self._closing.wait(ANSWER_SECONDS):
            os._exit(EXIT_ERROR)

    def _look(self, store: Store) -> None:
        """Counts, and looks at the next rank, until some rank is lost or this one closes."""
        neighbour = f"beat/{(self._rank + 1) % len(self._ranks)}"
        last, since, have_met, failed = "", time.monotonic(), False, math.inf
        for count in itertools.count():
            if self._closing.wait(POLL_SECONDS if count else 0):  # one that ends while it connects is not there
                return
            store.set(f"beat/{self._rank}", str(count))
            if (beat := store.value(neighbour)) != last or beat == LEFT:
                last, since = beat, time.monotonic()
            have_met = have_met or torch.distributed.is_initialized()
            # gloo notices a rank that has failed. NCCL may not: its ranks would wait until their collective times out.
            failed = min(failed, time.monotonic()) if store.check(FAILED) else math.inf
            latest = min(since + self._timeout_seconds, failed + SECONDS_TO_FAIL)
            is_lost = time.monotonic() > latest or (not have_met and store.check(LEFT))
            if store.add("told", 0) > 0 or (is_lost and self._conclude(store)):
                return

    def _conclude(self, store: Store, is_stopping: bool = False) -> bool:
        """Calls the roll and has one rank tell what it gave; whether some rank is gone."""
        with self._lock:
            if self._has_concluded:
                return True
            try:
                if not store.add("told", 0):
                    lost, left = self._call_roll(store, is_stopping)
                    if not lost and not left:
                        return False
                    if store.add("told", 1) == 1:
                        self._tell(self._describe(store, lost, left))
            except RuntimeError:  # nobody can be asked any more
                if self._is_local_first:
                    whose = "rank 0 is lost: the launcher of its" if self._rank else "the launcher of this"
                    what = f"{whose} host, {self._address}, through which all processes met, no longer answers"
                    self._tell(f"{what}. {self._remedy()}")
            self._has_concluded = True
            return True

    def _call_roll(self, store: Store, is_stopping: bool) -> tuple[list[int], list[int]]:
        """The ranks that do not count on, and those that have left; who was asked to stop, too, may have left."""
        missing, left = {r: store.value(f"beat/{r}") for r in self._ranks if r != self._rank}, set()
        deadline = time.monotonic() + ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            if is_stopping:
                missing = {r: beat for r, beat in missing.items() if not store.check(f"asked to stop/{r}")}
            now = {rank: store.value(f"beat/{rank}") for rank in missing}
            left |= {rank for rank, beat in now.items() if beat == LEFT}
            missing = {rank: beat for rank, beat in missing.items() if now[rank] == beat != LEFT}
            time.sleep(POLL_SECONDS / 10)
        return sorted(missing), sorted(left)

    def _describe(self, store: Store, lost: list[int], left: list[int]) -> str:
        if not lost:
            return f"rank {', '.join(map(str, left))} ended before the others; its own message says why."
        hosts = {rank: store.value(f"who/{rank}") for rank in lost[:8]}
        who = [f"{rank} ({f'host {host}' if host else 'never came'})" for rank, host in hosts.items()]
        more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        others = f"The other {len(self._ranks) - len(lost)} of {len(self._ranks)} ended because of this"
        return f"rank {', '.join(who)}{more} is lost: killed, stopped, or its host is gone. {others}. {self._remedy()}"


@functools.cache  # what is registered stays
def take_forks_along() -> None:
    """Has the kernel kill processes that are forked from here on, such as those that tokenise, when this one dies."""
    if sys.platform == "linux" and hasattr(os, "register_at_fork"):
        prctl, main = ctypes.CDLL(None).prctl, [(threading.main_thread().ident, os.getpid())]

        def within() -> None:
            (thread, parent), main[:] = main[0], [(threading.get_ident(), os.getpid())]
            # PR_SET_PDEATHSIG. The kernel goes by the end of the thread that forks; the parent may have died already.
            if thread == threading.get_ident() and (prctl(1, signal.SIGKILL) or os.getppid() != parent):
                os._exit(EXIT_ERROR)

        os.register_at_fork(after_in_child=within)


def follow_launcher() -> None:
    """Has the kernel send this process SIGTERM, the request to save and stop, when its launcher dies, even by SIGKILL.

    An orphan would train on, unseen, and hold its GPUs. Only on Linux, and only for a process that a launcher started:
    one that was started from a shell, perhaps with nohup, is meant to outlive it. Processes that a launcher starts
    again (``--max_restarts``) meet by keys of their own: it keeps the store, with addresses of those before.
    """
    if (start := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        meet, own = distributed_c10d.rendezvous, f"start {start}"
        distributed_c10d.rendezvous = lambda *a, **k: ((PrefixStore(own, s), *ranks) for s, *ranks in meet(*a, **k))  # type: ignore
    launchers = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # which torchrun and accelerate launch always set
    if sys.platform == "linux" and any(name in os.environ for name in launchers):
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != launcher:  # it died a moment before
            os.kill(os.getpid(), signal.SIGTERM)
