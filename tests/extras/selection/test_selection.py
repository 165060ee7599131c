"""Which evaluated step is the best, and which checkpoints stay for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
from support import run_for

from train import extras
from train.config import Config
from train.extras.selection import Extra
from train.records import Evaluation, Progress, Run, UserError
from train.tasks import causal_lm, load_task


@pytest.fixture(autouse=True)
def _known_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.extras.cache.examples_digest", lambda examples: "abc")


def prepared(**changes: Any) -> tuple[Extra, Run]:
    config, extra = Config().changed(**changes), Extra()
    split = datasets.Dataset.from_dict({"num_bytes": [3.0], "length": [4]})
    task, names = load_task(config.data.task)(config), ("a", "b")
    data: Any = SimpleNamespace(task=task, examples={"validation": split}, label_names=names)
    unused: Any = None
    extra.prepared(run := run_for(config), data, unused)
    return extra, run


@pytest.mark.parametrize(
    ("changes", "metric", "best", "best_of"),
    [
        ({}, "loss", [0, 1, 1, 3], "loss on data abc"),
        ({"task": "sequence_classification"}, "accuracy", [0, 0, 2, 2], "accuracy on data abc"),
        ({"metric_for_best": "bits_per_byte"}, "bits_per_byte", [0, 1, 1, 3], "bits_per_byte on data abc"),
        (
            {"metric_for_best": "accuracy", "greater_is_better": False},
            "accuracy",
            [0, 1, 1, 3],
            "accuracy, reversed, on data abc",
        ),
        ({"metric_for_best": "loss", "greater_is_better": True}, "loss", [0, 0, 2, 2], "loss, reversed, on data abc"),
    ],
)
def test_what_counts_as_best(changes: dict[str, Any], metric: str, best: list[int], best_of: str) -> None:
    (extra, run), progress, found = prepared(**changes), Progress(), []
    for step, value in enumerate((0.5, 0.4, 0.6, 0.3)):
        at = Progress(step, best_metric=progress.best_metric, best_step=progress.best_step)
        progress = extra.evaluated(run, at, Evaluation("validation", step, {metric: value}))
        found.append(progress.best_step)
    assert (found, progress.best_of) == (best, best_of)


@pytest.mark.parametrize(("metric", "declared"), [("mean_absolute_error", None), ("brier", False)])
def test_an_error_of_a_tasks_own_is_better_the_smaller_it_is(metric: str, declared: bool | None) -> None:
    class Task(causal_lm.Task):
        default_metric, greater_is_better = metric, declared

    extra, run = Extra(), run_for(Config().changed(load_best_model_at_end=True, eval_every_steps=1))
    data: Any = SimpleNamespace(task=Task(run.config), examples={"validation": None})
    extra.prepared(run, data, data)
    progress = Progress()
    for step, value in enumerate((0.5, 0.3, 0.4)):
        progress = replace(progress, step=step)
        progress = extra.evaluated(run, progress, Evaluation("validation", step, {metric: value}))
    assert (progress.best_step, progress.best_metric) == (1, 0.3)
    assert run.outputs.notes == [f"best: the lowest {metric} of the validation split"]


def test_a_metric_that_the_task_does_not_have_is_told_before_the_first_step() -> None:
    with pytest.raises(UserError, match="'data' is not among this task's metrics"):
        prepared(metric_for_best="data")  # which is a text
    with pytest.raises(UserError, match="'confusion_matrix' is not among this task's metrics"):
        prepared(task="sequence_classification", metric_for_best="confusion_matrix")
    with pytest.raises(UserError, match=r"'f1' is not among this task's metrics: loss, accuracy, .*macro_f1"):
        prepared(task="sequence_classification", metric_for_best="f1")


def test_a_default_metric_that_a_task_of_ones_own_forgot_to_change_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = load_task("sequence_classification")
    monkeypatch.setattr(own, "metrics", lambda *_: {"loss": 0.5, "mse": 0.5})
    with pytest.raises(UserError, match=r"^default_metric of the task: 'accuracy' is not among .*: loss, mse\."):
        prepared(task="sequence_classification")


def test_the_metric_of_another_extra_may_choose_the_best() -> None:
    class Own(extras.Extra):
        def metrics(self, run: Any, data: Any, split: str, table: Any) -> dict[str, Any]:
            return {"rouge": 0.5}

    config = Config().changed(metric_for_best="rouge", load_best_model_at_end=True, eval_every_steps=1)
    extra, run = Extra(), run_for(config)
    run.extras = extras.Extras({**run.extras.by_name, "own": Own()})
    data: Any = SimpleNamespace(task=causal_lm.Task(config), examples={"validation": None}, label_names=())
    extra.prepared(run, data, data)
    assert run.outputs.notes == ["best: the highest rouge of the validation split"]


def test_the_checkpoint_of_the_best_stays(tmp_path: Path) -> None:
    extra, run = prepared(output_dir=str(tmp_path))
    assert extra.keep(run, {3, 4}, Progress(step=4, best_step=4)) == {3, 4}
    assert extra.keep(run, {3, 4}, Progress(step=4, best_step=2)) == {2, 3, 4}


def test_what_was_the_best_at_a_checkpoint_stays_with_it(tmp_path: Path) -> None:
    """A run that goes back to it looks for the best from there on."""
    extra, run = prepared(output_dir=str(tmp_path))
    progress = Progress()
    for step, loss in ((3, 0.9), (7, 0.5), (9, 0.7), (12, 0.4)):
        progress = extra.evaluated(run, replace(progress, step=step), Evaluation("validation", step, {"loss": loss}))
    assert extra.keep(run, {10, 12}, progress) == {7, 10, 12}
    assert extra.keep(run, {5, 7, 12}, progress) == {3, 5, 7, 12}  # that of step 7 was written before its evaluation
    parts: Any = SimpleNamespace(total_steps=20)
    back = extra.resumed(run, replace(progress, step=10, best_step=7, best_metric=0.5, evaluated_step=10), parts)
    assert extra.keep(run, {10}, back) == {7, 10}


@pytest.mark.parametrize(("grows", "left"), [(False, [2, 3, 4, 5]), (True, [5, 4, 3, 2])])
def test_a_best_whose_checkpoint_failed_leaves_the_next_best_that_is_on_the_disk(
    grows: bool, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, run = prepared(
        output_dir=str(tmp_path), load_best_model_at_end=True, eval_every_steps=1, greater_is_better=grows
    )
    losses = {1: 9.0, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.1 if not grows else 0.9, 7: None}
    rows = [{"kind": "evaluation", "step": step, "loss": loss, "data": "abc"} for step, loss in losses.items()]
    rows.append({"kind": "evaluation", "step": 3, "loss": 0.0 if not grows else 1.0, "data": "others"})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    progress = Progress(step=7, best_step=6)  # whose checkpoint could not be written
    for step in (2, 3, 4, 5, 7):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert extra.keep(run, {7}, progress) == {6, 7, left[0]}

    damaged = {left[0], left[2]}
    monkeypatch.setattr(
        "train.checkpoint.verify",
        lambda path: "damaged" if int(path.name[5:]) in damaged or not path.exists() else None,
    )
    run.outputs.note = Mock()
    assert extra.final_step(run, progress) == left[1]
    said = [line for call in run.outputs.note.call_args_list for line in call.args]
    assert [line.partition(" cannot")[0] for line in said] == [
        f"the best checkpoint, of step {step}," for step in (6, left[0])
    ]
    damaged |= {2, 3, 4, 5, 7}
    run.outputs.note.return_value = None
    assert extra.final_step(run, progress) is None
    assert run.outputs.note.call_args.args == ("no evaluated checkpoint is intact: final/ has the last weights",)
