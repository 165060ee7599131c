"""The search that docs/studies.md shows; a stand-in takes Optuna's place, and its runs are made in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import ROOT

from train.main import main


class Study:
    """Tries the rates in order, as Optuna does what it draws, and skips trials that end in ``catch``."""

    def __init__(self, rates: Iterator[float]) -> None:
        self.rates, self.values = rates, dict[float, float | None]()

    def optimize(self, objective: Callable[[Any], float], n_trials: int, catch: type[Exception]) -> None:
        for number, rate in enumerate(self.rates):
            trial = SimpleNamespace(number=number, suggest_float=lambda *_, rate=rate, **__: rate)
            try:
                self.values[rate] = objective(trial)
            except catch:
                self.values[rate] = None

    @property
    def best_params(self) -> dict[str, float]:
        found = {rate: value for rate, value in self.values.items() if value is not None}
        return {"learning_rate": min(found, key=lambda rate: found[rate])}


@pytest.mark.slow
def test_the_search_shown_in_the_docs_finds_the_rate_that_learns_and_survives_one_that_fails(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Study(iter((1e-6, 0.02, -1.0)))
    optuna: Any = ModuleType("optuna")
    optuna.create_study = lambda study_name, storage, load_if_exists: study
    monkeypatch.setitem(sys.modules, "optuna", optuna)

    def run(command: list[str], check: bool) -> None:
        assert command[:3] == ["accelerate", "launch", "--config_file"] and (ROOT / command[3]).exists() and check
        assert command[4:7] == ["train/main.py", "--config", "recipes/quickstart.yaml"]
        status = main(["--config", str(recipe), *command[7:]])
        if status:
            raise subprocess.CalledProcessError(status, command)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    [shown] = re.findall(r"```python\n(# search\.py.*?)```", (ROOT / "docs/studies.md").read_text(), re.DOTALL)
    exec(shown, {})
    assert study.values[-1.0] is None
    for number, rate in enumerate((1e-6, 0.02)):
        summary = json.loads((tmp_path / "runs" / "search" / str(number) / "summary.json").read_text())
        assert study.values[rate] == summary["metric_value"] and summary["metric_name"] == "bits_per_byte"
    assert capsys.readouterr().out.splitlines()[-1] == "{'learning_rate': 0.02}"
