"""The trackers: what they see, what they do not, and what a person reads when one cannot start."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tqdm import tqdm

from train.config import Config, from_values
from train.extras import report
from train.extras.report import PROJECT, start_trackers, tracked
from train.launch import Launch
from train.records import UsageError, UserError


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _config(**values: Any) -> Config:
    return from_values(
        {
            "tokenizer": "bytes",
            "model_config": {
                "model_type": "llama",
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "rope": {"theta": 1e4},
            },
            **values,
        }
    )


def test_trackers_see_flat_settings_and_no_secrets():
    url = "https://someone:secret@host/data"
    flat = tracked(_config(metrics=["f1", "mcc"], dataset=url, dataset_options={"api_key": 1234, "test": 5}))
    assert flat["learning_rate"] == 5e-5 and flat["tokenizer"] == "bytes" and flat["metrics"] == "('f1', 'mcc')"
    assert flat["model_config.hidden_size"] == 64 and flat["model_config.rope"] == "{'theta': 10000.0}"
    assert flat["dataset"] == "https://…@host/data" and "1234" not in str(flat)
    assert not {"dataset_options", "model_config", "max_steps"} & set(flat)
    assert all(isinstance(value, int | float | str) for value in flat.values())


def test_tensorboard_writes_what_was_logged(tmp_path: Path, fresh_accelerate: None):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = _config(report_to=["tensorboard"], output_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=str(tmp_path))
    start_trackers(accelerator, config)
    _log(accelerator, 3, {"loss": 1.5, "confusion_matrix": [[1]], "mfu": None})
    _log(accelerator, 4, {"loss": 0.5})
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / PROJECT))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 1.5), (4, 0.5)]


def _log(accelerator: Any, step: int, values: dict[str, Any]) -> None:
    run: Any = SimpleNamespace(accelerator=accelerator, outputs=SimpleNamespace(bar=tqdm(disable=True)))
    report.Extra().recorded(run, "train", step, values)


class _Recorder:
    """Stands for an Accelerator and keeps what it was asked."""

    def __init__(self, log_with: list[str], error: Exception | None = None, is_main_process: bool = True) -> None:
        self.log_with, self.calls, self._error, self.metrics = log_with, [], error, []
        defined = SimpleNamespace(define_metric=lambda name, **options: self.metrics.append((name, options)))
        self.is_main_process, started = is_main_process, {"tracker": defined} if is_main_process else {}
        self.trackers = [SimpleNamespace(name=name, log=self.log, **started) for name in log_with]

    def init_trackers(self, *arguments: Any, **named: Any) -> None:
        if self._error:
            raise self._error
        self.calls.append((arguments, named))

    def log(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.mark.parametrize(("tool", "expected"), [("wandb", "mine"), ("tensorboard", PROJECT)])
def test_wandb_takes_its_project_from_the_variable_as_in_trainer(
    tool: str, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    recorder: Any = _Recorder([tool])
    start_trackers(recorder, _config(report_to=[tool]))
    assert recorder.calls[0][0] == (expected,)


def test_runs_are_named_and_wandb_keeps_its_files_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    recorder = _Recorder(["trackio", "wandb"])
    config = _config(report_to=["trackio", "wandb"], output_dir=str(tmp_path / "night"))
    start_trackers(recorder, config)
    (project,), named = recorder.calls[0]
    assert project == PROJECT
    assert named["config"] == tracked(config)
    assert named["init_kwargs"]["trackio"] == {"name": "night"}
    assert named["init_kwargs"]["wandb"] == {"name": "night", "dir": str(tmp_path / "night")}


def test_only_numbers_are_logged_by_the_kind_or_split_of_their_line():
    recorder = _Recorder(["trackio"])
    _log(recorder, 9, {"a": 1, "b": 0.5, "c": "x", "d": None, "e": [1]})
    _log(recorder, 9, {"split": "test", "loss": 2.0})
    assert recorder.calls == [({"train/a": 1, "train/b": 0.5}, 9), ({"test/loss": 2.0}, 9)]


def test_lines_of_wandb_have_their_step_as_a_value():
    """After step 9 it drops what is logged for step 8: the test split of the best checkpoint, steps gone back to."""
    recorder: Any = _Recorder(["wandb", "tensorboard"])
    start_trackers(recorder, _config(report_to=["wandb", "tensorboard"]))
    assert recorder.metrics == [("*", {"step_metric": "step"})]
    start_trackers(_Recorder(["wandb"], is_main_process=False), _config(report_to=["wandb"]))  # starts on rank 0 alone
    recorder.calls.clear()
    _log(recorder, 8, {"split": "test", "loss": 2.0})
    assert recorder.calls == [({"test/loss": 2.0, "step": 8}, None), ({"test/loss": 2.0}, 8)]


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    for name in ("wandb", "trackio", "tensorboard"):
        with pytest.raises(UsageError, match=rf"report_to: {name} is not installed. pip install '.\[{name}\]' adds it"):
            report.Extra().check(_config(report_to=[name]), Launch())
    monkeypatch.setattr(report, "find_spec", lambda name: name == "tensorboardX" or None)
    report.Extra().check(_config(report_to=["tensorboard"]), Launch())


def test_no_tracker_no_call():
    recorder = _Recorder([])
    run: Any = SimpleNamespace(accelerator=recorder, config=_config(), outputs=SimpleNamespace(bar=None))
    report.Extra().before_training(run, run)
    _log(recorder, 9, {"a": 1})
    assert recorder.calls == []


def test_a_tracker_that_cannot_start_says_what_to_do():
    recorder: Any = _Recorder(["wandb"], RuntimeError("no API key"))
    with pytest.raises(UserError, match=r"no API key.*WANDB_MODE=offline"):
        start_trackers(recorder, _config(report_to=["wandb"]))


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["trackio", "wandb"])
def test_the_other_trackers_run_offline(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
):
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(tool)
    accelerator = Accelerator(cpu=True, log_with=[tool], project_dir=str(tmp_path))
    start_trackers(accelerator, _config(report_to=[tool], output_dir=str(tmp_path)))
    for step in 3, 2:
        _log(accelerator, step, {"loss": step / 2})
    accelerator.end_training()
    assert any((tmp_path / tool).iterdir())
    for file in (tmp_path / tool).rglob("*.wandb"):  # records of protobuf, values as JSON
        written = file.read_bytes()
        assert written.count(b"train/loss") >= 2 and b"1.5" in written and b"1.0" in written
