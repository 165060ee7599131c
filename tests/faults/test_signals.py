"""Requests to stop at any moment: a valid checkpoint, the documented status, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.injections import (
    at_call,
    at_change,
    at_step,
    die,
    disk_is_slow,
    on_rank,
    quick_roll_call,
    send_itself,
    several,
)
from faults.processes import Fault, run, started
from support import ACCELERATE_LAUNCH, ROOT, checkpoint_digests, log_of, write_recipe

from train.checkpoint import verify
from train.extras.endurance.signals import NUMBERS, SECONDS_OF_ONE_INTERRUPT, Signals
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STOPPED

STEPS = 6
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
MOMENTS = {
    "model": ("train.model:build_model", 1),
    "forward": ("train.model:ModelWithLoss.forward", 3),
    "evaluation": ("train.loop:evaluate", 1),
    "saving": ("train.checkpoint:write_blocks", 1),
    "completing": ("train.checkpoint:complete", 1),
}
"""What is about to be called when the signal comes."""


def arguments(recipe: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    every_two = ("--eval_every_steps", 2, "--save_every_steps", 2)
    return ("--config", recipe, "--output_dir", output, *every_two, *more)


def good(output: Path) -> list[str]:
    folder = output / "checkpoints"
    for path in folder.iterdir():
        assert verify(path) is None, path
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happened to, by their number of ranks."""
    made = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        ended = run(arguments(write_recipe(folder), folder / "run"), folder / "logs", ranks)
        assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
        made[ranks] = folder / "run"
    return made


