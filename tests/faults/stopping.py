"""Signals at a chosen moment to the process of a run, to its process group, or to the launcher of its two ranks."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faults.injections import at_call, on_rank, several
from faults.processes import Ended, Fault, run, start_work
from support import checkpoint_digests, write_recipe

from train.checkpoint import verify
from train.records import EXIT_DONE, EXIT_STOPPED

STEPS = 6
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
TARGETS = ("process", "group", "launcher")
WORKERS = (0, 2, 8)
RANKS = 2
"""Of a launcher."""
PATIENCE_SECONDS = 100.0
KILL = os.kill


def moments(workers: int) -> dict[str, tuple[str, int]]:
    """What is about to be called when the signal comes, and for the how many-th time."""
    loader = "_MultiProcessingDataLoaderIter" if workers else "_SingleProcessDataLoaderIter"
    return {
        "loading": (f"torch.utils.data.dataloader:{loader}._next_data", 6),
        "rehearsing": ("train.memory.session:rehearse", 1),
        "training": ("train.model:ModelWithLoss.forward", 6),
        "evaluating": ("train.loop:evaluate", 1),
        "saving": ("train.checkpoint:write_blocks", 1),
        "finishing": ("train.outputs:Outputs.write_final", 1),
    }


@dataclass(frozen=True)
class Stop:
    """One place of the matrix."""

    number: signal.Signals
    target: str
    workers: int
    moment: str

    def __str__(self) -> str:
        return f"{self.number.name}-{self.target}-{self.workers}-{self.moment}"


def every_stop() -> list[Stop]:
    """The whole matrix."""
    return [Stop(*values) for values in itertools.product(SIGNALS, TARGETS, WORKERS, moments(0))]


def covering_stops() -> list[Stop]:
    """A few of the matrix, in which each value of each kind meets each value of each other kind."""
    left, chosen, draw = set().union(*map(_pairs, every_stop())), [], random.Random(0)
    while left:
        stops = draw.sample(every_stop(), len(every_stop()))
        chosen.append(max(stops, key=lambda stop: len(_pairs(stop) & left)))
        left -= _pairs(chosen[-1])
    return sorted(chosen, key=str)


def _pairs(stop: Stop) -> set[Any]:
    return set(itertools.combinations(enumerate((stop.number, stop.target, stop.workers, stop.moment)), 2))


def arguments(folder: Path, output: Path, workers: int, *more: Any) -> tuple[Any, ...]:
    every_two = ("--eval_every_steps", 2, "--save_every_steps", 2, "--dataloader_num_workers", workers)
    return ("--config", write_recipe(folder), "--output_dir", output, *every_two, *more)


def whole_run(folder: Path) -> Path:
    """A run that nothing happened to."""
    [end] = run(arguments(folder, folder / "run", 0), folder / "logs")
    assert end.status == EXIT_DONE, end.said
    return folder / "run"


def stops_and_resumes(folder: Path, whole: Path, stop: Stop) -> None:
    """Stops a run, looks at what it leaves, and has the same command end it as if nothing had been."""
    its = arguments(folder, folder / "run", stop.workers)
    target, call = moments(stop.workers)[stop.moment]
    fault = several(hearing(), at_call(target, send(stop), call))
    if stop.target == "launcher":
        ended = launched(its, folder / "logs", on_rank(0, fault))
    else:
        ended = run(its, folder / "logs", fault=several(in_a_group(), fault))
    for end in ended:
        assert "Traceback" not in end.said, end.said
        assert end.status == (EXIT_DONE if stop.moment == "finishing" else EXIT_STOPPED), end.said
    assert intact(folder / "run")
    if stop.moment != "finishing":
        received = json.loads((folder / "run" / "stopped.json").read_text())["signal"]
        assert received == passed_on(stop).name
    if stop.target != "launcher":  # two ranks add up in another order than the one of the whole run
        [end] = run(its, folder / "logs")
        assert end.status == EXIT_DONE, end.said
        assert checkpoint_digests(folder / "run", STEPS) == checkpoint_digests(whole, STEPS)


def intact(output: Path) -> list[str]:
    folder = output / "checkpoints"
    for path in folder.iterdir():
        assert verify(path) is None, path
    return sorted(path.name for path in folder.iterdir())


def passed_on(stop: Stop) -> signal.Signals:
    """What a rank receives: torch's launcher passes on what it gets, but dies of a signal that it does not know."""
    return signal.SIGTERM if (stop.target, stop.number) == ("launcher", signal.SIGUSR1) else stop.number


def in_a_group() -> Fault:
    """A run as a launcher, a terminal or a supervisor starts it, with a process group of its own."""
    return _in_a_group


def _in_a_group(rank: int) -> None:
    os.setpgid(0, 0)


HEARD: list[int] = []
"""The signals that this process has received."""


def hearing() -> Fault:
    """Keeps what signals come, so that whoever sends one can wait until it is there."""
    return _hearing


def _hearing(rank: int) -> None:
    from train.extras.endurance.signals import Signals

    plain = Signals._on_signal

    def on_signal(self: Signals, number: int, frame: Any) -> None:
        HEARD.append(number)
        plain(self, number, frame)

    Signals._on_signal = on_signal


def send(stop: Stop) -> Callable[[], None]:
    """Sends the signal from outside to whom it is for, and waits until this process has it."""
    return partial(_send, stop.number, stop.target)


def _send(number: int, target: str) -> None:
    to = {"process": os.getpid(), "group": -os.getpgrp(), "launcher": os.getppid()}[target]
    # From another session: the group of the sender would get it, too.
    subprocess.run(["/bin/kill", f"-{number}", "--", str(to)], start_new_session=True, check=True)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not HEARD and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # a worker that dies of it is gone when the run continues


def launched(its: Sequence[Any], logs: Path, fault: Fault) -> list[Ended]:
    """All ranks of a run under torch's launcher, whatever becomes of that."""
    statuses = [logs / f"status-{rank}" for rank in range(RANKS)]
    job = start_work(partial(_launch, [str(word) for word in its], fault, logs), logs, 1)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(path.exists() and path.read_text() for path in statuses):
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.05)
    job.end()
    return [Ended(int(path.read_text()), job.said()) for path in statuses]


def _launch(its: list[str], fault: Fault, logs: Path, rank: int) -> int:
    """The launcher: torchrun's, but its ranks are forks, which have the libraries at once."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def kill(pid: int, number: int) -> None:
        os.killpg(pid, number)  # as it does to ranks that are commands, which it starts in groups of their own

    os.kill = kill
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    options: dict[str, Any] = {**meeting, "max_restarts": 0, "start_method": "fork"}
    options |= {"shutdown_timeout": 90} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}  # torch 2.11
    with suppress(SignalException):
        elastic_launch(LaunchConfig(1, 1, RANKS, **options), _rank)(its, fault, logs)
    return 0


def _rank(its: list[str], fault: Fault, logs: Path) -> None:
    from train.main import main

    os.kill = KILL
    os.setsid()
    for entry in list(Path("/proc/self/fd").iterdir()):  # a command would not inherit the launcher's store either
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                os.close(int(entry.name))
    for number in SIGNALS:  # a rank that is done writes its status whatever comes; SIGHUP would stay ignored in the run
        signal.signal(number, signal.SIG_DFL if number == signal.SIGHUP else signal.SIG_IGN)
    rank, status = int(os.environ["RANK"]), 70
    try:
        fault(rank)
        status = main(its)
    finally:
        (logs / f"status-{rank}").write_text(str(status))
        os._exit(status)
