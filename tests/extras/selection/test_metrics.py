"""Further metrics of 🤗 evaluate: tried before the first step, computed in addition to a task's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import numpy as np
import pytest
from support import run_for

from train.config import Config
from train.extras.selection import Extra
from train.records import UserError
from train.tasks import load_task

SCRIPT = """
import datasets
import evaluate


class MeanGap(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        if len(set(references)) > 3:
            raise ValueError("made for three classes")
        gaps = [abs(p - r) for p, r in zip(predictions, references)]
        return {"mean_gap": sum(gaps) / len(gaps)}
"""


@pytest.fixture
def metric_folder(tmp_path: Path) -> str:
    folder = tmp_path / "mean_gap"
    folder.mkdir()
    (folder / "mean_gap.py").write_text(SCRIPT)
    return str(folder)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path / "modules")


def prepared(task: str, metric: str, classes: int = 3) -> tuple[Extra, Any, Any]:
    """The extra, before the first step of a run that asks for ``metric``."""
    config, extra = Config().changed(task=task, metrics=(metric,)), Extra()
    split, names = datasets.Dataset.from_dict({"length": [4]}), tuple("abcdef"[:classes])
    examples = {"validation": split}
    data: Any = SimpleNamespace(task=load_task(task)(config), examples=examples, label_names=names)
    run = run_for(config)
    assert extra.change_data(run, data) is data
    extra.prepared(run, data, data)
    return extra, run, data


def test_a_metric_from_a_folder_is_computed_from_predictions_and_references(metric_folder: str) -> None:
    extra, run, data = prepared("sequence_classification", metric_folder)
    pairs = [(0, 2), (1, 1), (2, 0), (0, 1)]
    table = np.array([[i, 0.5, 1, p == r, p, r] for i, (p, r) in enumerate(pairs)], dtype=np.float64)
    found = extra.metrics(run, data, "test", table)
    assert found == {"mean_gap": pytest.approx((2 + 0 + 2 + 1) / 4)}
    assert extra.metrics(run, data, "validation", table).keys() == {"mean_gap", "data"}  # and of which data


def test_a_metric_that_cannot_be_computed_stops_before_training(metric_folder: str) -> None:
    with pytest.raises(UserError, match="mean_gap' cannot be used: made for three classes"):
        prepared("sequence_classification", metric_folder, classes=4)


def test_a_metric_of_the_hub_without_a_connection_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="metrics: 'f1' cannot be used") as caught:
        prepared("sequence_classification", "f1", classes=2)
    assert "\n" not in str(caught.value) and "connection" in str(caught.value)


def test_class_metrics_are_refused_where_there_are_no_classes(metric_folder: str) -> None:
    with pytest.raises(UserError, match=r"metrics: .*mean_gap.* this task has none"):
        prepared("causal_lm", metric_folder)
    with pytest.raises(UserError, match=r"metrics: .*mean_gap.* this task has none"):
        prepared("sequence_classification", metric_folder, classes=1)  # of a task that predicts a number


class Sided:
    """A metric for which it matters which side is which."""

    def compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        return {"predicted": list(predictions), "right": list(references)}


def test_a_further_metric_gets_predictions_and_references_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluate.load", lambda *_, **__: Sided())
    config = Config().changed(task="sequence_classification", metrics=["sided"])
    selection, run = Extra(), cast("Any", SimpleNamespace(config=config))
    data: Any = SimpleNamespace(task=SimpleNamespace(labelled=True), label_names=("a", "b"))
    selection.change_data(run, data)
    table = np.array([[0, 0.5, 1, 1, 1, 0], [1, 0.5, 1, 0, 0, 0]], dtype=float)
    assert selection.metrics(run, data, "test", table) == {"predicted": [1, 0], "right": [0, 0]}
