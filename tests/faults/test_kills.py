"""A run that is killed anywhere, and started again by the same command, ends as if nothing had been.

The same means equal bytes of weights and optimizer, equal schedule and progress, and the same examples at every step.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from faults.injections import (
    Places,
    at_call,
    at_change,
    at_step,
    counting_changes,
    die,
    examples_to,
    on_rank,
    quick_roll_call,
    several,
)
from faults.processes import FSDP2, KILLED, Ended, Fault, Job, run, started
from support import EVERY_CASE, checkpoint_digests, final_files, log_of, sampled, write_recipe

from train.checkpoint import verify
from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

STEPS = 6
"""Two epochs of 20 examples in global batches of 8: windows of 8, 8 and 4."""
PACKED_STEPS = 4
VARIANTS: dict[str, tuple[int, tuple[Any, ...], int]] = {
    "1 rank": (1, (), STEPS),
    "1 rank, 2 workers": (1, ("--dataloader_num_workers", 2), STEPS),
    "1 rank, packing": (1, ("--packing", True), PACKED_STEPS),
    "2 ranks": (2, (), STEPS),
    "2 ranks, 2 workers": (2, ("--dataloader_num_workers", 2), STEPS),
    "2 ranks, packing": (2, ("--packing", True, "--dataloader_num_workers", 2), PACKED_STEPS),
}
"""Ranks, flags and steps."""
SHARDED = "2 ranks, sharded"
VARIANTS_OF_SAVING = {name: VARIANTS[name] for name in ("1 rank", "2 ranks")} | {SHARDED: (2, (), STEPS)}
slowly = partial(pytest.param, marks=pytest.mark.slow)
EVERY = 1 if EVERY_CASE else 24
"""Of so many changes to the disk a run is killed before one (in a save: of eight), and at a third of the steps."""

MOST = [variant for variant in VARIANTS if EVERY_CASE or variant != "2 ranks, 2 workers"]


class Runs:
    """Runs of one variant in folders of their own, beside one that nothing happens to."""

    def __init__(
        self, folder: Path, environment: dict[str, str], ranks: int, flags: tuple[Any, ...], steps: int
    ) -> None:
        self.folder, self.ranks, self.steps, self._environment = folder, ranks, steps, environment
        self._flags = ("--config", write_recipe(folder), "--save_every_steps", 1, *flags)
        self.whole = folder / "whole"
        assert [end.status for end in self.run("whole")] == [EXIT_DONE] * ranks

    def run(self, name: str, fault: Fault | None = None) -> list[Ended]:
        """All processes of a run in the folder of that name, to their end."""
        with self.started(name, fault) as job:
            return job.end()

    def started(self, name: str, fault: Fault | None = None, timeout_seconds: int = 600) -> AbstractContextManager[Job]:
        """The same, not waited for."""
        faults = several(quick_roll_call(), examples_to(self.folder / f"{name}-examples"), *([fault] if fault else []))
        arguments = (*self._flags, "--output_dir", self.folder / name, "--distributed_timeout_seconds", timeout_seconds)
        return started(arguments, self.folder / f"{name}-logs", self.ranks, faults, self._environment)

    def assert_ended_as_the_whole(self, name: str) -> None:
        """Compares weights, optimizer, schedule, progress and the examples of every step."""
        output = self.folder / name
        assert checkpoint_digests(output, self.steps) == checkpoint_digests(self.whole, self.steps)
        assert state(output, self.steps) == state(self.whole, self.steps)
        for rank in range(self.ranks):
            expected, seen = (dict(examples(self.folder / f"{run}-examples", rank)) for run in ("whole", name))
            assert sorted(seen) == list(range(self.steps))
            assert seen == expected
            for step, ids in examples(self.folder / f"{name}-examples", rank):  # what was done again, too
                assert ids == expected[step]


def state(output: Path, step: int) -> dict[str, Any]:
    """What of a checkpoint is no tensor, without the time that was taken."""
    values = json.loads((output / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    values["progress"].pop("training_seconds")
    return values


def examples(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    return [tuple(json.loads(line)) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    made: dict[str, Runs] = {}

    def of(variant: str) -> Runs:
        if variant not in made:
            folder, environment = (
                tmp_path_factory.mktemp(variant.replace(" ", "-")),
                FSDP2 if variant == SHARDED else {},
            )
            made[variant] = Runs(folder, environment, *(VARIANTS | VARIANTS_OF_SAVING)[variant])
        return made[variant]

    return of


def assert_died(ended: list[Ended], victim: int) -> None:
    """One process was killed, and the others said so and ended."""
    assert ended[victim].status == KILLED, ended[victim].said
    for rank, end in enumerate(ended):
        assert rank == victim or end.status == EXIT_ERROR, end.said
        assert "Traceback" not in end.said, end.said
    if len(ended) > 1:
        assert f"rank {victim}" in "".join(end.said for end in ended)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "variant"), sampled(product(Places, MOST), 2))
def test_killed_at_any_step_and_started_again(runs: Callable[[str], Runs], variant: str, place: str) -> None:
    its = runs(variant)
    first, every = (0, 1) if EVERY == 1 else (Places.index(place) % 3, 3)
    for step in range(first, its.steps, every):
        name, victim = f"{place}-{step}", step // every % its.ranks
        assert_died(its.run(name, on_rank(victim, at_step(step, place))), victim)
        assert [end.status for end in its.run(name)] == [EXIT_DONE] * its.ranks
        its.assert_ended_as_the_whole(name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", sampled(MOST, 2))
def test_killed_again_and_again(runs: Callable[[str], Runs], variant: str) -> None:
    its = runs(variant)
    for step in range(1, its.steps):
        victim = step % its.ranks
        assert_died(its.run("again", on_rank(victim, at_step(step, "middle"))), victim)
    assert [end.status for end in its.run("again")] == [EXIT_DONE] * its.ranks
    its.assert_ended_as_the_whole("again")
    once = dict(examples(its.folder / "again-examples", 0)).values()
    if its.ranks == 1:
        per_epoch = its.steps // 2
        for epoch in range(2):
            ids = sorted(i for step, ids in enumerate(once) if step // per_epoch == epoch for i in ids)
            assert ids == sorted(set(ids))


def stop_answering() -> None:
    signal.raise_signal(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_rank_that_stops_answering_is_named_and_the_restart_is_exact(runs: Callable[[str], Runs], victim: int) -> None:
    its, name = runs("2 ranks, packing"), f"silent-{victim}"
    with its.started(name, on_rank(victim, at_step(2, "middle", stop_answering)), timeout_seconds=4) as job:
        ended = job.end(60.0, of_ranks=[1 - victim])
    assert ended[1 - victim].status == EXIT_ERROR, ended[1 - victim].said
    assert f"rank {victim} (host" in ended[1 - victim].said
    assert ended[victim].status is None
    assert [end.status for end in its.run(name)] == [EXIT_DONE] * 2
    its.assert_ended_as_the_whole(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "action"),
    [
        (0, die),
        (1, stop_answering),
        (1, die),
        (0, stop_answering),
    ],
)
def test_rank_lost_before_all_have_met_is_named(
    runs: Callable[[str], Runs], victim: int, action: Callable[[], None]
) -> None:
    its, name = runs("2 ranks, packing"), f"never-met-{victim}-{action.__name__}"
    fault = on_rank(victim, at_call("train.extras.hardware:set_up_device", action))
    with its.started(name, fault, timeout_seconds=4) as job:
        other = job.end(60.0, of_ranks=[1 - victim])[1 - victim]
    assert other.status == EXIT_ERROR, other.said
    assert "Traceback" not in other.said, other.said
    assert f"rank {victim} (" in other.said and "is lost" in other.said
    assert "There is no checkpoint yet: the same command starts from scratch." in other.said


def prepare_for_long() -> None:
    time.sleep(7)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_preparing_data_may_take_longer_than_the_timeout(runs: Callable[[str], Runs], rank: int) -> None:
    its, name = runs("2 ranks, packing"), f"slow-{rank}"
    with its.started(name, on_rank(rank, at_call("train.data:tokenize", prepare_for_long)), timeout_seconds=4) as job:
        assert [end.status for end in job.end()] == [EXIT_DONE] * 2, job.said()
    its.assert_ended_as_the_whole(name)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS_OF_SAVING)
def test_killed_before_any_change_to_the_disk(runs: Callable[[str], Runs], variant: str) -> None:
    """Every write, half of a write, sync, rename and removal of the third save and of the rotation that follows."""
    its, step = runs(variant), 3
    log, checkpoints = its.folder / "changes", its.folder / "counted" / "checkpoints"
    assert [end.status for end in its.run("counted", counting_changes(checkpoints, log))] == [EXIT_DONE] * its.ranks
    tried = 0
    for rank in range(its.ranks):
        changes = Path(f"{log}.{rank}").read_text().splitlines()
        first, last = (  # none under DDP for the other rank: the first writes everything
            next((n for n, line in enumerate(changes, 1) if f"step-{s:08d}" in line), 0) for s in (step, step + 1)
        )
        for number in range(first, last, max(3, EVERY) if variant == SHARDED else min(8, EVERY)):
            name = f"killed-{rank}-{number}"
            folder = its.folder / name / "checkpoints"
            ended = its.run(name, on_rank(rank, at_change(number, folder)))
            assert_died(ended, rank)
            good = [path for path in folder.glob("step-*") if verify(path) is None]
            assert good
            assert [end.status for end in its.run(name)] == [EXIT_DONE] * its.ranks
            its.assert_ended_as_the_whole(name)
            tried += 1
    print(f"{variant}: {tried} kills")
    assert tried >= 3


@pytest.mark.slow
def test_files_that_killed_runs_were_writing_do_not_stay(tmp_path: Path) -> None:
    its, output = Runs(tmp_path, {}, 1, ("--eval_every_steps", 2), STEPS), tmp_path / "killed"
    for number in (1, 2, 3):
        [ended] = its.run("killed", at_call("pathlib:Path.replace", die, number))
        assert ended.status == KILLED
        assert hidden(output) - {".lock"}
    assert [end.status for end in its.run("killed")] == [EXIT_DONE]
    assert hidden(output) == hidden(its.whole) == {".lock"}


def test_killed_with_lines_of_the_second_save_before_the_first_one_is_whole(tmp_path: Path) -> None:
    """A slow disk: the log may be one save ahead of the checkpoints, which is no sign that some were removed."""
    flags = ("--config", write_recipe(tmp_path), "--save_every_steps", 2, "--output_dir", tmp_path / "run")
    fault = several(
        at_call("train.checkpoint:complete", partial(time.sleep, 60)),
        at_call("train.extras.endurance.outputs:DurableOutputs.save", die, 2),
    )
    assert [end.status for end in run(flags, tmp_path / "logs", fault=fault)] == [KILLED]
    assert hidden(tmp_path / "run") == {".lock", ".partial-step-00000002"}
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 4
    [ended] = run(flags, tmp_path / "logs")
    assert ended.status == EXIT_DONE and "earlier run" not in ended.said
    assert hidden(tmp_path / "run") == {".lock"} and not (tmp_path / "run" / "previous-1").exists()


def hidden(output: Path) -> set[str]:
    return {path.name for path in output.rglob(".*")}


PARTS = 4 if EVERY == 1 else 1  # tests that share these kills: one test may take ten minutes
WHOLE_RUNS = [("1 rank", 1 + n, PARTS * EVERY) for n in range(PARTS)]
WHOLE_RUNS += [(variant, 1, max(5, 3 * EVERY)) for variant in ("2 ranks", SHARDED)]
"""Variants, and the changes at which a run is killed: the first, and how many lie between two."""


@pytest.mark.parametrize(
    ("variant", "first", "every"), [("1 rank", 5, 60), *(pytest.param(*w, marks=pytest.mark.slow) for w in WHOLE_RUNS)]
)
def test_killed_before_any_change_of_a_whole_run(tmp_path: Path, variant: str, first: int, every: int) -> None:
    """From the lock to the summary; the first rank, which makes nearly all changes."""
    ranks, flags, steps = (VARIANTS | VARIANTS_OF_SAVING)[variant]
    more = ("--save_every_steps", 2, "--eval_every_steps", 2, "--save_total_limit", 1)
    its = Runs(tmp_path, FSDP2 if variant == SHARDED else {}, ranks, (*flags, *more), steps)
    log, tried = tmp_path / "changes", 0
    assert [end.status for end in its.run("counted", counting_changes(tmp_path / "counted", log))] == [
        EXIT_DONE
    ] * ranks
    for number in range(first, len(Path(f"{log}.0").read_text().splitlines()) + 1, every):
        name = f"killed-{number}"
        # A rank that is killed before it has told the store of itself counts as one that never came, after the timeout.
        with its.started(name, on_rank(0, at_change(number, tmp_path / name)), timeout_seconds=20) as job:
            ended = job.end()
        if ended[0].status == EXIT_DONE:  # now and then a run makes one change fewer
            break
        assert ended[0].status == KILLED, ended[0].said
        for end in ended[1:]:  # which may have nothing left to do
            assert end.status in (EXIT_DONE, EXIT_ERROR) and "Traceback" not in end.said, end.said
        assert [end.status for end in its.run(name)] == [EXIT_DONE] * ranks
        its.assert_ended_as_the_whole(name)
        assert final_files(tmp_path / name) == final_files(its.whole)
        assert log_of(tmp_path / name) == log_of(its.whole)
        assert hidden(tmp_path / name) == hidden(its.whole)
        tried += 1
    print(f"{variant}: {tried} kills")
    assert tried >= 3
