"""What a run can meet. Each function is called in the process that is to meet it, with that process's rank."""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from faults.processes import Fault

Places = ("begin", "middle", "end")
"""Of a step: before its first micro-batch, after a backward, when it is done and nothing is saved yet."""


def die() -> None:
    """Ends this process as the kernel's out-of-memory killer or a pulled plug would."""
    os.kill(os.getpid(), signal.SIGKILL)


def several(*faults: Fault) -> Fault:
    """One after the other."""
    return partial(_several, faults)


def _several(faults: Sequence[Fault], rank: int) -> None:
    for fault in faults:
        fault(rank)


def on_rank(only: int, fault: Fault) -> Fault:
    """On one rank alone."""
    return partial(_on_rank, only, fault)


def _on_rank(only: int, fault: Fault, rank: int) -> None:
    if rank == only:
        fault(rank)


def quick_roll_call() -> Fault:
    """Ranks that look for lost ones after a second rather than six."""
    return _quick_roll_call


def _quick_roll_call(rank: int) -> None:
    from train.extras.endurance import lost_rank

    lost_rank.POLL_SECONDS, lost_rank.ANSWER_SECONDS = 0.2, 1.2


def at_step(step: int, place: str, action: Callable[[], None] = die) -> Fault:
    """``action`` in the given step, which counts from 0, at one of ``Places``."""
    return partial(_at_step, step, place, action)


def _at_step(step: int, place: str, action: Callable[[], None], rank: int) -> None:
    from accelerate import Accelerator

    import train.loop as loop

    now = {"step": -1}
    seed_step, advance, backward = loop.seed_step, loop.advance, Accelerator.backward

    def begins(seed: int, number: int, random_rank: int) -> None:
        now["step"] = number
        if number == step and place == "begin":
            action()
        seed_step(seed, number, random_rank)

    def in_the_middle(*arguments: Any, **options: Any) -> None:
        backward(*arguments, **options)
        if now["step"] == step and place == "middle":
            action()

    def ends(*arguments: Any) -> Any:
        if now["step"] == step and place == "end":
            action()
        return advance(*arguments)

    loop.seed_step, loop.advance, Accelerator.backward = begins, ends, in_the_middle  # type: ignore


def examples_to(folder: Path) -> Fault:
    """Writes which examples each step saw: ``RANK.jsonl`` of [step, ids], one line a step that was completed."""
    return partial(_examples_to, folder)


def _examples_to(folder: Path, rank: int) -> None:
    import train.loop as loop
    from train.step import Engine

    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{rank}.jsonl").open("a")
    seed_step, step, advance = loop.seed_step, Engine.step, loop.advance
    seen: list[int] = []

    def begins(*arguments: Any) -> None:
        seen.clear()  # of a rehearsal
        seed_step(*arguments)

    def keep_ids(self: Any, model: Any, optimizer: Any, micro_batches: Any, stop: bool = False) -> Any:
        seen.extend(i for batch in micro_batches for i in batch.example_ids)
        return step(self, model, optimizer, micro_batches, stop)

    def write(progress: Any, *rest: Any) -> Any:
        file.write(json.dumps([progress.step, sorted(seen)]) + "\n")
        file.flush()
        return advance(progress, *rest)

    loop.seed_step, Engine.step, loop.advance = begins, keep_ids, write  # type: ignore


def _shown(path: str | Path) -> str:
    return f"{Path(path).parent.name}/{Path(path).name}"


class Changes:
    """Counts what a process does to files under ``folder``, and calls ``act`` before each with its number, from 1.

    Opening for writing, truncating, syncing, renaming, making and removing; and the middle of a file of tensors.
    """

    def __init__(self, folder: Path, act: Callable[[int, str], None]) -> None:
        self._folder, self._act, self._number = folder, act, 0

    def count(self, what: str) -> None:
        """One more."""
        self._number += 1
        self._act(self._number, what)

    def listen(self) -> None:
        """From now on, for as long as the process lives."""
        from train import checkpoint

        pieces, fsync = checkpoint._safetensors, os.fsync

        def written(tensors: Any) -> Iterator[Any]:
            for number, piece in enumerate(pieces(tensors)):
                if number == len(tensors) // 2:
                    self.count(f"half of {len(tensors)} tensors")
                yield piece

        def sync(descriptor: int) -> None:
            path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if self._is_inside(path):
                self.count(f"sync {_shown(path)}")
            fsync(descriptor)

        checkpoint._safetensors, os.fsync = written, sync  # type: ignore
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            path = arguments[0]
            path = str(Path(f"/proc/self/fd/{path}").readlink()) if isinstance(path, int) else os.fsdecode(path)
            if event in ("os.remove", "os.rmdir") and arguments[1] >= 0:  # relative to an open folder
                path = str(Path(f"/proc/self/fd/{arguments[1]}").readlink() / path)
        else:
            return
        if self._is_inside(path):
            self.count(f"{event} {_shown(path)}")

    def _is_inside(self, path: str) -> bool:
        return Path(path).absolute().is_relative_to(self._folder)


