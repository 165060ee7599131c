"""A machine that crashes at any moment: the same command resumes from a checkpoint that the run was told is written.

The states that a crash can leave are made from the system calls of a real run, and the template's own functions are
asked what they make of each; for some, the real command is run.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from accelerate import Accelerator
from faults.crash_states import STRACE, Recording, State, Tree, can_record, contents, put, recorded
from faults.injections import at_step, several
from faults.processes import FSDP2, Fault, run
from support import EVERY_CASE, checkpoint_digests, final_files, log_of, run_for, write_recipe

from train.batching import Loading
from train.config import parse
from train.data import prepare_data
from train.extras import Extras
from train.extras.endurance.outputs import DurableOutputs
from train.extras.selection import Extra
from train.figures import read_metrics
from train.outputs import Outputs
from train.records import EXIT_DONE, BatchArithmetic, Progress

pytestmark = pytest.mark.skipif(not can_record(), reason="strace is not here, or may not look at processes")
STEPS = 6
FLAGS = ("--save_every_steps", 2, "--eval_every_steps", 2, "--save_total_limit", 1)
VARIANTS: dict[str, tuple[int, dict[str, str], bool]] = {
    "1 rank": (1, {}, False),
    "1 rank, resumed": (1, {}, True),
    "2 ranks": (2, {}, False),
    "2 ranks, sharded": (2, FSDP2, False),
}
"""Ranks, environment, and whether what is recorded is the run that resumes one which was killed."""


@dataclass
class Crashes:
    """A recorded run, and a place for what crashes leave of it."""

    recording: Recording
    whole: Tree
    flags: tuple[Any, ...]
    ranks: int
    environment: dict[str, str]
    place: Path
    acknowledged_before: int = 0

    def __post_init__(self) -> None:
        (self.place / "pool").mkdir()
        self.config = parse([str(word) for word in (*self.flags, "--output_dir", self.place / "disk" / "run")])
        self.accelerator = Accelerator(cpu=True)
        put(self.whole, self.place / "whole")
        self.rows = read_metrics(self.place / "whole" / "run" / "metrics.jsonl")
        data = next(row["data"] for row in self.rows if row.get("split") == "validation")
        examples = {"validation": None}
        made: Any = SimpleNamespace(
            task=SimpleNamespace(default_metric="loss", greater_is_better=None), examples=examples
        )
        self.selection = Extra()
        with patch("train.extras.cache.examples_digest", return_value=data):
            self.selection.prepared(run_for(self.config, self.accelerator), made, made)
        state = json.loads(self.whole[f"run/checkpoints/step-{STEPS:08d}/state.json"] or b"")
        self.stand_in: Any = SimpleNamespace(identity=state["identity"], restore=lambda blocks, values: None)

    def problems(self, state: State) -> list[str]:
        """What is wrong with what the template makes of a state; it is made real, and changed."""
        put(state.tree, self.place / "disk", self.place / "pool")
        outputs, unseen = DurableOutputs(self.config, self.accelerator), io.StringIO()
        # To write the configuration as YAML would take most of the time.
        with redirect_stdout(unseen), redirect_stderr(unseen), patch("train.outputs.dump", return_value=""):
            try:
                return list(self._problems(state, outputs))
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]

    def _problems(self, state: State, outputs: Outputs) -> Iterator[str]:
        outputs.from_main(outputs.prepare)
        bare = replace(run_for(self.config, self.accelerator), extras=Extras({"selection": self.selection}))
        parts: Any = SimpleNamespace(state=self.stand_in, total_steps=STEPS)
        progress = outputs.resume(bare, parts)
        if progress.step < (acknowledged := max(state.acknowledged, self.acknowledged_before)):
            yield f"step {progress.step} is resumed, but {acknowledged} was acknowledged"
        if outputs.is_complete(STEPS) and progress.step == STEPS:
            made = ("run/final", "run/report.html", "run/summary.json", "run/metrics.jsonl")
            for path, content in self.whole.items():
                if path.startswith(made) and (path not in state.tree or state.tree[path] != content):
                    yield f"complete, but {path} is missing or broken"
            return
        if state.is_done:
            yield "not complete, but that was acknowledged"
        batches = SimpleNamespace(
            arithmetic=BatchArithmetic(1, 1, 1), loading=Loading(cast("Any", None)), steps_per_epoch=STEPS
        )
        outputs.begin(bare, cast("Any", SimpleNamespace(total_steps=STEPS, batches=batches)), progress)
        expected = [key_of(row) for row in self.rows if belongs(row, progress)]
        found = [key_of(row) for row in read_metrics(outputs.metrics)]
        is_said = any("a crash has damaged" in note for note in outputs.notes)
        if (lost := [key for key in expected if key not in found]) and not is_said:
            yield f"rows {lost} are missing at step {progress.step} without a word"
        if more := [key for key in found if key not in expected or found.count(key) > 1]:
            yield f"rows {more} would be there twice after step {progress.step}"

    def end(self, state: State, logs: Path) -> None:
        """Runs the real command on a state, and compares the end with that of the recorded run."""
        put(state.tree, self.place / "real")
        output = self.place / "real" / "run"
        its = (*self.flags, "--output_dir", output)
        ended = run(its, logs, self.ranks, environment=self.environment)
        assert [end.status for end in ended] == [EXIT_DONE] * self.ranks, ended[0].said
        whole = self.place / "whole" / "run"
        assert checkpoint_digests(output, STEPS) == checkpoint_digests(whole, STEPS)
        assert final_files(output) == final_files(whole)
        assert log_of(output) == log_of(whole)
        assert (output / "report.html").read_text().rstrip().endswith("</html>")


def belongs(row: dict[str, Any], progress: Progress) -> bool:
    """Whether a run that has come so far has written this row."""
    if row["kind"] == "evaluation" and row["step"] == progress.step:
        return progress.evaluated_step == progress.step and row["split"] == "validation"
    return row["step"] <= progress.step


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["step"], row.get("split")


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Crashes]]:
    """Recorded runs; what crashes leave of them is put into memory where that is possible."""
    memory = Path("/dev/shm")
    made: dict[str, Crashes] = {}
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as places:

        def of(variant: str) -> Crashes:
            if variant not in made:
                folder, place = tmp_path_factory.mktemp("crashes"), Path(places) / str(len(made))
                place.mkdir()
                made[variant] = record(folder, place, *VARIANTS[variant])
            return made[variant]

        yield of


def record(folder: Path, place: Path, ranks: int, environment: dict[str, str], is_resumed: bool) -> Crashes:
    root, trace = folder / "disk", folder / "trace"
    root.mkdir()
    flags = ("--config", write_recipe(folder), *FLAGS)
    its = (*flags, "--output_dir", root / "run")
    if is_resumed:
        run(its, folder / "logs", ranks, at_step(3, "begin"), environment)
    before = contents(root)
    ended = run(its, folder / "logs", ranks, recorded(trace), environment)
    assert [end.status for end in ended] == [EXIT_DONE] * ranks, ended[0].said
    recording = Recording([Path(f"{trace}.{rank}") for rank in range(ranks)], root, before)
    whole = contents(root)
    assert recording.whole() == whole, "the recording is not complete"
    steps = [int(path[-8:]) for path in before if re.fullmatch("run/checkpoints/step-[0-9]{8}", path)]
    return Crashes(recording, whole, flags, ranks, environment, place, max(steps, default=0))


def assert_sound(crashes: Crashes, states: Sequence[State]) -> None:
    found = {}
    for state in states:
        for problem in crashes.problems(state):
            found.setdefault(problem, []).append(state.position)
    for problem, positions in found.items():
        print(len(positions), "states:", problem, "e.g. at", positions[:3])
    assert not found, f"{sum(map(len, found.values()))} of {len(states)} states"


ORDERED = """
import os
file = open("a", "w")
file.write("new")
file.flush()
os.fsync(file.fileno())
os.rename("a", "b")
os.fsync(os.open(".", os.O_RDONLY))
"""


def test_what_is_synced_is_there_and_nothing_else_is_promised(tmp_path: Path) -> None:
    (root := tmp_path / "disk").mkdir()
    program = ORDERED.replace('"a"', f'"{root}/a"').replace('"b"', f'"{root}/b"').replace('"."', f'"{root}"')
    subprocess.run([*STRACE, tmp_path / "trace", sys.executable, "-c", program], check=True)
    recording = Recording([tmp_path / "trace"], root)
    assert recording.whole() == contents(root) == {"b": b"new"}
    states = list(recording.states(randomly=50))
    assert [state.tree for state in states if state.position == len(recording.events) - 1] == []  # as before it
    trees = [state.tree for state in states]
    for tree in ({}, {"a": b""}, {"a": b"n"}, {"a": b"\0\0\0"}, {"a": b"new"}, {"b": b"new"}):
        assert tree in trees
    assert len(trees) == 6, trees  # so no "b" that is not whole


@pytest.mark.slow
def test_losses_are_seen(crashes: Callable[[str], Crashes]) -> None:
    """By the questions that the tests below ask of states."""
    its, end = crashes("1 rank"), {"position": 0, "acknowledged": STEPS, "is_done": True, "key": ""}
    weights = tuple(path for path in its.whole if path.endswith("model-00000.safetensors"))

    def problems(without: str | tuple[str, ...], **more: bytes) -> str:
        kept = {path: content for path, content in its.whole.items() if not path.startswith(without)}
        return "; ".join(its.problems(State(tree={**kept, **more}, **end)))

    assert problems("nothing") == ""
    assert "complete, but run/final/README.md is missing" in problems("run/final/README.md")
    assert problems("run/summary.json") == "not complete, but that was acknowledged"
    rows = (its.whole["run/metrics.jsonl"] or b"").splitlines(keepends=True)
    fewer = problems("run/summary.json", **{"run/metrics.jsonl": b"".join(rows[1:])})
    assert "rows [('train', 1, None)] are missing at step 6 without a word" in fewer
    assert "step 0 is resumed, but 6 was acknowledged" in problems("run/checkpoints/")
    assert "UserError: no checkpoint" in problems(weights)


def test_crash_at_any_moment_costs_nothing_acknowledged(crashes: Callable[[str], Crashes], tmp_path: Path) -> None:
    its = crashes("1 rank")
    states = list(its.recording.states(randomly=2, every=3))
    assert len(states) > 400
    chosen = random.Random(0).sample(states, 150)
    assert_sound(its, chosen)
    for state in chosen[:2]:
        its.end(state, tmp_path / "logs")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_crash_state(crashes: Callable[[str], Crashes], variant: str, tmp_path: Path) -> None:
    its = crashes(variant)
    states = list(its.recording.states(randomly=40))
    print(f"{variant}: {len(states)} states, {len({visible(state.tree) for state in states})} without hidden files")
    assert len(states) >= 4000
    assert_sound(its, states if EVERY_CASE else random.Random(1).sample(states, len(states) // 20))
    for state in random.Random(0).sample(states, 20 if EVERY_CASE else 2):
        its.end(state, tmp_path / "logs")


def visible(tree: Tree) -> frozenset[Any]:
    """A tree without what is still being written."""
    return frozenset((path, content) for path, content in tree.items() if "/." not in path)


@pytest.mark.parametrize("limit", [20, pytest.param(None if EVERY_CASE else 150, marks=pytest.mark.slow)])
def test_no_crash_state_of_the_data_cache_gives_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """What is tokenised is not synced, so anything may be left of it; it is looked at before it is used."""
    cache, trace, place = tmp_path / "cache", tmp_path / "trace", tmp_path / "place"
    its = ("--config", write_recipe(tmp_path), "--output_dir", tmp_path / "run", "--max_steps", 1)
    [end] = run(its, tmp_path / "logs", fault=several(cached_in(cache), recorded(trace)))
    assert end.status == EXIT_DONE, end.said
    recording = Recording([Path(f"{trace}.0")], cache)
    assert recording.whole() == contents(cache), "the recording is not complete"
    states = list(recording.states(randomly=20))
    assert len(states) > 100
    states = random.Random(0).sample(states, limit or len(states))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", place / "cache")
    config, found = parse([str(word) for word in its]), []
    for state in [State(0, 0, False, recording.whole(), ""), *states]:
        put(state.tree, place / "cache")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            data = prepare_data(run_for(config))
        splits: tuple[Any, ...] = data.examples["train"], data.examples["validation"]
        found.append(tuple(split[:] for split in splits))
    print(len(states), "states of the data cache")
    assert [state for state, loaded in zip(states, found[1:], strict=True) if loaded != found[0]] == []


def cached_in(cache: Path) -> Fault:
    """A run that keeps what it tokenises in ``cache``, which is there already."""
    return partial(_cached_in, cache)


def _cached_in(cache: Path, rank: int) -> None:
    from datasets import config

    cache.mkdir()
    config.HF_DATASETS_CACHE = cache
