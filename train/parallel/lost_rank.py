"""Which rank was lost, when the processes of a run no longer reach each other.

Every rank counts up a key in the store through which the processes met, from a thread, so that it answers even while
a collective blocks it. A rank whose collective fails, or whose next neighbour has not counted for too long, calls the
roll; whoever does not answer is lost. So a rank is named that can say nothing itself: killed, stopped, or on a host
that is gone. This does not depend on the backend; docs/multi_node.md tells what is seen under which.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from train.errors import EXIT_ERROR
from train.launch import Launch

POLL_SECONDS = 1.0
ANSWER_SECONDS = 6.0
"""How long a roll call waits: long enough for every living rank to look several times."""
STORE_SECONDS = 10.0
"""How long the store may take to answer before its host counts as gone."""
LEFT = "left"

# torch has no type of its own for these: gloo raises RuntimeError, NCCL and the store a DistError, which is one too.
_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe", re.IGNORECASE)


def is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed for want of another rank, or of an answer from it."""
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


class RankWatch:
    """Watches, while its context is open, whether all ranks are there; does nothing for a process that is alone.

    Args:
        timeout_seconds: how long a rank may say nothing.
        remedy: what to do about a lost rank, for the end of the message; called when one is lost.
        tell: shows a message to the person who watches. Of all ranks one tells; where the store itself is gone, one of
            each host.
    """

    def __init__(
        self, launch: Launch, timeout_seconds: float, remedy: Callable[[], str], tell: Callable[[str], None]
    ) -> None:
        self._rank, self._world_size = launch.rank, launch.world_size
        self._timeout_seconds, self._remedy, self._tell = timeout_seconds, remedy, tell
        self._store: TCPStore | None = None
        self._closing, self._lock, self._thread = threading.Event(), threading.Lock(), threading.Thread()
        # A launcher that starts its processes again keeps the store: their keys differ by the number of the start.
        self._prefix = f"rank_watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def __enter__(self) -> RankWatch:
        if self._world_size > 1:
            # A connection of its own: the process group's may be waiting in a blocked collective.
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            timeout = timedelta(seconds=STORE_SECONDS)
            self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            self._store.set(self._key("who", self._rank), f"{socket.gethostname()}, process {os.getpid()}")
            self._thread = threading.Thread(target=self._watch, args=(self._store,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        if self._store is not None:
            self._thread.join(POLL_SECONDS)
            with contextlib.suppress(RuntimeError):  # the store may have gone with its host
                self._store.set(self._key("beat", self._rank), LEFT)

    def concludes(self, error: Exception) -> bool:
        """Whether ``error`` came of a rank that is no longer there, of which one of the others has then told.

        Takes up to ``ANSWER_SECONDS``.
        """
        return self._store is not None and is_broken_connection(error) and self._conclude(self._store)

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{kind}" if rank is None else f"{self._prefix}/{kind}/{rank}"

    def _watch(self, store: TCPStore) -> None:
        """The thread: counts, answers roll calls, looks at the next rank, and ends a process that cannot end itself."""
        neighbour = self._key("beat", (self._rank + 1) % self._world_size)
        last, since = "", time.monotonic()
        for count in itertools.count():
            try:
                store.set(self._key("beat", self._rank), str(count))
                store.set(self._key("here", self._rank), str(store.add(self._key("call"), 0)))
                beat = _value(store, neighbour)
                if beat != last or beat == LEFT:
                    last, since = beat, time.monotonic()
                concluded = store.add(self._key("told"), 0) > 0
            except RuntimeError:
                return  # the store is gone, and with it a host: the collectives will fail, and ``concludes`` tells
            silent = time.monotonic() - since > self._timeout_seconds
            if concluded or (silent and self._conclude(store)):
                # Connections that break end the main thread by themselves; where none does, it waits in a collective.
                if not self._closing.wait(ANSWER_SECONDS):
                    os._exit(EXIT_ERROR)
                return
            if self._closing.wait(POLL_SECONDS):
                return

    def _conclude(self, store: TCPStore) -> bool:
        """Calls the roll and has one rank tell what it gave; whether some rank is no longer there."""
        with self._lock:
            try:
                if store.add(self._key("told"), 0):
                    return True
                lost, left = self._call_roll(store)
                if not lost and not left:
                    return False
                tells, message = store.add(self._key("told"), 1) == 1, self._describe(store, lost, left)
            except RuntimeError:
                tells = os.environ.get("LOCAL_RANK", "0") == "0"
                message = (
                    f"rank 0 is lost: the launcher of its host, {os.environ['MASTER_ADDR']}, through which all "
                    f"processes met, no longer answers. {self._remedy()}"
                )
            if tells:
                self._tell(message)
            return True

    def _call_roll(self, store: TCPStore) -> tuple[list[int], list[int]]:
        """The ranks that do not answer, and those that have left of themselves."""
        call = store.add(self._key("call"), 1)
        missing, left = set(range(self._world_size)) - {self._rank}, set()
        deadline = time.monotonic() + ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            left |= {rank for rank in missing if _value(store, self._key("beat", rank)) == LEFT}
            missing -= left
            missing -= {rank for rank in missing if int(_value(store, self._key("here", rank)) or 0) >= call}
            time.sleep(POLL_SECONDS / 10)
        return sorted(missing), sorted(left)

    def _describe(self, store: TCPStore, lost: list[int], left: list[int]) -> str:
        if not lost:
            ranks = ", ".join(map(str, left))
            return f"rank {ranks} ended before the others; its own message says why."
        who = [f"{rank} (host {_value(store, self._key('who', rank)) or 'unknown'})" for rank in lost[:8]]
        more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        return (
            f"rank {', '.join(who)}{more} is lost: killed, stopped, or its host is gone. The other "
            f"{self._world_size - len(lost)} of {self._world_size} ended for it. {self._remedy()}"
        )


def _value(store: TCPStore, key: str) -> str:
    """The value of ``key``; empty where it was never set, for which ``get`` would wait."""
    return store.get(key).decode() if store.check([key]) else ""
