"""Runs of ``train/main.py`` in real processes that are really killed, forked from one that has loaded the libraries.

Loading torch and 🤗 takes seconds; a fork has them at once, so hundreds of runs fit into minutes. What a run meets is
a *fault*: a function of this folder that is called in the new process with its rank, before ``main``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from support import ROOT
from torch.distributed import TCPStore

Fault = Callable[[int], None]
Work = Callable[[int], int]
KILLED = -signal.SIGKILL
MEETING = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEETING += ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
"""Variables by which ranks find each other."""
PATIENCE_SECONDS = 120.0
"""For the end of a run that takes one or two."""

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
"""The environment of a launch that shards."""


@dataclass(frozen=True)
class Ended:
    """What became of one process."""

    status: int | None
    """As of ``subprocess``: negative for a signal; None where it did not end in time."""
    said: str


@dataclass
class Job:
    """The processes of one run."""

    processes: Sequence[ForkServerProcess]
    logs: Sequence[Path]
    store: TCPStore | None = None

    def said(self, rank: int = 0) -> str:
        """What a process has written to its outputs so far."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def signal(self, number: int, rank: int = 0) -> None:
        """Sends a signal to one process."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_until(self, condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for something that the run does; an error if it ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.said()
            assert any(process.is_alive() for process in self.processes), self.said()
            time.sleep(0.01)

    def end(self, seconds: float = PATIENCE_SECONDS, of_ranks: Sequence[int] | None = None) -> list[Ended]:
        """Waits for all processes, or some; those that have not ended then are killed."""
        deadline, ended = time.monotonic() + seconds, []
        for rank in range(len(self.processes)) if of_ranks is None else of_ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        for rank, process in enumerate(self.processes):
            status = process.exitcode
            if status is None:
                process.kill()
                process.join()
            ended.append(Ended(status, self.said(rank)))
        return ended


def context() -> ForkServerContext:
    """The server of processes that have the libraries loaded; the first call starts it."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["faults.preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *([before] if before else [])])
    try:
        multiprocessing.forkserver._forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before:
            os.environ["PYTHONPATH"] = before
    return forkserver


def start(
    arguments: Sequence[Any],
    logs: Path,
    ranks: int = 1,
    fault: Fault | None = None,
    environment: dict[str, str] | None = None,
) -> Job:
    """Starts the ranks of a run, which find each other over gloo; ``logs`` is a folder for what they write."""
    return start_work(partial(_main, [str(a) for a in arguments], fault), logs, ranks, environment)


def start_work(work: Work, logs: Path, ranks: int, environment: dict[str, str] | None = None) -> Job:
    """Starts processes that call ``work`` with their rank and end with the status that it returns."""
    logs.mkdir(parents=True, exist_ok=True)
    variables = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **(environment or {})}
    store = None
    if ranks > 1:  # they meet through a store that outlives each of them, as under a launcher
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    number = len(list(logs.glob("*.rank-0")))
    processes, files = [], []
    for rank in range(ranks):
        own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else variables
        files.append(logs / f"{number:03d}.rank-{rank}")
        server = context()
        key = getattr(multiprocessing.forkserver._forkserver, "_forkserver_authkey", None)  # from Python 3.14 on
        process = server.Process(target=_child, args=(work, own, files[-1], rank, key))
        process.start()
        processes.append(process)
    return Job(processes, files, store)


def run(
    arguments: Sequence[Any],
    logs: Path,
    ranks: int = 1,
    fault: Fault | None = None,
    environment: dict[str, str] | None = None,
) -> list[Ended]:
    """The same, to its end."""
    with started(arguments, logs, ranks, fault, environment) as job:
        return job.end()


def in_ranks(work: Work, logs: Path, environment: dict[str, str], ranks: int = 2) -> None:
    """Calls ``work`` with its rank in each of several processes; it writes what it finds."""
    job = start_work(work, logs, ranks, environment)
    for ended in job.end():
        assert ended.status == 0, ended.said


def script(
    words: Sequence[Any], ranks: int, environment: dict[str, str], folder: Path = ROOT, alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """What a command that runs a Python script ends with, without the seconds in which libraries are loaded.

    Args:
        words: the script's path, and its arguments.
        environment: all of its variables.
        alone: whether it finds nothing of this repository, for a ``folder`` that is a copy.
    """
    with tempfile.TemporaryDirectory() as name:
        logs = Path(name)
        work = partial(_script, [str(word) for word in words], environment, folder, alone, logs)
        job = start_work(work, logs, ranks, {})
        status = [ended.status for ended in job.end(300.0)]
        assert None not in status, job.said()
        errors = [path.read_text(errors="replace") for path in sorted(logs.glob("*.errors"))]
        said = "".join(job.said(rank) for rank in range(ranks))
    return subprocess.CompletedProcess(list(words), next((s for s in status if s), 0), said, "".join(errors))


def _script(words: list[str], environment: dict[str, str], folder: Path, alone: bool, logs: Path, rank: int) -> int:
    os.dup2(os.open(logs / f"{rank}.errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    own = {k: os.environ[k] for k in MEETING if k in os.environ}
    os.environ.clear()
    os.environ.update({**environment, **own})
    os.chdir(folder)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if alone:
        for name in [name for name, module in sys.modules.items() if _is_of_this_repository(module)]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]  # would lend what is gone
        sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(ROOT) or ".venv" in path]
    sys.path[:0] = [str((folder / words[0]).parent), *paths]
    sys.argv = words
    if "OMP_NUM_THREADS" in os.environ:  # which torch has read before
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        runpy.run_path(words[0], None, "__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _is_of_this_repository(module: Any) -> bool:
    own = getattr(module, "__dict__", {})  # torch.ops would make up any attribute that is asked for
    paths = [own.get("__file__"), *own.get("__path__", ())]
    return any(path and Path(path).is_relative_to(ROOT) and ".venv" not in path for path in paths)


@contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[Job]:
    """A run that is killed at the end of the block if it has not ended."""
    job = start(*arguments, **options)
    try:
        yield job
    finally:
        job.end(0.0)


def _main(arguments: list[str], fault: Fault | None, rank: int) -> int:
    from train.main import main

    if fault is not None:
        fault(rank)
    return main(arguments)


def _child(work: Work, variables: dict[str, str], log: Path, rank: int, key: bytes | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(variables)
    # A fork that starts a fork asks the server that it came from, instead of starting another.
    server: Any = multiprocessing.forkserver._forkserver
    server.ensure_running, server._forkserver_authkey = lambda: None, key
    multiprocessing.set_start_method("fork", force=True)  # as it is in a process that nobody has forked
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    status = 70
    try:
        status = work(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
