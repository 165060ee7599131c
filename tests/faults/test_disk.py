"""Disks that are full, read-only or slow, on all ranks or one: earlier checkpoints stay, and nobody waits forever."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.injections import (
    at_call,
    at_change,
    at_open,
    at_step,
    counting_changes,
    die,
    disk_fails,
    disk_is_full,
    disk_is_slow,
    on_rank,
    quick_roll_call,
    send_itself,
    several,
    without_privileges,
)
from faults.processes import FSDP2, Ended, run
from support import EVERY_CASE, checkpoint_digests, write_recipe

from train.checkpoint import verify
from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED

STEPS = 6
FOREVER = 10**6
EVERY = 1 if EVERY_CASE else 8
LAUNCH: dict[int, dict[str, str]] = {1: {}, 2: FSDP2}
"""By the number of ranks; the second writes only what is sharded."""


def arguments(folder: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    return ("--config", write_recipe(folder), "--output_dir", output, "--save_every_steps", 1, *more)


def names(output: Path) -> list[str]:
    """What lies among the checkpoints; each whole one is intact."""
    folder = output / "checkpoints"
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert all(verify(folder / name) is None for name in found if name.startswith("step-"))
    return found


def assert_no_traceback(ended: list[Ended]) -> None:
    for end in ended:
        assert end.status is not None, f"it hangs: {end.said}"
        assert "Traceback" not in end.said, end.said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, list[list[str]]]]:
    """A run without a fault, and what each of its ranks changed among the checkpoints."""
    made: dict[int, tuple[Path, list[list[str]]]] = {}

    def of(ranks: int) -> tuple[Path, list[list[str]]]:
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
            output, log = folder / "run", folder / "changes"
            fault = counting_changes(output / "checkpoints", log)
            ended = run(arguments(folder, output), folder / "logs", ranks, fault, LAUNCH[ranks])
            assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
            made[ranks] = output, [Path(f"{log}.{rank}").read_text().splitlines() for rank in range(ranks)]
        return made[ranks]

    return of


@pytest.mark.parametrize(
    ("ranks", "victim", "every"),
    [
        (1, 0, 31),
        pytest.param(1, 0, 3 * EVERY, marks=pytest.mark.slow),
        pytest.param(2, 1, 4 * EVERY, marks=pytest.mark.slow),
        pytest.param(2, 0, 7 * EVERY, marks=pytest.mark.slow),
    ],
)
def test_one_write_that_fails_costs_one_checkpoint(
    tmp_path: Path, whole: Callable[[int], tuple[Path, list[list[str]]]], ranks: int, victim: int, every: int
) -> None:
    """The run says so, goes on, and ends like any other."""
    output, changes = whole(ranks)
    at_the_end = next((n for n, line in enumerate(changes[0]) if "step-00000006" in line), 0) if victim == 0 else 0
    assert len(changes[victim]) > STEPS
    numbers = range(2 - victim, at_the_end or len(changes[victim]) * 4 // STEPS)
    for number in numbers[::every]:
        folder, name = tmp_path / "runs" / str(number), tmp_path / str(number)
        name.mkdir()
        fault = on_rank(victim, at_change(number, folder / "checkpoints", disk_is_full))
        ended = run(arguments(name, folder), name / "logs", ranks, fault, LAUNCH[ranks])
        assert_no_traceback(ended)
        assert {end.status for end in ended} == {EXIT_DONE}, (changes[victim][number - 1], ended[0].said)
        assert checkpoint_digests(folder, STEPS) == checkpoint_digests(output, STEPS)
        assert names(folder) == ["step-00000005", "step-00000006"] or "could not be" in ended[0].said
        assert not [n for n in names(folder) if not n.startswith("step-")]


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_checkpoint_that_failed_is_told_before_the_next_one_is_due(tmp_path: Path, ranks: int, victim: int) -> None:
    folder = tmp_path / "run"
    fault = several(
        on_rank(
            victim, at_change(2 - victim, folder / "checkpoints", disk_is_full)
        ),  # the first one's first: its folder
        at_call("train.loop:advance", wait_a_second, 5),  # in which the thread that writes step 4 has failed
        at_call("train.loop:advance", die, 6),
    )
    its = arguments(tmp_path, folder, "--save_every_steps", 4, "--log_every_steps", 1)
    ended = run(its, tmp_path / "logs", ranks, fault, LAUNCH[ranks])
    assert ended[0].said.count("Training continues, and the next checkpoint is tried") == 1


def wait_a_second() -> None:
    time.sleep(1)


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_disk_that_stays_full_ends_the_run_and_keeps_what_was_there(
    tmp_path: Path, whole: Callable[[int], tuple[Path, list[list[str]]]], ranks: int, victim: int
) -> None:
    output, changes = whole(ranks)
    first = next((n for n, line in enumerate(changes[victim], 1) if "step-00000004" in line), len(changes[victim]) // 2)
    folder = tmp_path / "run"
    fault = on_rank(victim, at_change(first, folder / "checkpoints", disk_is_full, until=FOREVER))
    ended = run(arguments(tmp_path, folder), tmp_path / "logs", ranks, fault, LAUNCH[ranks])
    assert_no_traceback(ended)
    assert {end.status for end in ended} == {EXIT_ERROR}
    assert "No space left on device" in ended[0].said
    assert "Earlier checkpoints are untouched" in ended[0].said
    assert "step-00000003" in names(folder) or "step-00000002" in names(folder)
    ended = run(arguments(tmp_path, folder), tmp_path / "logs", ranks, environment=LAUNCH[ranks])
    assert {end.status for end in ended} == {EXIT_DONE}
    assert checkpoint_digests(folder, STEPS) == checkpoint_digests(output, STEPS)
    assert names(folder) == ["step-00000005", "step-00000006"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB; a checkpoint of the tests' model takes 130."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_disk_that_is_really_full(tmp_path: Path, small_disk: Path) -> None:
    keep_all = ("--save_total_limit", 100)
    [end] = run(arguments(tmp_path, small_disk / "run", *keep_all), tmp_path / "logs")
    assert end.status == EXIT_ERROR
    assert "No space left on device" in end.said
    assert "Traceback" not in end.said
    kept = names(small_disk / "run")
    assert kept and all(name.startswith("step-") for name in kept)
    for name in kept[:-1]:  # as a person would
        subprocess.run(["rm", "-r", small_disk / "run" / "checkpoints" / name], check=True)
    [end] = run(arguments(tmp_path, small_disk / "run", "--save_total_limit", 1), tmp_path / "logs")
    assert f"at step {int(kept[-1][5:])}" in end.said


def leave(num_bytes: int, disk: Path) -> None:
    """Another program fills a disk up to this."""
    found = os.statvfs(disk)
    (disk / "other").write_bytes(bytes(found.f_bavail * found.f_frsize - num_bytes))


@pytest.mark.parametrize("num_bytes", [8_000, 24_000, 48_000])
def test_disk_that_is_full_when_final_is_written(tmp_path: Path, small_disk: Path, num_bytes: int) -> None:
    """Files of weights and tokenizers are written by Rust, whose errors are none of Python's."""
    fills = at_call("train.loop:evaluate", partial(leave, num_bytes, small_disk), after=True)
    flags = ("--save_every_steps", "None", "--save_total_limit", 1, "--max_steps", 2, "--num_epochs", "None")
    [end] = run(arguments(tmp_path, small_disk / "run", *flags), tmp_path / "logs", fault=fills)
    assert end.status == EXIT_ERROR
    assert re.search(r"error: .* cannot be written: (No space left on device|File too large)", end.said), end.said
    assert "Traceback" not in end.said and not list(small_disk.rglob(".partial*"))
    assert "Training is done and its checkpoint is written" in end.said
    (small_disk / "other").unlink()
    [end] = run(arguments(tmp_path, small_disk / "run", *flags), tmp_path / "logs")
    assert end.status == EXIT_DONE, end.said


