"""Processes that load batches: the run's signals pass them by, and those that die are replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from train.extras.endurance.signals import NUMBERS

SECONDS_TO_END = 1.0  # a process that dies closes its connections a little earlier
REMEDY = "If the host has no memory left, use fewer --dataloader_num_workers."


def deliver(say: Callable[[str], None], loader: Callable[..., Any], id_lists: Iterable[Any]) -> Iterator[Any]:
    """What ``loader`` makes of each list, in order; what processes that died had not delivered, new ones load.

    Where these, too, die before they have delivered anything, this process loads the rest itself.
    """
    ids, waiting, are_new = iter(id_lists), deque[Any](), False

    def planned() -> Iterator[Any]:
        yield from tuple(waiting)
        for own in ids:
            waiting.append(own)
            yield own

    while True:
        batches, processes = _start(loader(sampler=planned(), worker_init_fn=_obey_parent))
        try:
            for batch in batches:
                waiting.popleft()
                are_new = False
                yield batch
            return
        except Exception:
            if not (dead := wait([process.sentinel for process in processes], SECONDS_TO_END)):
                raise
        del batches  # ends the other processes
        ends = ", ".join(_end_of(process) for process in processes if process.sentinel in dead)
        what_next = "this process loads the rest itself" if are_new else "new ones continue"
        say(f"a process that loads batches ended ({ends}): {what_next}. {REMEDY}")
        if are_new:
            yield from loader(sampler=planned(), num_workers=0)
            return
        are_new = True


def _start(loader: Any) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Starts the processes of a DataLoader; they are born deaf to signals, because the run tells them what to do."""
    others, handler = active_children(), signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # torch's handler raises wherever the main thread stands when a process dies, even within an optimizer's update.
    # Without it the death is seen where it matters: by whoever waits for a batch.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    return batches, [process for process in active_children() if process not in others]


def _obey_parent(worker: int) -> None:
    """Ends this process if its parent, and nobody else, sends SIGTERM: so torch and Python end one that lingers."""
    parent = os.getppid()

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()


def _end_of(process: BaseProcess) -> str:
    """How a process ended, for a person."""
    process.join()
    status = process.exitcode or 0
    return signal.Signals(-status).name if status < 0 else f"status {status}"
