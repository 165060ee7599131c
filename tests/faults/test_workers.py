"""Processes that load batches: signals to their group leave a checkpoint, and one that dies is replaced."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from faults.injections import at_call, at_step, die, several
from faults.processes import KILLED, Fault, run, started
from faults.stopping import SIGNALS, STEPS, arguments, in_a_group, moments, whole_run
from support import ACCELERATE_LAUNCH, ROOT, checkpoint_digests, sampled

from train.checkpoint import verify
from train.records import EXIT_DONE, EXIT_STOPPED


def one_worker_dies() -> None:
    """As if the kernel had ended it for want of memory."""
    worker = active_children()[0]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "number"), sampled([*((2, number) for number in SIGNALS), *((n, SIGNALS[0]) for n in (0, 8))], 2)
)
def test_signal_to_the_group_of_a_launcher_leaves_a_checkpoint_and_no_process(
    tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    """As a closed terminal sends it: the launcher passes on to two ranks what they have got already."""
    output, launch_file = tmp_path / "run", ROOT / "accelerate_configs" / "ddp.yaml"
    its = (*arguments(tmp_path, output, workers), "--num_epochs", 100000)
    command = [*ACCELERATE_LAUNCH, "--config_file", launch_file, "--num_processes", 2, "train/main.py", *its]
    with (tmp_path / "log").open("w") as log:
        words = list(map(str, command))
        launcher = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    until(lambda: list((output / "checkpoints").glob("step-*")))
    os.killpg(launcher.pid, number)
    assert launcher.wait(60) != EXIT_DONE
    until(lambda: not processes_with(output))
    said = (tmp_path / "log").read_text()
    assert (output / "stopped.json").exists(), said
    assert json.loads((output / "stopped.json").read_text())["signal"] in (number.name, "SIGTERM"), said
    newest = sorted((output / "checkpoints").glob("step-*"))[-1]
    assert verify(newest) is None
    assert "DataLoader worker (pid" not in said


def processes_with(output: Path) -> list[str]:
    """Processes that have the folder on their command line."""
    found = subprocess.run(["pgrep", "-f", str(output)], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_worker_that_is_killed_is_replaced(tmp_path: Path, whole: Path) -> None:
    its = arguments(tmp_path, tmp_path / "run", 2)
    [end] = run(its, tmp_path / "logs", fault=at_call("train.model:ModelWithLoss.forward", one_worker_dies, 6))
    assert end.status == EXIT_DONE, end.said
    assert end.said.count("a process that loads batches ended (SIGKILL): new ones continue") == 1
    assert "--dataloader_num_workers" in end.said
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.slow
def test_worker_that_is_killed_while_others_start_is_noticed(tmp_path: Path, whole: Path) -> None:
    """Without the rehearsal, which wants one batch: perhaps the other worker's."""
    its = arguments(tmp_path, tmp_path / "run", 2, "--rehearse", False)
    started_all = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__"
    [end] = run(its, tmp_path / "logs", fault=at_call(started_all, one_worker_dies, after=True))
    assert end.status == EXIT_DONE, end.said
    assert "a process that loads batches ended (SIGKILL)" in end.said
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("moment", ["starting", "loading", "evaluating", "saving"])
def test_worker_that_is_killed_at_any_moment_is_replaced(
    tmp_path: Path, whole: Path, moment: str, workers: int
) -> None:
    its = arguments(tmp_path, tmp_path / "run", workers)
    target, call = moments(workers)["loading" if moment == "starting" else moment]
    if moment == "starting":
        call = 1
    if moment == "evaluating":
        target, call = "train.evaluation:score", 2
    [end] = run(its, tmp_path / "logs", fault=at_call(target, one_worker_dies, call))
    assert end.status == EXIT_DONE, end.said
    assert "Traceback" not in end.said
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.slow
def test_workers_that_always_die_are_done_without(tmp_path: Path, whole: Path) -> None:
    """Because of one example, or of shared memory that is too small."""
    its = arguments(tmp_path, tmp_path / "run", 1)
    [end] = run(its, tmp_path / "logs", fault=workers_die())
    assert end.status == EXIT_DONE, end.said
    assert "this process loads the rest itself" in end.said
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_batches_that_do_not_fit_into_shared_memory_are_loaded_without(tmp_path: Path, whole: Path, first: int) -> None:
    """As in a container with 64 MB of it. torch would wait for them for ever."""
    its = arguments(tmp_path, tmp_path / "run", 2)
    [end] = run(its, tmp_path / "logs", fault=partial(shared_memory_is_full, first))
    assert end.status == EXIT_DONE, end.said
    assert end.said.count("/dev/shm is full (docker run --shm-size: more): this process loads the rest itself") == 1
    assert "Traceback" not in end.said
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole, STEPS)