def test_disk_that_is_full_when_a_run_says_that_it_has_stopped(tmp_path: Path, small_disk: Path) -> None:
    """Its checkpoint is whole: schedulers have to see the status of a stop, and a person what to do."""
    fills = at_call("train.checkpoint:rotate", partial(leave, 0, small_disk), after=True)
    stops = at_step(1, "begin", send_itself(signal.SIGTERM))
    [end] = run(
        arguments(tmp_path, small_disk / "run", "--save_every_steps", "None"),
        tmp_path / "logs",
        fault=several(fills, stops),
    )
    assert end.status == EXIT_STOPPED, end.said
    assert "after step 2; a checkpoint is written: run the same command again to resume from step 2" in end.said
    assert names(small_disk / "run") == ["step-00000002"] and not (small_disk / "run" / "stopped.json").exists()


def make_read_only(folder: Path) -> None:
    folder.chmod(0o555)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_directory_that_becomes_read_only(tmp_path: Path, ranks: int) -> None:
    output = tmp_path / "run"
    lock = at_call("train.checkpoint:rotate", partial(make_read_only, output / "checkpoints"), 2, after=True)
    fault = several(without_privileges(), on_rank(0, lock))
    ended = run(arguments(tmp_path, output), tmp_path / "logs", ranks, fault)
    (output / "checkpoints").chmod(0o777)
    assert_no_traceback(ended)
    assert {end.status for end in ended} == {EXIT_ERROR}, ended[0].said
    assert "Permission denied" in ended[0].said
    assert names(output) == ["step-00000001", "step-00000002"]


