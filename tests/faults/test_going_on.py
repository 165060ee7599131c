"""Runs that go on from somewhere else than where they were: an earlier checkpoint, another folder, another aim."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults.injections import at_call, at_step, die, losses_of, send_itself, shown_loss_of
from faults.processes import KILLED, Ended, Fault, run
from support import checkpoint_digests, log_of, write_recipe

from train.checkpoint import verify
from train.records import EXIT_DONE, EXIT_STOPPED

STEPS = 6


def go(folder: Path, *flags: Any, name: str = "run", fault: Fault | None = None) -> Ended:
    every = ("--config", write_recipe(folder), "--output_dir", folder / name, "--save_every_steps", 1)
    [end] = run((*every, *flags), folder / "logs", fault=fault)
    assert "Traceback" not in end.said, end.said
    return end


def steps_of(output: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (output / "checkpoints").glob("step-*"))


def progress_at(output: Path, step: int) -> dict[str, Any]:
    return json.loads((output / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())["progress"]


def rows(output: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert max(Counter((row["kind"], row["step"], row.get("split"), row.get("data")) for row in found).values()) == 1
    return [row for row in found if row["kind"] in kinds]


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


def damage(checkpoint: Path) -> None:
    path = checkpoint / "model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-10] ^= 64
    path.write_bytes(data)


def test_line_that_a_person_went_back_from_is_moved_aside(tmp_path: Path) -> None:
    output, changed = tmp_path / "run", ("--learning_rate", 0.02, "--save_total_limit", 3)
    assert go(tmp_path, "--save_total_limit", 3).status == EXIT_DONE
    shutil.copytree(output, tmp_path / "whole")
    earlier = ("--resume", tmp_path / "whole" / "checkpoints" / "step-00000004")
    assert go(tmp_path, *changed, *earlier, name="whole").status == EXIT_DONE
    old = checkpoint_digests(output, 6)

    earlier = ("--resume", output / "checkpoints" / "step-00000004")
    end = go(tmp_path, *changed, *earlier, fault=at_step(4, "begin", send_itself(signal.SIGTERM)))
    assert end.status == EXIT_STOPPED, end.said
    assert "run the same command with --resume auto again to resume from step 5" in end.said
    assert steps_of(output) == [4, 5]
    aside = output / "previous-1"
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]
    assert (aside / "final").is_dir() and (aside / "summary.json").is_file()
    assert not (output / "final").exists() and not (output / "summary.json").exists()
    assert checkpoint_digests(aside, 6) == old

    end = go(tmp_path, *changed)
    assert end.status == EXIT_DONE, end.said
    assert "at step 5" in end.said
    assert checkpoint_digests(output, 6) == checkpoint_digests(tmp_path / "whole", 6) != old
    assert [row["step"] for row in rows(output, "train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_damaged_checkpoint_does_not_push_out_new_ones(tmp_path: Path) -> None:
    output, flags = tmp_path / "run", ("--save_every_steps", 2, "--save_total_limit", 1)
    assert go(tmp_path, *flags, name="whole").status == EXIT_DONE
    killed = at_call("train.checkpoint:rotate", die, number=2)  # step 4 is on the disk, step 2 not yet removed
    assert go(tmp_path, *flags, fault=killed).status == KILLED
    assert steps_of(output) == [2, 4]
    damage(output / "checkpoints" / "step-00000004")
    end = go(tmp_path, *flags, fault=at_step(2, "begin", send_itself(signal.SIGTERM)))
    assert end.status == EXIT_STOPPED, end.said
    assert steps_of(output) == [3]
    assert verify(output / "checkpoints" / "step-00000003") is None
    assert (output / "previous-1" / "checkpoints" / "step-00000004").is_dir()
    assert go(tmp_path, *flags).status == EXIT_DONE
    assert checkpoint_digests(output, 6) == checkpoint_digests(tmp_path / "whole", 6)


WITH_BEST = ("--eval_every_steps", 1, "--load_best_model_at_end", True)
GETS_WORSE = (*WITH_BEST, "--learning_rate", 3, "--lr_scheduler", "constant", "--warmup_steps", 0)


def test_best_checkpoint_that_is_damaged_is_told_and_not_taken(tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert go(tmp_path, *GETS_WORSE, fault=at_step(5, "begin")).status == KILLED
    best = progress_at(output, max(steps_of(output)))["best_step"]
    assert best < 4
    damage(output / "checkpoints" / f"step-{best:08d}")
    end = go(tmp_path, *GETS_WORSE)
    assert end.status == EXIT_DONE, end.said
    assert f"the best checkpoint, of step {best}, cannot be used (model-00000.safetensors was altered)" in end.said
    losses = {row["step"]: row["loss"] for row in rows(output, "evaluation")}
    left = min(set(steps_of(output)) - {best}, key=lambda step: losses[step])
    assert summary(output)["final_step"] == left
    assert f"final/ has the best weights, of step {left}" in end.said
    assert summary(output)["result"]["validation"]["loss"] == losses[left]


def test_best_whose_checkpoint_is_gone_is_looked_for_again(tmp_path: Path) -> None:
    output = tmp_path / "run"
    assert go(tmp_path, *GETS_WORSE, fault=at_step(5, "begin")).status == KILLED
    newest = max(steps_of(output))
    best = progress_at(output, newest)["best_step"]
    assert best < newest
    shutil.rmtree(output / "checkpoints" / f"step-{best:08d}")
    end = go(tmp_path, *GETS_WORSE)
    assert end.status == EXIT_DONE, end.said
    assert f"the best step so far, {best}, cannot be used (its checkpoint is not in" in end.said
    losses = {row["step"]: row["loss"] for row in log_of(output) if row["split"] == "validation"}
    better = min((step for step in losses if step >= newest), key=lambda step: losses[step])
    assert summary(output)["best_step"] == summary(output)["final_step"] == better
    assert better in steps_of(output)


@pytest.mark.parametrize(
    "change", ["validation data", *(pytest.param(c, marks=pytest.mark.slow) for c in ("metric", "new metric"))]
)
def test_best_of_another_metric_or_data_is_looked_for_anew(tmp_path: Path, change: str) -> None:
    output = tmp_path / "run"
    assert go(tmp_path, *WITH_BEST, "--num_epochs", "None", "--max_steps", 3).status == EXIT_DONE
    assert summary(output)["best_metric"] > 1
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"text": "entirely other words " * n}) for n in range(1, 6)))
    on_metric = change != "validation data"
    flags = ("--metric_for_best", "accuracy") if on_metric else ("--validation_dataset", other)
    flags += () if on_metric else ("--allow_changes_on_resume", True)
    if change == "new metric":  # the log has none of it
        log = output / "metrics.jsonl"
        log.write_text(log.read_text().replace('"accuracy"', '"another"'))
    end = go(tmp_path, *WITH_BEST, *flags, "--num_epochs", "None", "--max_steps", 6)
    assert end.status == EXIT_DONE, end.said
    assert "cannot be used (it was chosen by loss on data" in end.said
    name = "accuracy" if on_metric else "loss"
    # The last evaluation before the change counts under another metric, but not where it was on other data.
    first = 3 if on_metric else 4
    values = {row["step"]: row[name] for row in rows(output, "evaluation") if row["step"] >= first}
    best = (max if on_metric else min)(values, key=lambda step: values[step])
    assert (summary(output)["best_step"], summary(output)["best_metric"]) == (best, values[best])


def test_stop_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    flags = (*WITH_BEST, "--eval_every_steps", 2)
    assert go(tmp_path, *flags, name="whole").status == EXIT_DONE
    end = go(tmp_path, *flags, fault=at_step(5, "middle", send_itself(signal.SIGTERM)))
    assert end.status == EXIT_DONE, end.said
    assert [row["step"] for row in rows(tmp_path / "run", "evaluation")] == [2, 4, 6]
    for name in ("best_step", "best_metric", "final_step", "result"):
        assert summary(tmp_path / "run")[name] == summary(tmp_path / "whole")[name]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_lines_of_the_log_of_a_run_that_was_cut(tmp_path: Path, how: str) -> None:
    flags = ("--log_every_steps", 4, "--save_every_steps", 3, "--loss_spike_factor", 50, "--num_epochs", 4)
    assert go(tmp_path, *flags, name="whole").status == EXIT_DONE
    action = die if how == "killed" else send_itself(signal.SIGTERM)
    assert go(tmp_path, *flags, fault=at_step(5, "middle", action)).status == (
        KILLED if how == "killed" else EXIT_STOPPED
    )
    assert go(tmp_path, *flags).status == EXIT_DONE
    names = ("step", "loss", "clipped_share", "padding_share", "tokens_seen")
    lines = [[{name: row[name] for name in names} for row in rows(tmp_path / n, "train")] for n in ("whole", "run")]
    whole, cut = ({line["step"]: line for line in found} for found in lines)
    assert list(whole) == [3, 4, 6, 8, 9, 12]  # what is saved is logged first
    if how == "killed":
        assert cut == whole
        last = steps_of(tmp_path / "whole")[-1]
        usual = [progress_at(tmp_path / name, last)["usual_loss"] for name in ("whole", "run")]
        assert usual[0] == usual[1] is not None
    else:  # it writes a line for the steps so far, and the next is of fewer
        assert list(cut) == [3, 4, 6, 7, 8, 9, 12]
        assert {step: cut[step] for step in whole if step != 8} == {step: whole[step] for step in whole if step != 8}
        assert cut[8]["tokens_seen"] == whole[8]["tokens_seen"]
    assert summary(tmp_path / "run")["training_seconds"] > 0


def test_evaluation_that_a_stop_put_off_is_logged_once(tmp_path: Path) -> None:
    flags = ("--eval_every_steps", 2, "--save_every_steps", 6)
    end = go(tmp_path, *flags, fault=at_step(3, "begin", send_itself(signal.SIGTERM)))
    assert end.status == EXIT_STOPPED, end.said
    assert steps_of(tmp_path / "run")[-1] == 4
    assert go(tmp_path, *flags, fault=at_step(5, "begin")).status == KILLED  # step 4 was evaluated, and not saved again
    assert go(tmp_path, *flags).status == EXIT_DONE
    assert [row["step"] for row in rows(tmp_path / "run", "evaluation")] == [2, 4, 6]


@pytest.mark.parametrize("factor", [None, 3])
def test_rotation_leaves_what_a_rollback_needs(tmp_path: Path, factor: int | None) -> None:
    """With the two checkpoints that are kept by default, and one after every step."""
    output, flags = tmp_path / "run", ("--max_rollbacks", 1, "--num_epochs", 4)
    if factor is None:
        flags += ("--max_consecutive_nonfinite_steps", 4)
        fault, back_to = losses_of(4, math.nan, last=7), 3
    else:
        flags += ("--loss_spike_factor", factor, "--log_every_steps", 3)
        fault, back_to = shown_loss_of(7, 1000.0), 6
    end = go(tmp_path, *flags, fault=fault)
    assert end.status == EXIT_DONE, end.said
    assert [row["step"] for row in rows(output, "rollback")] == [back_to]
    assert len(steps_of(output)) <= 3


def test_what_there_is_to_do_is_told_as_it_is(tmp_path: Path) -> None:
    output, tired = tmp_path / "run", (*GETS_WORSE, "--early_stopping_patience", 1, "--save_total_limit", 100)
    assert go(tmp_path, *tired).status == EXIT_DONE
    steps = summary(output)["steps"]
    assert steps < STEPS
    end = go(tmp_path, *tired)
    assert "nothing to do" in end.said and "for a longer one, a higher --max_steps" in end.said
    assert summary(output)["final_step"] == summary(output)["best_step"] == steps - 1
    assert "is past the" not in end.said
    end = go(tmp_path, *tired, "--max_steps", 1, "--num_epochs", None)
    assert f"the checkpoint, of step {steps}, is past the 1 steps that were asked for" in end.said
    end = go(tmp_path, *tired, "--load_best_model_at_end", False)  # another model is asked for
    assert end.status == EXIT_DONE and "nothing to do" not in end.said
    assert summary(output)["final_step"] == steps
    rows(output)


def test_killed_while_it_finishes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split, count in (("train", 20), ("validation", 5), ("test", 5)):
        lines = (json.dumps({"text": f"{split} {number} " * 5}) for number in range(count))
        (data / f"{split}.jsonl").write_text("\n".join(lines))
    flags = ("--dataset", data)
    assert go(tmp_path, *flags, fault=at_call("train.outputs:Outputs.write_final", die)).status == KILLED
    assert go(tmp_path, *flags).status == EXIT_DONE
    assert [row["split"] for row in rows(tmp_path / "run", "evaluation")] == ["validation", "test"]


def fails() -> None:
    raise IndexError("index is out of bounds")


def test_sample_that_fails_loses_nothing(tmp_path: Path) -> None:
    end = go(tmp_path, fault=at_call("train.extras.report.sample:sample", fails))
    assert end.status == EXIT_DONE, end.said
    assert "no sample of what the model writes: IndexError: index is out of bounds" in end.said
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
