"""Updates that leave weights which are not numbers, and losses that are none: nothing of it counts as good."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.injections import at_call, die, follow_windows, losses_of, several
from faults.processes import KILLED, Ended, Fault, run
from safetensors.torch import load_file
from support import checkpoint_digests, write_recipe

from train.figures import read_metrics
from train.records import EXIT_DONE, EXIT_ERROR

HUGE = 1e39  # more than a number of 32 bits can hold


def trained(folder: Path, *flags: Any, ranks: int = 1, fault: Fault | None = None) -> list[Ended]:
    its = ("--config", write_recipe(folder), "--output_dir", folder / "run", "--num_epochs", 4)
    return run((*its, *flags), folder / "logs", ranks, fault)


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["kind"] == kind]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*"))


def assert_all_finite(folder: Path) -> int:
    files = [*(folder / "run").rglob("*.safetensors")]
    for path in files:
        for name, tensor in load_file(path).items():
            assert torch.isfinite(tensor).all(), f"{path}: {name}"
    return len(files)


def rate_of(step: int, rate: float, last: int | None = None) -> Fault:
    """Another learning rate at the steps from ``step`` to ``last``, counted from 0."""
    return partial(_rate_of, step, rate, step if last is None else last)


def _rate_of(first: int, rate: float, last: int, rank: int) -> None:
    import train.loop as loop

    plain = loop.learning_rate_at

    def changed(step: int, *rest: Any) -> float:
        return rate if first <= step <= last else plain(step, *rest)

    loop.learning_rate_at = changed  # type: ignore


def loss_without_bound(window: int) -> Fault:
    """The loss of a window is infinite, and its gradients are not."""
    return partial(_loss_without_bound, window)


def _loss_without_bound(window: int, rank: int) -> None:
    from train.model import ModelWithLoss

    now, plain = follow_windows(), ModelWithLoss.forward

    def infinite(*arguments: Any, **options: Any) -> Any:
        loss: Any = plain(*arguments, **options)
        return loss + math.inf if now["window"] == window else loss

    ModelWithLoss.forward = infinite


@pytest.mark.parametrize(
    ("ranks", "background"), [(1, True), *(pytest.param(*w, marks=pytest.mark.slow) for w in [(1, False), (2, True)])]
)
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, ranks: int, background: bool) -> None:
    flags = ("--save_every_steps", 1, "--save_in_background", background)
    for end in trained(tmp_path, *flags, ranks=ranks, fault=rate_of(4, HUGE)):
        assert end.status == EXIT_ERROR, end.said
        assert "Traceback" not in end.said
    [said] = [line for line in trained_log(tmp_path).splitlines() if line.startswith("error: ")]
    assert said.startswith("error: step 5: ")
    assert "not finite" in said
    assert "learning rate" in said
    assert "Resume from an earlier checkpoint" in said
    assert steps(tmp_path)[-2:] == [3, 4]
    assert not (tmp_path / "run" / "final").exists()
    assert assert_all_finite(tmp_path)


def trained_log(folder: Path) -> str:
    return (folder / "logs" / "000.rank-0").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--save_every_steps", 2)])
def test_learning_rates_that_are_too_large_end_the_run(tmp_path: Path, extra: Any) -> None:
    [end] = trained(tmp_path, "--learning_rate", "1e38", *extra)
    assert end.status == EXIT_ERROR, end.said
    assert "Traceback" not in end.said
    assert_all_finite(tmp_path)
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rolls_back_to_a_checkpoint_that_a_later_step_has_proved(tmp_path: Path, ranks: int) -> None:
    """Step 5 spoils the weights: 4 is the newest checkpoint, and nothing tells that it is not the cause."""
    flags = ("--save_every_steps", 1, "--max_rollbacks", 1)
    ended = trained(tmp_path, *flags, ranks=ranks, fault=once(rate_of(4, HUGE)))
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    [row] = rows(tmp_path, "rollback")
    assert (row["step"], row["from_step"]) == (3, 5)
    assert assert_all_finite(tmp_path)


def once(fault: Fault) -> Fault:
    """Until the run has gone back."""
    return partial(_once, fault)


def _once(fault: Fault, rank: int) -> None:
    import train.extras.endurance.checkpoints as checkpoints
    import train.loop as loop

    plain, go_back = loop.learning_rate_at, checkpoints.go_back
    fault(rank)

    def healed(*arguments: Any) -> Any:
        loop.learning_rate_at = plain
        return go_back(*arguments)

    checkpoints.go_back = healed  # type: ignore


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_rollback_goes_further_back(tmp_path: Path, every: int) -> None:
    flags = ("--save_every_steps", every, "--max_rollbacks", 2)
    [end] = trained(tmp_path, *flags, fault=rate_of(6, HUGE, last=1000))
    assert end.status == EXIT_ERROR, end.said
    assert "Went back" in end.said
    went = [int(line.partition("Went back to the checkpoint of step ")[2].split(";")[0]) for line in notes(end.said)]
    assert went == ([5, 4] if every == 1 else [4, 2])
    assert_all_finite(tmp_path)


def notes(said: str) -> list[str]:
    return [line for line in said.splitlines() if "Went back" in line]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_infinite_loss_with_finite_gradients_is_a_step_that_is_skipped(tmp_path: Path, ranks: int) -> None:
    flags = ("--save_every_steps", 1, "--save_total_limit", 100)
    ended = trained(tmp_path, *flags, ranks=ranks, fault=loss_without_bound(4))
    assert {end.status for end in ended} == {EXIT_DONE}, ended[0].said
    [skipped] = rows(tmp_path, "skipped")
    assert skipped["step"] == 5
    assert len(skipped["examples"]) == 8
    weights = [
        {k: v for k, v in checkpoint_digests(tmp_path / "run", step).items() if k.startswith("model-")}
        for step in (4, 5, 6)
    ]
    assert weights[0] == weights[1] != weights[2]
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path, "train") if row["loss"] is not None)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["nonfinite_steps"] == 1


def test_final_is_not_made_of_weights_that_are_not_finite(tmp_path: Path) -> None:
    """Of a checkpoint that an earlier version wrote, for one."""
    [end] = trained(tmp_path, fault=several(rate_of(11, HUGE), at_call(FINAL, die), not_looked_at()))
    assert (end.status, steps(tmp_path)) == (KILLED, [12])
    [end] = trained(tmp_path)
    assert end.status == EXIT_ERROR, end.said
    assert "step 12: transformer.wte.weight is not finite" in end.said
    assert not (tmp_path / "run" / "final").exists()


FINAL = "train.outputs:Outputs.write_final"


def not_looked_at() -> Fault:
    """As if nobody looked at weights and moments."""
    return _not_looked_at


def _not_looked_at(rank: int) -> None:
    import train.extras.endurance.checkpoints as checkpoints

    checkpoints.refuse_nonfinite = lambda run, state, progress: state.blocks(run.accelerator.process_index)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_after_it_went_back_is_exact(tmp_path: Path, ranks: int) -> None:
    """Before any further checkpoint, too: neither the data that it has skipped nor the rollback is forgotten."""
    flags = ("--save_every_steps", 3, "--max_rollbacks", 2, "--max_consecutive_nonfinite_steps", 2)
    bad = losses_of(5, math.nan, last=6)  # steps 6 and 7, after which the run goes back to step 3
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = trained(tmp_path / "whole", *flags, ranks=ranks, fault=bad)[0]
    assert whole.status == EXIT_DONE and " steps (2 skipped or undone: no finite gradient), " in whole.said, whole.said
    killed = several(bad, at_call("train.loop:advance", die, 8))
    assert trained(tmp_path / "killed", *flags, ranks=ranks, fault=killed)[0].status == KILLED
    assert trained(tmp_path / "killed", *flags, ranks=ranks, fault=bad)[0].status == EXIT_DONE
    names = ("step", "from_step", "rollbacks", "examples")
    whole, found = ([[row[k] for k in names] for row in rows(tmp_path / n, "rollback")] for n in ("whole", "killed"))
    assert len(found) == 1 and found[0][:3] == [3, 7, 1] and found == whole
    last = steps(tmp_path / "whole")[-1]
    digests = [checkpoint_digests(tmp_path / name / "run", last) for name in ("whole", "killed")]
    assert digests[0] == digests[1]
    names = ("rollbacks", "nonfinite_steps", "tokens", "epochs")
    summaries = [json.loads((tmp_path / n / "run/summary.json").read_text()) for n in ("whole", "killed")]
    assert [summaries[0][name] for name in names] == [summaries[1][name] for name in names]


def test_the_examples_of_every_rollback_stay_in_the_log(tmp_path: Path) -> None:
    flags = ("--save_every_steps", 2, "--max_rollbacks", 2, "--max_consecutive_nonfinite_steps", 2)
    fault = several(losses_of(5, math.nan, last=6), losses_of(7, math.nan, last=8))  # the second before it has saved
    [end] = trained(tmp_path, *flags, fault=fault)
    assert end.status == EXIT_DONE, end.said
    found = rows(tmp_path, "rollback")
    assert [(row["step"], row["rollbacks"]) for row in found] == [(4, 1), (2, 2)]
    assert all(row["examples"] for row in found)