def test_directory_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    [end] = run(arguments(tmp_path, tmp_path / "locked" / "run"), tmp_path / "logs", fault=without_privileges())
    assert end.status == EXIT_ERROR
    assert "output_dir" in end.said and "Permission denied" in end.said
    assert "Traceback" not in end.said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_disk_does_not_stop_training(
    tmp_path: Path, whole: Callable[[int], tuple[Path, list[list[str]]]], ranks: int
) -> None:
    """Each change takes 50 ms longer, a checkpoint a second: steps go on meanwhile, and the end is the same."""
    output = tmp_path / "run"
    fault = on_rank(ranks - 1, at_change(1, output / "checkpoints", disk_is_slow, until=FOREVER))
    few = ("--save_every_steps", 3)
    ended = run(arguments(tmp_path, output, *few), tmp_path / "logs", ranks, fault, LAUNCH[ranks])
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    assert checkpoint_digests(output, STEPS) == checkpoint_digests(whole(ranks)[0], STEPS)
    assert json.loads((output / "summary.json").read_text())["checkpoints_in_background"] == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_copy_that_does_not_fit_into_host_memory_is_not_made(
    tmp_path: Path, whole: Callable[[int], tuple[Path, list[list[str]]]], ranks: int
) -> None:
    """Some rank has no room for it: all wait for the disk instead."""
    output = tmp_path / "run"
    fault = on_rank(0, no_room_in_host_memory)
    ended = run(arguments(tmp_path, output), tmp_path / "logs", ranks, fault, LAUNCH[ranks])
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    assert ended[0].said.count("no room for a copy of the state") == 1
    assert checkpoint_digests(output, STEPS) == checkpoint_digests(whole(ranks)[0], STEPS)
    assert json.loads((output / "summary.json").read_text())["checkpoints_in_background"] == 0


def no_room_in_host_memory(rank: int) -> None:
    import train.extras.endurance.checkpoints as checkpoints

    checkpoints.free_host_bytes = lambda: 1000  # type: ignore


def test_rotation_cannot_take_the_last_good_one(tmp_path: Path) -> None:
    """One checkpoint is kept, and every second save fails: at any time the newest good one is still there."""
    output = tmp_path / "run"
    few = ("--save_total_limit", 1)
    for number in (2, 4):
        fault = at_call("train.checkpoint:complete", disk_is_full, number)
        [end] = run(arguments(tmp_path, output, *few, "--max_steps", STEPS - 1), tmp_path / "logs", fault=fault)
        assert end.status == EXIT_DONE, end.said
        assert re.search(r"step-\d{8} could not be written", end.said)
        assert len(names(output)) == 1
        subprocess.run(["rm", "-r", output], check=True)


def test_rows_that_the_disk_refuses_are_written_later(tmp_path: Path) -> None:
    output = tmp_path / "run"
    at = ("--log_every_steps", 1, "--save_every_steps", STEPS)
    fault = at_open(output / "metrics.jsonl", disk_fails, (2, 3))
    [end] = run(arguments(tmp_path, output, *at), tmp_path / "logs", fault=fault)
    assert end.status == EXIT_DONE and "Traceback" not in end.said, end.said
    assert end.said.count("metrics.jsonl: cannot be written: Input/output error") == 1
    trained = [row["step"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train"]
    assert trained == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk_beside_checkpoints_is_one_message(tmp_path: Path, ranks: int) -> None:
    output = tmp_path / "run"
    fault = several(quick_roll_call(), on_rank(0, at_call("train.state:TrainingState.save_pretrained", disk_is_full)))
    ended = run(arguments(tmp_path, output), tmp_path / "logs", ranks, fault, LAUNCH[ranks])
    assert_no_traceback(ended)
    assert ended[0].status == EXIT_ERROR
    assert "cannot be written: No space left on device. Training is done and its checkpoint" in ended[0].said
    assert not list(output.glob(".partial-*"))