def shared_memory_is_full(first: int, rank: int) -> None:
    """For every worker, from its batch ``first`` on."""
    from train.batching import _Fetch

    plain, run_itself, made = _Fetch.__getitem__, os.getpid(), []

    def fetch(self: Any, ids: Any) -> Any:
        made.append(ids)
        if os.getpid() != run_itself and len(made) > first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        return plain(self, ids)

    _Fetch.__getitem__ = fetch


def workers_die() -> Fault:
    """Every worker, at its first example."""
    return _workers_die


def _workers_die(rank: int) -> None:
    from train.batching import _Fetch

    plain, run_itself = _Fetch.__getitem__, os.getpid()

    def fetch(self: Any, ids: Any) -> Any:
        if os.getpid() != run_itself:
            die()
        return plain(self, ids)

    _Fetch.__getitem__ = fetch


def test_error_of_an_example_is_not_taken_for_a_dead_worker(tmp_path: Path) -> None:
    [end] = run(arguments(tmp_path, tmp_path / "run", 2), tmp_path / "logs", fault=at_call(COLLATE, fail, 9))
    assert end.status not in (EXIT_DONE, EXIT_STOPPED)
    assert "DataLoader worker" in end.said  # the calls before were made by the run itself: for its rehearsal
    assert "this example is broken" in end.said
    assert "a process that loads batches" not in end.said


COLLATE = "train.tasks.causal_lm:Task.collate"


def fail() -> None:
    raise ValueError("this example is broken")


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    its = (*arguments(tmp_path, tmp_path / "run", 2), "--num_epochs", 100000)
    with started(its, tmp_path / "logs", fault=in_a_group()) as job:
        job.wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*")))
        group = job.processes[0].pid
        assert group is not None
        job.signal(signal.SIGKILL)
        assert job.end()[0].status == KILLED
    until(lambda: not members(group), 20)


@pytest.mark.slow
def test_workers_end_that_start_after_their_run_is_killed(tmp_path: Path) -> None:
    """They would not know who their parent was, and wait for ever for what to load."""
    fault = several(in_a_group(), at_call(WORKER_BEGINS, lag))
    with started(arguments(tmp_path, tmp_path / "run", 2), tmp_path / "logs", fault=fault) as job:
        group = job.processes[0].pid
        assert group is not None
        job.wait_until(lambda: (tmp_path / "run").is_dir() and len(members(group)) > 2)
        job.signal(signal.SIGKILL)
        assert job.end()[0].status == KILLED
    until(lambda: not members(group), 20)


WORKER_BEGINS = "torch.utils.data._utils.worker:_worker_loop"


def lag() -> None:
    time.sleep(2)


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = entry.read_text().rpartition(")")[2].split()
            found += [int(entry.parent.name)] if int(its_group) == group and state != "Z" else []
    return found


def test_stop_does_not_wait_for_workers_that_hang(tmp_path: Path) -> None:
    """A launcher kills what has not ended in 30 s, which is less than eight workers may take, one after the other."""
    output = tmp_path / "run"
    its = (*arguments(tmp_path, output, 8), "--num_epochs", 100000)
    fault = several(in_a_group(), at_step(4, "begin", stop_with_workers_that_hang))
    with started(its, tmp_path / "logs", fault=fault) as job:
        group = job.processes[0].pid
        assert group is not None
        job.wait_until(lambda: list((output / "checkpoints").glob("step-00000005")))
        try:
            until(lambda: (output / "stopped.json").exists(), 15)  # torch waits for each worker for 5 s
        finally:
            os.killpg(group, signal.SIGCONT)
        assert job.end()[0].status == EXIT_STOPPED


def stop_with_workers_that_hang() -> None:
    for worker in active_children():
        os.kill(worker.pid or 0, signal.SIGSTOP)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_run_that_fails_does_not_wait_for_its_workers(tmp_path: Path) -> None:
    """They obey the one who started them, and nobody else; here Python's own way to end them."""
    code = f"""
        import sys, train.loop, train.main
        def fail(*arguments): raise ValueError("a bug")
        train.loop.advance = fail
        sys.exit(train.main.main({[str(word) for word in arguments(tmp_path, tmp_path / "run", 2)]!r}))
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "a bug" in done.stderr
    assert not processes_with(tmp_path / "run")