def test_handlers_are_given_back_but_one_who_was_asked_to_stop_is_not_ended_by_being_asked_again() -> None:
    """As in a notebook, whose own handlers interrupt a cell."""
    before, stop = [signal.getsignal(number) for number in NUMBERS], list[str]()
    with Signals(stop).listening():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in NUMBERS] == before
    with Signals(stop).listening():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop == ["SIGUSR1"] and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) in before


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_checkpoint_is_promised_as_far_as_it_is_sure(
    world_size: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A launcher sends SIGTERM to the others when it has lost a process, and none of them can save then."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with Signals([]).listening():
        os.kill(os.getpid(), signal.SIGTERM)
    if_whole = " if all processes are still there" if world_size == "2" else ""
    line = f"SIGTERM: the run stops at the next safe point, with a checkpoint{if_whole}"
    assert capfd.readouterr().err.splitlines() == ["", line]


def test_the_first_interrupt_after_another_request_ends_nothing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of someone who presses Ctrl-C while a scheduler's request waits for the end of a long step."""
    now, stop = 0.0, list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Signals(stop).listening():
        os.kill(os.getpid(), signal.SIGTERM)
        now = 60.0
        os.kill(os.getpid(), signal.SIGINT)
        now += SECONDS_OF_ONE_INTERRUPT
        os.kill(os.getpid(), signal.SIGINT)
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop == ["SIGTERM"]


READS = "train.extras.readers.corpus:load_corpus"


@pytest.mark.parametrize(
    ("target", "number"),
    [
        *(("train.data:tokenize", number) for number in SIGNALS[:2]),
        *(pytest.param("train.data:tokenize", number, marks=pytest.mark.slow) for number in SIGNALS[2:]),
        *(pytest.param(READS, number, marks=pytest.mark.slow) for number in SIGNALS),
    ],
)
def test_stops_at_once_while_data_is_prepared(tmp_path: Path, target: str, number: signal.Signals) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    [end] = run(its, tmp_path / "logs", fault=at_call(target, send_itself(number)))
    assert end.status == EXIT_STOPPED, end.said
    assert f"stopped by {number.name} while the data was prepared" in end.said
    assert json.loads((tmp_path / "run" / "stopped.json").read_text()) == {"step": 0, "signal": number.name}
    assert not any((tmp_path / "run" / "checkpoints").iterdir())
    [end] = run(its, tmp_path / "logs")
    assert end.status == EXIT_DONE, end.said
    assert not (tmp_path / "run" / "stopped.json").exists()


def test_a_run_from_scratch_that_is_stopped_before_it_begins_is_not_told_to_resume_another(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--max_steps", 1, "--num_epochs", "None")
    assert run(its, tmp_path / "logs")[0].status == EXIT_DONE
    stop = at_call(READS, send_itself(signal.SIGTERM))
    [end] = run((*its, "--resume", "never"), tmp_path / "logs", fault=stop)
    assert end.status == EXIT_STOPPED, end.said
    assert "run the same command again to resume from step 0." in end.said
    assert (tmp_path / "run" / "summary.json").exists() and not (tmp_path / "run" / "previous-1").exists()


def test_stops_at_once_while_workers_prepare_data(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--preprocessing_num_workers", 2)
    fault = at_call("train.tasks.causal_lm:Task.encode", sleep_for_long)
    with started(its, tmp_path / "logs", fault=fault) as job:
        job.wait_until(lambda: "Tokenising train" in job.said())
        time.sleep(1.0)
        job.signal(signal.SIGTERM)
        [end] = job.end()
    assert end.status == EXIT_STOPPED, end.said
    assert "Traceback" not in end.said, end.said
    assert json.loads((tmp_path / "run" / "stopped.json").read_text()) == {"step": 0, "signal": "SIGTERM"}


def sleep_for_long() -> None:
    time.sleep(20)


@pytest.mark.parametrize("rank_1", [die, sleep_for_long])
def test_signal_of_a_launcher_that_lost_a_rank_is_no_request_to_stop(
    tmp_path: Path, rank_1: Callable[[], None]
) -> None:
    """Launchers send SIGTERM to those that are left; a run that was asked to stop goes back into a queue."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = several(
        quick_roll_call(),
        on_rank(0, at_call("train.data:tokenize", sleep_for_long)),
        on_rank(1, at_call("train.data:tokenize", rank_1)),
        on_rank(1, at_call("train.extras.endurance.lost_rank:RankWatch.preparing", rank_1)),
    )
    with started(its, tmp_path / "logs", 2, fault) as job:
        job.wait_until(lambda: "device:" in job.said())
        time.sleep(1.5)
        job.signal(signal.SIGTERM)
        ended = job.end(of_ranks=[0])
    is_lost = rank_1 is die
    assert ended[0].status == (EXIT_ERROR if is_lost else EXIT_STOPPED), ended[0].said
    assert ("rank 1 (" in ended[0].said) == is_lost  # its host, or that it never came: it may die before it has told
    assert (tmp_path / "run" / "stopped.json").exists() != is_lost


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_that_is_asked_while_data_is_prepared_ends_all(tmp_path: Path, victim: int) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = several(quick_roll_call(), on_rank(victim, at_call("train.data:tokenize", send_itself(signal.SIGTERM))))
    ended = run(its, tmp_path / "logs", 2, fault)
    assert ended[victim].status == EXIT_STOPPED, ended[victim].said
    assert ended[1 - victim].status == EXIT_ERROR, ended[1 - victim].said
    assert f"rank {victim} ended before the others" in ended[1 - victim].said
    assert "Traceback" not in "".join(end.said for end in ended)


@pytest.mark.parametrize(
    "number", [*SIGNALS[:2], *(pytest.param(number, marks=pytest.mark.slow) for number in SIGNALS[2:])]
)
@pytest.mark.parametrize("moment", [pytest.param(m, marks=[pytest.mark.slow] * (m == "model")) for m in MOMENTS])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stops_with_a_checkpoint_and_goes_on(
    tmp_path: Path, whole: dict[int, Path], moment: str, number: signal.Signals, ranks: int
) -> None:
    """With several ranks only the last one is asked; all stop."""
    if number != signal.SIGTERM and moment != "saving":
        pytest.skip("each signal once, and SIGTERM everywhere")
    target, call = MOMENTS[moment]
    victim = 0 if moment == "completing" else ranks - 1
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = on_rank(victim, at_call(target, send_itself(number), call))
    for end in run(its, tmp_path / "logs", ranks, fault):
        assert end.status == EXIT_STOPPED, end.said
    assert good(tmp_path / "run")
    assert {end.status for end in run(its, tmp_path / "logs", ranks)} == {EXIT_DONE}
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole[ranks], STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "saves"), [(1, None), (2, 2), (1, 2), (2, None)])
def test_a_long_evaluation_is_cut_short_and_made_again(
    tmp_path: Path, whole: dict[int, Path], ranks: int, saves: int | None
) -> None:
    """A scheduler that asks does not wait for its end. A checkpoint is not due with it, or still being written."""
    its = (*arguments(write_recipe(tmp_path), tmp_path / "run"), "--save_every_steps", saves)
    asked = on_rank(ranks - 1, at_call("train.evaluation:score", send_itself(signal.SIGTERM), 2))
    slow = at_call("train.checkpoint:write_blocks", sleep_for_seconds)
    for end in run(its, tmp_path / "logs", ranks, several(asked, slow)):  # in the first call it is rehearsed
        assert end.status == EXIT_STOPPED, end.said
        assert "step 2: validation" not in end.said
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["step"] == 2
    assert good(tmp_path / "run") == ["step-00000002"]
    assert {end.status for end in run(its, tmp_path / "logs", ranks)} == {EXIT_DONE}
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole[ranks], STEPS)
    losses = [
        [(row["step"], row["loss"]) for row in log_of(folder) if row["kind"] == "evaluation"]
        for folder in (tmp_path / "run", whole[ranks])
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_asked_again_while_the_last_checkpoint_is_written(tmp_path: Path, whole: dict[int, Path]) -> None:
    """SIGTERM a second and a third time changes nothing."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = several(
        at_step(2, "begin", send_itself(signal.SIGTERM)),
        at_call("train.checkpoint:complete", send_itself(signal.SIGTERM, 2), 2),
        at_change(1, tmp_path / "run" / "checkpoints", disk_is_slow, until=1000),
    )
    [end] = run(its, tmp_path / "logs", fault=fault)
    assert end.status == EXIT_STOPPED, end.said
    assert good(tmp_path / "run") == ["step-00000002", "step-00000003"]
    assert [end.status for end in run(its, tmp_path / "logs")] == [EXIT_DONE]
    assert checkpoint_digests(tmp_path / "run", STEPS) == checkpoint_digests(whole[1], STEPS)


@pytest.mark.slow
def test_asked_again_and_again_until_it_is_gone_it_ends_with_its_status(tmp_path: Path) -> None:
    """Also while the interpreter winds down, for a second after ``stopped.json``."""
    its = map(str, arguments(write_recipe(tmp_path), tmp_path / "run", "--max_steps", 10**6, "--num_epochs", None))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen([sys.executable, ROOT / "train/main.py", *its], env=environment) as process:
        while not (tmp_path / "run/metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
    assert process.returncode == EXIT_STOPPED
    assert (tmp_path / "run/stopped.json").exists()


def test_second_interrupt_ends_at_once_and_costs_no_checkpoint(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--save_in_background", False)
    [end] = run(its, tmp_path / "logs", fault=at_step(3, "middle", interrupt_again_later))
    assert end.status == EXIT_INTERRUPTED, end.said
    assert "Traceback" not in end.said
    assert "ended at once" in end.said
    assert good(tmp_path / "run") == ["step-00000002"]


def interrupt_again_later() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(SECONDS_OF_ONE_INTERRUPT + 0.1)
    signal.raise_signal(signal.SIGINT)


def test_interrupt_that_the_launcher_passes_on_is_no_second_one(tmp_path: Path) -> None:
    """A terminal sends it to the launcher and to the ranks, and the launcher sends it to the ranks."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    [end] = run(its, tmp_path / "logs", fault=at_step(3, "middle", send_itself(signal.SIGINT, 2)))
    assert end.status == EXIT_STOPPED, end.said
    assert good(tmp_path / "run")[-1] == "step-00000004"  # the evaluation that was due then is left to whoever resumes


def test_run_that_shall_outlive_its_terminal_does(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = several(started_by_nohup(), at_step(3, "middle", send_itself(signal.SIGHUP)))
    [end] = run(its, tmp_path / "logs", fault=fault)
    assert end.status == EXIT_DONE, end.said


def started_by_nohup() -> Fault:
    return _started_by_nohup


def _started_by_nohup(rank: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_signal_before_anything_is_loaded_ends_the_process(tmp_path: Path) -> None:
    """Python's own answer: there is nothing to save."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    [end] = run(its, tmp_path / "logs", fault=at_call("train.main:parse", send_itself(signal.SIGTERM)))
    assert end.status == -signal.SIGTERM
    assert not (tmp_path / "run").exists()


def processes_of(output: Path) -> list[int]:
    """Processes that have the folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(output).encode() in command:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_launcher_that_dies_while_a_checkpoint_is_written_delays_no_stop(tmp_path: Path) -> None:
    """With it goes the store through which ranks tell each other, in the background, that their parts are written."""
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    fault = at_call("train.checkpoint:write_blocks", sleep_for_seconds)
    with started(its, tmp_path / "logs", 2, fault) as job:
        job.wait_until(lambda: list((tmp_path / "run").glob("checkpoints/.partial-*")))
        job.store = None
        for rank in (0, 1):
            job.signal(signal.SIGTERM, rank)
        ended = job.end(60.0)
    assert [end.status for end in ended] == [EXIT_STOPPED] * 2, ended[0].said
    assert good(tmp_path / "run") in (["step-00000002"], ["step-00000003"])  # during the evaluation, or after it


def sleep_for_seconds() -> None:
    time.sleep(3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_launcher_that_is_signalled_leaves_a_checkpoint_and_no_process(tmp_path: Path, number: int) -> None:
    output = tmp_path / "run"
    launch_file = ROOT / "accelerate_configs" / "ddp.yaml"
    command = [*ACCELERATE_LAUNCH, "--config_file", str(launch_file), "--num_processes", "2"]
    its = arguments(write_recipe(tmp_path), output, "--num_epochs", 100000)
    line = [str(part) for part in (*command, "train/main.py", *its)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    launcher = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 120
    while not list((output / "checkpoints").glob("step-*")) and launcher.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    launcher.send_signal(number)
    said = launcher.communicate(timeout=120)[0].decode()
    while processes_of(output) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(output) == []
    assert launcher.returncode != 0
    newest = good_after_partials(output)[-1]
    assert (output / "stopped.json").exists(), said[-3000:]  # of SIGKILL, too: the processes follow their launcher
    assert int(newest[5:]) >= 2


def good_after_partials(output: Path) -> list[str]:
    """Checkpoints, each of which is intact; a partial one may be beside them."""
    folder = output / "checkpoints"
    found = sorted(path for path in folder.glob("step-*"))
    assert all(verify(path) is None for path in found)
    return [path.name for path in found]


def test_signal_to_a_running_process_from_outside(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--num_epochs", 100000)
    with started(its, tmp_path / "logs", 2) as job:
        job.wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*")))
        job.signal(signal.SIGUSR1, rank=1)
        ended = job.end()
    assert [end.status for end in ended] == [EXIT_STOPPED] * 2, ended[0].said
    assert good(tmp_path / "run")


def test_a_run_that_is_done_leaves_no_sign_that_it_was_stopped(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run")
    assert run(its, tmp_path / "logs")[0].status == EXIT_DONE
    stop = at_call("train.data:prepare_data", send_itself(signal.SIGTERM))
    assert run(its, tmp_path / "logs", fault=stop)[0].status == EXIT_STOPPED
    assert (tmp_path / "run" / "stopped.json").exists()
    assert run(its, tmp_path / "logs")[0].status == EXIT_DONE
    assert not (tmp_path / "run" / "stopped.json").exists()


@pytest.mark.slow
def test_a_stop_before_the_first_own_checkpoint_sends_nobody_to_one(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert run(arguments(recipe, tmp_path / "other", "--save_total_limit", 9), tmp_path / "logs")[0].status == EXIT_DONE
    given = ("--resume", tmp_path / "other" / "checkpoints" / "step-00000004")
    stop = at_call("train.loop:evaluate", send_itself(signal.SIGTERM))
    [ended] = run(arguments(recipe, tmp_path / "run", *given), tmp_path / "logs", fault=stop)
    assert ended.status == EXIT_STOPPED
    assert "stopped by SIGTERM after step 4: run the same command again to resume from step 4." in ended.said


def _asked_while_one_rank_has_left_the_preparation(folder: Path, rank: int) -> None:
    """Both ranks get the signal when rank 0 trains already and rank 1 has not seen yet that all are prepared."""
    from train.data import PreparedData
    from train.extras.endurance.lost_rank import RankWatch

    left, batches, until, calls = folder / "left", PreparedData.training_batches, RankWatch._until, [0]

    def ask() -> None:
        while not left.exists():
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    def late(self: Any, succeeds: Any, *patience: Any) -> None:
        calls[0] += 1
        is_last, since = calls[0] == 3, time.monotonic()
        until(self, succeeds, *patience)
        while is_last and not (left.exists() and time.monotonic() > since + 1.0):
            until(self, succeeds, *patience)
            time.sleep(0.05)

    def leave(*args: Any) -> Any:
        left.touch()
        ask()
        return batches(*args)

    if rank == 0:
        PreparedData.training_batches = leave  # type: ignore
    else:
        RankWatch._until = late  # type: ignore
        threading.Thread(target=ask, daemon=True).start()


@pytest.mark.slow
def test_a_stop_while_ranks_leave_the_preparation_stops_all_of_them(tmp_path: Path) -> None:
    fault = partial(_asked_while_one_rank_has_left_the_preparation, tmp_path)
    ended = run(arguments(write_recipe(tmp_path), tmp_path / "run"), tmp_path / "logs", ranks=2, fault=fault)
    assert [end.status for end in ended] == [EXIT_STOPPED] * 2, "".join(end.said for end in ended)
    assert (tmp_path / "run" / "stopped.json").exists()


def _store_fails_once(rank: int) -> None:
    from train.extras.endurance.lost_rank import Store

    plain, failed = Store.set, list[str]()

    def fails(self: Any, key: str, value: str) -> Any:
        if rank == 1 and key.startswith("checkpoint 1") and not failed:
            failed.append(key)
            raise torch.distributed.DistNetworkError("connection reset by peer")
        return plain(self, key, value)

    Store.set = fails


@pytest.mark.slow
def test_a_store_that_fails_once_costs_no_checkpoint(tmp_path: Path) -> None:
    its = arguments(write_recipe(tmp_path), tmp_path / "run", "--distributed_timeout_seconds", 30)
    ended = run(its, tmp_path / "logs", ranks=2, fault=_store_fails_once)
    assert [end.status for end in ended] == [EXIT_DONE] * 2, "".join(end.said for end in ended)
