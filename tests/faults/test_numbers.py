"""Losses and gradients that are not numbers, or far too large: no weight and no checkpoint is poisoned."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.injections import at_call, at_change, at_step, losses_of, on_rank, several, shown_loss_of
from faults.processes import KILLED, Ended, Fault, run
from safetensors.torch import load_file
from support import EVERY_CASE, checkpoint_digests, log_of, write_recipe

from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, UserError


def arguments(folder: Path, output: Path, *more: Any) -> tuple[Any, ...]:
    saves = ("--save_every_steps", 1, "--save_total_limit", 100, "--num_epochs", 4)
    return ("--config", write_recipe(folder), "--output_dir", output, *saves, *more)


def rows(output: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] == kind]


def weights(output: Path, step: int) -> list[str]:
    return [digest for name, digest in checkpoint_digests(output, step).items() if name.startswith("model-")]


def assert_all_finite(output: Path) -> int:
    files = [*output.rglob("*.safetensors")]
    for path in files:
        for name, tensor in load_file(path).items():
            assert torch.isfinite(tensor).all(), f"{path}: {name}"
    return len(files)


@pytest.mark.parametrize(
    ("ranks", "value"),
    [(1, math.inf), *(pytest.param(*w, marks=pytest.mark.slow) for w in [(1, math.nan), (2, math.inf), (2, math.nan)])],
)
def test_one_bad_loss_skips_one_step_on_all_ranks(tmp_path: Path, value: float, ranks: int) -> None:
    output = tmp_path / "run"
    fault = on_rank(ranks - 1, losses_of(4, value))
    ended = run(arguments(tmp_path, output), tmp_path / "logs", ranks, fault)
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    [skipped] = rows(output, "skipped")
    assert skipped["step"] == 5
    assert len(skipped["examples"]) == 8
    assert weights(output, 5) == weights(output, 4) != weights(output, 6)
    assert assert_all_finite(output) > 20
    assert json.loads((output / "summary.json").read_text())["nonfinite_steps"] == 1
    assert " steps (1 skipped: no finite gradient), " in ended[0].said


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_losses_without_end_stop_the_run_and_keep_its_weights(tmp_path: Path, ranks: int) -> None:
    output, bound = tmp_path / "run", ("--max_consecutive_nonfinite_steps", 3)
    fault = on_rank(ranks - 1, losses_of(4, math.nan, last=1000))
    ended = run(arguments(tmp_path, output, *bound), tmp_path / "logs", ranks, fault)
    assert {end.status for end in ended} == {EXIT_ERROR}
    assert "step 7: no finite gradient in 3 steps in a row" in ended[0].said
    assert "Traceback" not in ended[0].said
    assert weights(output, 6) == weights(output, 4)
    assert assert_all_finite(output)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_goes_back_past_the_data_that_led_there(tmp_path: Path, ranks: int) -> None:
    """Not finite at steps 5 to 7, counted from 1: back to 3, which step 4 has proved, and past the data."""
    output = tmp_path / "run"
    flags = ("--max_consecutive_nonfinite_steps", 3, "--max_rollbacks", 1)
    ended = run(arguments(tmp_path, output, *flags), tmp_path / "logs", ranks, losses_of(4, math.nan, last=6))
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    [row] = rows(output, "rollback")
    assert (row["step"], row["from_step"], row["rollbacks"]) == (3, 7, 1)
    assert [row["step"] for row in rows(output, "train")] == list(range(1, 13))
    assert "Went back to the checkpoint of step 3" in ended[0].said
    progress = json.loads((output / "checkpoints" / "step-00000004" / "state.json").read_text())["progress"]
    assert (progress["epoch"], progress["step_in_epoch"], progress["rollbacks"]) == (2, 2, 1)
    assert_all_finite(output)
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["rollbacks"], summary["nonfinite_steps"], summary["steps"]) == (1, 3, 12)


def test_rollbacks_are_bounded(tmp_path: Path) -> None:
    output = tmp_path / "run"
    flags = ("--max_consecutive_nonfinite_steps", 2, "--max_rollbacks", 2)
    [end] = run(arguments(tmp_path, output, *flags), tmp_path / "logs", fault=losses_of(4, math.nan, last=1000))
    assert end.status == EXIT_ERROR
    assert end.said.count("Went back to the checkpoint of step") == 2
    assert assert_all_finite(output)


@pytest.mark.parametrize("max_rollbacks", [0, 1])
def test_loss_spike_ends_the_run_or_goes_back(tmp_path: Path, max_rollbacks: int) -> None:
    output = tmp_path / "run"
    flags = ("--loss_spike_factor", 3, "--max_rollbacks", max_rollbacks)
    [end] = run(arguments(tmp_path, output, *flags), tmp_path / "logs", fault=shown_loss_of(7, 100.0))
    if max_rollbacks:
        assert end.status == EXIT_DONE, end.said
        [row] = rows(output, "rollback")
        assert (row["step"], row["from_step"]) == (6, 8)
    else:
        assert end.status == EXIT_ERROR
        assert "step 8: the loss since step 7 is" in end.said
        assert "--loss_spike_factor" in end.said
    assert max(row["loss"] for row in rows(output, "train") if row["step"] != 8) < 10


BACK = "train.extras.endurance.checkpoints:go_back"
EVERY = 9 if EVERY_CASE else 93
KILLS = [(2, range(1, 45, 12)), *(pytest.param(n, range(1, 1000, EVERY), marks=pytest.mark.slow) for n in (1, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(("rollback", "changes"), KILLS)
def test_killed_while_going_back_ends_the_same(tmp_path: Path, rollback: int, changes: range) -> None:
    """Before any change to the disk, and in the next step: first back to 3, then, past more bad data, to 2."""
    flags, fault = ("--max_consecutive_nonfinite_steps", 2, "--max_rollbacks", 2), losses_of(4, math.nan, last=7)

    def ended(name: str, *more: Fault) -> Ended:
        return run(arguments(tmp_path, tmp_path / name, *flags), tmp_path / "logs", fault=several(fault, *more))[0]

    def left(name: str) -> Any:
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        went = [(row["step"], row["from_step"], row["examples"]) for row in rows(tmp_path / name, "rollback")]
        return went, summary["rollbacks"], log_of(tmp_path / name), checkpoint_digests(tmp_path / name, 12)

    assert ended("whole").status == EXIT_DONE
    whole, tried = left("whole"), 0
    assert [(to, at, len(examples)) for to, at, examples in whole[0]] == [(3, 6, 12), (2, 5, 16)]
    for number in changes:
        name = f"killed-{number}"
        dies = partial(at_change(number, tmp_path / name), 0)
        if (status := ended(name, at_call(BACK, dies, rollback)).status) == EXIT_DONE:
            break
        assert status == KILLED
        assert ended(name).status == EXIT_DONE
        assert left(name) == whole, number
        tried += 1
    assert tried >= 4
    dies = partial(at_step(4 - rollback, "end"), 0)
    assert ended("after", at_call(BACK, dies, rollback)).status == KILLED
    assert ended("after").status == EXIT_DONE
    assert left("after") == whole


def test_goes_back_over_a_change_that_was_allowed(tmp_path: Path) -> None:
    """To a checkpoint of the run as it was before the change."""
    output, steps = tmp_path / "run", ("--num_epochs", "None", "--max_steps")
    [end] = run(arguments(tmp_path, output, *steps, 2), tmp_path / "logs")
    assert end.status == EXIT_DONE, end.said
    changed = ("--seed", 1, "--allow_changes_on_resume", "True")
    flags = ("--max_consecutive_nonfinite_steps", 2, "--max_rollbacks", 1, *changed)
    fault = losses_of(2, math.nan, last=3)
    [end] = run(arguments(tmp_path, output, *flags, *steps, 6), tmp_path / "logs", fault=fault)
    assert end.status == EXIT_DONE, end.said
    assert "Went back to the checkpoint of step 1" in end.said


def test_going_back_needs_checkpoints(tmp_path: Path) -> None:
    its = ("--config", write_recipe(tmp_path), "--output_dir", tmp_path / "run", "--max_rollbacks", 1)
    its = (*its, "--save_every_steps", "None")
    [end] = run(its, tmp_path / "logs")
    assert end.status == EXIT_USAGE
    assert "max_rollbacks needs save_every_steps" in end.said


def test_a_run_in_which_no_step_had_a_finite_gradient_is_none(tmp_path: Path) -> None:
    flags = ("--z_loss", 9e18, "--max_steps", 2, "--num_epochs", None)
    [ended] = run(arguments(tmp_path, tmp_path / "run", *flags), tmp_path / "logs")
    assert ended.status == EXIT_ERROR and "Traceback" not in ended.said
    assert "none of 2 steps had a finite gradient: no weight has changed." in ended.said
    assert not (tmp_path / "run" / "final").exists()


def test_steps_that_rollbacks_have_undone_do_not_make_a_run_one_without_a_finite_gradient(tmp_path: Path) -> None:
    flags = ("--max_steps", 8, "--num_epochs", None, "--save_every_steps", 1, "--save_total_limit", 9)
    flags += ("--max_consecutive_nonfinite_steps", 3, "--max_rollbacks", 3)
    bad = several(losses_of(4, math.nan, 6), losses_of(9, math.nan, 13))  # as many as there are steps
    [ended] = run(arguments(tmp_path, tmp_path / "run", *flags), tmp_path / "logs", fault=bad)
    assert ended.status == EXIT_DONE, ended.said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["nonfinite_steps"] == summary["steps"] == 8 and summary["rollbacks"] == 2
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_a_row_that_the_disk_refused_is_not_written_after_the_rollback_that_undid_its_step(tmp_path: Path) -> None:
    flags = ("--save_every_steps", 2, "--save_total_limit", 9, "--max_rollbacks", 2, "--loss_spike_factor", 3)
    fault = several(shown_loss_of(4, 50.0), _log_is_full_until_a_checkpoint_is_removed)
    [ended] = run(arguments(tmp_path, tmp_path / "run", *flags), tmp_path / "logs", fault=fault)
    assert ended.status == EXIT_DONE and "metrics.jsonl: cannot be written" in ended.said, ended.said
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == sorted(set(steps)) and 5 in steps
    assert max(row["loss"] for row in rows(tmp_path / "run", "train")) < 10


def _log_is_full_until_a_checkpoint_is_removed(rank: int) -> None:
    from train import checkpoint, outputs

    write_rows, remove, full = outputs.Outputs.write_rows, checkpoint.remove, {"is": False, "was": False}

    def refuse(self: Any, *lines: str) -> None:
        full["is"] = full["is"] or (not full["was"] and any('"step": 5' in line for line in lines))
        if full["is"]:
            raise UserError("metrics.jsonl: cannot be written: No space left on device.")
        write_rows(self, *lines)

    def freed(path: Path) -> None:
        remove(path)
        full.update({"is": False, "was": True})

    outputs.Outputs.write_rows, checkpoint.remove = refuse, freed