def counting_changes(folder: Path, log: Path) -> Fault:
    """Writes down every change under ``folder``, one a line."""
    return partial(_counting_changes, folder, log)


def _counting_changes(folder: Path, log: Path, rank: int) -> None:
    descriptor = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Changes(folder, lambda number, what: _ignored(os.write(descriptor, f"{number} {what}\n".encode()))).listen()


def _ignored(value: object) -> None:
    del value


def at_change(number: int, folder: Path, action: Callable[[], None] = die, until: int | None = None) -> Fault:
    """``action`` before the change of that number under ``folder``, or before all from ``number`` to ``until``."""
    return partial(_at_change, number, folder, action, until or number)


def _at_change(number: int, folder: Path, action: Callable[[], None], until: int, rank: int) -> None:
    def act(now: int, what: str) -> None:
        if number <= now <= until:
            action()

    Changes(folder, act).listen()


def disk_is_full() -> None:
    """What a write meets then."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disk_is_slow() -> None:
    """A write that takes its time."""
    time.sleep(0.05)


def follow_windows() -> dict[str, int]:
    """The number of the window that is being trained on, in the order of the data, from 0 and over all epochs."""
    from train.batching import Batches

    now, windows = {"window": -1}, Batches.steps

    def counted(self: Any, epoch: int, first_step: int) -> Any:
        for number, window in enumerate(windows(self, epoch, first_step), epoch * self.steps_per_epoch + first_step):
            now["window"] = number
            yield window

    Batches.steps = counted
    return now


def losses_of(window: int, value: float, last: int | None = None) -> Fault:
    """Bad data: the losses of a window (to ``last``) are multiplied by ``value`` before backward."""
    return partial(_losses_of, window, value, window if last is None else last)


def _losses_of(first: int, value: float, last: int, rank: int) -> None:
    from accelerate import Accelerator

    now, backward = follow_windows(), Accelerator.backward

    def poisoned(self: Any, loss: torch.Tensor, **options: Any) -> None:
        backward(self, loss * value if first <= now["window"] <= last else loss, **options)

    Accelerator.backward = poisoned


def shown_loss_of(window: int, factor: float) -> Fault:
    """The loss of a window is seen as so many times what it is."""
    return partial(_shown_loss_of, window, factor)


def _shown_loss_of(window: int, factor: float, rank: int) -> None:
    from train import step

    now, plain = follow_windows(), step.optimizer_step

    def shown(*arguments: Any, **options: Any) -> Any:
        outcome = plain(*arguments, **options)
        return replace(outcome, loss_sum=outcome.loss_sum * factor) if now["window"] == window else outcome

    step.optimizer_step = shown


def at_call(target: str, action: Callable[[], None], number: int = 1, after: bool = False) -> Fault:
    """``action`` before (or after) the given call of ``module:function`` or ``module:Class.method``, from 1."""
    return partial(_at_call, target, action, number, after)


def _at_call(target: str, action: Callable[[], None], number: int, after: bool, rank: int) -> None:
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            action()
        result = function(*arguments, **options)
        if calls[0] == number and after:
            action()
        return result

    setattr(owner, name, called)


def send_itself(number: int, times: int = 1) -> Callable[[], None]:
    """A signal from elsewhere, so many times."""
    return partial(_send_itself, number, times)


def _send_itself(number: int, times: int) -> None:
    for _ in range(times):
        signal.raise_signal(number)


def without_network() -> Fault:
    """No socket can be made, as on a host without a network; what tries is written to the error output."""
    return _without_network


def _without_network(rank: int) -> None:
    import socket

    def refuse(*arguments: Any, **options: Any) -> Any:
        print("a socket was asked for", file=sys.stderr, flush=True)
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    socket.socket.connect = refuse  # type: ignore
    socket.create_connection = socket.getaddrinfo = refuse


def without_privileges() -> Fault:
    """As a user for whom a directory may be read-only, which for root none is."""
    return _without_privileges


def _without_privileges(rank: int) -> None:
    class Header(ctypes.Structure):
        _fields_: ClassVar = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    third_version = 0x20080522  # see capset(2)
    none = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset(ctypes.byref(Header(third_version, 0)), none):
        raise OSError("capabilities cannot be dropped")


def at_open(path: Path, action: Callable[[], None], numbers: Sequence[int]) -> Fault:
    """``action`` when ``path`` is opened for writing, at those times of all, from 1."""
    return partial(_at_open, str(path), action, numbers)


def _at_open(path: str, action: Callable[[], None], numbers: Sequence[int], rank: int) -> None:
    opened = [0]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]) == path and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened[0] += 1
            if opened[0] in numbers:
                action()

    sys.addaudithook(hear)


def disk_fails() -> None:
    """What a write to a damaged disk meets."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))
