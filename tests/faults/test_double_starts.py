"""The same command started twice at the same moment: one trains, the other says who does, and nothing is harmed."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.injections import at_step
from faults.processes import Fault, run, start
from support import EVERY_CASE, checkpoint_digests, final_files, log_of, write_recipe

from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

STEPS = 6
SECONDS_TO_START = 0.3
FIVES = 10 if EVERY_CASE else 1


def begin_at(moment: float) -> Fault:
    """Waits until then."""
    return partial(_begin_at, moment)


def _begin_at(moment: float, rank: int) -> None:
    time.sleep(max(0.0, moment - time.time()))


def start_twice(its: tuple[Any, ...], folder: Path) -> None:
    """Starts a command twice, and looks at what the processes say."""
    fault = begin_at(time.time() + SECONDS_TO_START)
    jobs = [start(its, folder / f"logs-{number}", fault=fault) for number in range(2)]
    pids = [job.processes[0].pid for job in jobs]
    ended = [job.end()[0] for job in jobs]
    said, statuses = [end.said for end in ended], [end.status for end in ended]
    assert EXIT_DONE in statuses, said
    other = 1 - statuses.index(EXIT_DONE)
    if statuses[other] == EXIT_DONE:  # on a busy machine one may begin when the other has ended
        assert sum("nothing to do: " in text for text in said) == 1, said
        return
    assert statuses[other] == EXIT_ERROR, said
    assert f"run is in use by process {pids[1 - other]} on " in said[other], said
    assert "Traceback" not in said[other] and "step 2:" not in said[other], said


@pytest.mark.parametrize(
    ("times", "folders"),
    [
        pytest.param(1, ["killed"], id="once"),
        *(pytest.param(5, ["new", "killed"], marks=pytest.mark.slow, id=f"more {n}") for n in range(FIVES)),
    ],
)
def test_started_twice_at_once(tmp_path: Path, times: int, folders: list[str]) -> None:
    """In a new folder, and in that of a run which was killed, whose name is still in the lock."""
    flags = ("--config", write_recipe(tmp_path), "--save_every_steps", 2, "--eval_every_steps", 2)
    whole = tmp_path / "whole" / "run"
    assert run((*flags, "--output_dir", whole), tmp_path / "logs")[0].status == EXIT_DONE
    for number in range(times):
        for kind in folders:
            folder = tmp_path / f"{number}-{kind}"
            its = (*flags, "--output_dir", folder / "run")
            if kind == "killed":
                run(its, tmp_path / "logs", fault=at_step(3, "begin"))
            start_twice(its, folder)
            assert checkpoint_digests(folder / "run", STEPS) == checkpoint_digests(whole, STEPS)
            assert final_files(folder / "run") == final_files(whole)
            assert log_of(folder / "run") == log_of(whole)


def test_a_run_without_its_checkpoints_says_that_it_starts_from_scratch_and_keeps_the_old_files(tmp_path: Path) -> None:
    flags = ("--config", write_recipe(tmp_path), "--save_every_steps", 2, "--output_dir", tmp_path / "run")
    assert run(flags, tmp_path / "logs")[0].status == EXIT_DONE
    log, final = log_of(tmp_path / "run"), final_files(tmp_path / "run")
    for number in (1, 2):  # finished, and cut off after its checkpoints
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        if number == 2:
            (tmp_path / "run" / "summary.json").unlink()
        [ended] = run(flags, tmp_path / "logs")
        assert ended.status == EXIT_DONE
        assert "has no checkpoint: the run starts from scratch" in ended.said
        assert f"the earlier run's files were moved to {tmp_path / 'run' / f'previous-{number}'}" in ended.said
        assert log_of(tmp_path / "run" / f"previous-{number}") == log
        assert final_files(tmp_path / "run") == final


def test_a_finished_run_whose_model_was_moved_away_keeps_its_log(tmp_path: Path) -> None:
    flags = ("--config", write_recipe(tmp_path), "--save_every_steps", 4, "--output_dir", tmp_path / "run")
    assert run(flags, tmp_path / "logs")[0].status == EXIT_DONE
    log = log_of(tmp_path / "run")
    (tmp_path / "run" / "final").rename(tmp_path / "deployed")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    [ended] = run(flags, tmp_path / "logs")
    assert ended.status == EXIT_DONE and "has no checkpoint: the run starts from scratch" in ended.said
    assert log_of(tmp_path / "run" / "previous-1") == log


@pytest.mark.slow
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_checkpoint_from_elsewhere_does_not_mix_two_logs(tmp_path: Path, is_finished: bool) -> None:
    flags = ("--config", write_recipe(tmp_path), "--save_every_steps", 2, "--save_total_limit", 9)
    here, other = tmp_path / "here", tmp_path / "other"
    assert run((*flags, "--output_dir", other), tmp_path / "logs")[0].status == EXIT_DONE
    assert run((*flags, "--output_dir", here), tmp_path / "logs")[0].status == EXIT_DONE
    shutil.rmtree(here / "checkpoints")
    if not is_finished:
        (here / "summary.json").unlink()
    log = log_of(here)
    [ended] = run(
        (*flags, "--output_dir", here, "--resume", other / "checkpoints" / "step-00000004"), tmp_path / "logs"
    )
    if is_finished:
        assert ended.status == EXIT_ERROR and "is not of the run in" in ended.said and log_of(here) == log
    else:
        assert ended.status == EXIT_DONE and log_of(here / "previous-1") == log
        assert {row["step"] for row in read_metrics(here / "metrics.jsonl")} <= {4, 5, 6}
