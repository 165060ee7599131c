"""The metrics log, the trackers, the summary and what is said of the machine."""

import getpass
import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from train.config import Config, from_values
from train.errors import UserError
from train.extras.report import files as report

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _log(folder: Path, steps: list[int]) -> report.MetricsLog:
    log = report.MetricsLog(folder / "metrics.jsonl")
    for step in steps:
        log.write("train", step, {"loss": 1.0 / step})
    return log


def _steps(folder: Path) -> list[int]:
    return [row["step"] for row in report.read_metrics(folder / "metrics.jsonl")]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path):
    log = report.MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.write("train", 7, {"loss": 0.5, "confusion_matrix": torch.tensor([[1, 2], [3, 4]]), "best": torch.tensor(2.5)})
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert list(row)[:3] == ["kind", "step", "time"]
    assert (row["kind"], row["step"], row["loss"]) == ("train", 7, 0.5)
    assert row["confusion_matrix"] == [[1, 2], [3, 4]] and row["best"] == 2.5
    assert row["time"].endswith("+00:00")
    log.close()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    log = report.MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 1, {"grad_norm": math.inf, "loss": math.nan, "all": [1.0, -math.inf]})
    log.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["grad_norm"] is None and row["loss"] is None and row["all"] == [1.0, None]


def test_a_log_that_is_not_enabled_writes_nothing(tmp_path: Path):
    log = report.MetricsLog(tmp_path / "run" / "metrics.jsonl", enabled=False)
    log.write("train", 1, {"loss": 1.0})
    log.keep(lambda row: row["step"] <= 0)
    assert not (tmp_path / "run").exists()


def test_rewind_drops_later_steps_and_goes_on(tmp_path: Path):
    log = _log(tmp_path, [1, 2, 3, 4])
    log.keep(lambda row: row["step"] <= 2)
    assert _steps(tmp_path) == [1, 2]
    log.write("train", 3, {"loss": 9.0})
    assert _steps(tmp_path) == [1, 2, 3]
    log.keep(lambda row: row["step"] <= -1)
    assert _steps(tmp_path) == []
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train"', "\u2028", "[1]"])
def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path, torn: str):
    _log(tmp_path, [1, 2]).close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(torn)
    assert _steps(tmp_path) == [1, 2]
    log = report.MetricsLog(tmp_path / "metrics.jsonl")
    log.keep(lambda row: row["step"] <= 5)
    log.write("train", 3, {"note": "a line\u2028break\nor two"})
    log.close()
    assert _steps(tmp_path) == [1, 2, 3]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\nhello\n{"kind": "train", "step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        report.read_metrics(tmp_path / "metrics.jsonl")


def test_no_file_has_no_rows(tmp_path: Path):
    assert report.read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_folder_that_cannot_be_written_is_a_clear_message(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output_dir"):
        report.MetricsLog(tmp_path / "file" / "metrics.jsonl").write("train", 1, {})
    with pytest.raises(UserError, match="output_dir"):
        report.write_summary(tmp_path / "file", {})


def test_summary_is_strict_json_and_replaces_the_old_one(tmp_path: Path):
    report.write_summary(tmp_path, {"steps": 1})
    path = report.write_summary(tmp_path, {"steps": 2, "loss": math.nan, "labels": ("a", "é"), "odd": "\udc80"})
    assert json.loads(path.read_text()) == {"steps": 2, "loss": None, "labels": ["a", "é"], "odd": "\udc80"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def _config(**values: Any) -> Config:
    return from_values(
        {
            "tokenizer": "bytes",
            "model_config": {
                "model_type": "llama",
                "hidden_size": 64,
                "num_key_value_heads": 2,
                "hub_token": "hf_1",
                "rope": {"theta": 1e4},
            },
            **values,
        }
    )


def test_trackers_see_flat_settings_and_no_secrets():
    flat = report.tracked_config(_config(metrics=["f1", "mcc"], dataset_options={"api_key": "k", "test": 5}))
    assert flat["learning_rate"] == 5e-5 and flat["tokenizer"] == "bytes" and flat["metrics"] == "f1, mcc"
    assert flat["model_config.hidden_size"] == 64 and flat["model_config.num_key_value_heads"] == 2
    assert flat["dataset_options.test"] == 5 and flat["model_config.rope.theta"] == 1e4
    assert not {"model_config.hub_token", "dataset_options.api_key", "max_steps"} & set(flat)
    assert all(isinstance(value, int | float | str) for value in flat.values())


def test_tensorboard_writes_what_was_logged(tmp_path: Path, fresh_accelerate: None):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = _config(report_to=["tensorboard"], output_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=str(tmp_path))
    report.start_trackers(accelerator, config)
    report.log_to_trackers(accelerator, {"train/loss": 1.5, "confusion_matrix": [[1]], "mfu": None}, 3)
    report.log_to_trackers(accelerator, {"train/loss": 0.5}, 4)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / report.PROJECT))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 1.5), (4, 0.5)]


class _Recorder:
    """Stands for an Accelerator and keeps what it was asked."""

    def __init__(self, log_with: list[str], error: Exception | None = None) -> None:
        self.log_with, self.trackers, self.calls, self._error = log_with, log_with, [], error

    def init_trackers(self, *arguments: Any, **named: Any) -> None:
        if self._error:
            raise self._error
        self.calls.append((arguments, named))

    def log(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def test_runs_are_named_and_wandb_keeps_its_files_in_the_run(tmp_path: Path):
    recorder = _Recorder(["trackio", "wandb"])
    config = _config(report_to=["trackio", "wandb"], output_dir=str(tmp_path / "night"))
    report.start_trackers(recorder, config)  # pyright: ignore[reportArgumentType]
    (project,), named = recorder.calls[0]
    assert project == report.PROJECT
    assert named["config"] == report.tracked_config(config)
    assert named["init_kwargs"]["trackio"] == {"name": "night"}
    assert named["init_kwargs"]["wandb"] == {"name": "night", "dir": str(tmp_path / "night")}


def test_only_numbers_and_texts_are_logged():
    recorder = _Recorder(["wandb"])
    report.log_to_trackers(recorder, {"a": 1, "b": 0.5, "c": "x", "d": None, "e": [1]}, 9)  # pyright: ignore
    assert recorder.calls == [({"a": 1, "b": 0.5, "c": "x"}, 9)]


def test_no_tracker_no_call():
    recorder = _Recorder([])
    report.start_trackers(recorder, _config())  # pyright: ignore[reportArgumentType]
    report.log_to_trackers(recorder, {"a": 1}, 9)  # pyright: ignore[reportArgumentType]
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("recorder", "message"),
    [
        (_Recorder([]), r"wandb is not installed. pip install '.\[wandb\]'"),
        (_Recorder(["wandb"], ImportError("No module named 'wandb'")), r"pip install '.\[wandb\]'"),
        (_Recorder(["wandb"], RuntimeError("no API key")), r"no API key.*WANDB_MODE=offline"),
    ],
)
def test_a_tracker_that_cannot_start_says_what_to_do(recorder: Any, message: str):
    with pytest.raises(UserError, match=message):
        report.start_trackers(recorder, _config(report_to=["wandb"]))


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["trackio", "wandb"])
def test_the_other_trackers_run_offline(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
):
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip(tool)
    accelerator = Accelerator(cpu=True, log_with=[tool], project_dir=str(tmp_path))
    report.start_trackers(accelerator, _config(report_to=[tool], output_dir=str(tmp_path)))
    report.log_to_trackers(accelerator, {"train/loss": 1.5}, 3)
    accelerator.end_training()
    assert any((tmp_path / tool).iterdir())


def test_hardware_names_neither_machine_nor_user(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(name="NVIDIA L4", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = report.hardware()
    assert found["gpus"] == [{"name": "NVIDIA L4", "memory_bytes": 24 * 2**30}] * 2 and found["gpu_count"] == 2
    assert found["cpu_cores"] >= 1 and found["memory_bytes"] > 2**28 and found["cpu"]
    words = json.dumps(found).replace('"', " ").replace(",", " ").split()
    assert platform.node() not in words and getpass.getuser() not in words


def test_versions():
    found = report.versions()
    assert found["python"] == platform.python_version()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"template", "transformers", "accelerate", "datasets", "evaluate"} <= set(found)


def test_progress_text():
    row = {
        "loss": 2.3456,
        "learning_rate": 3e-4,
        "grad_norm": 0.9,
        "tokens_per_second": 24123.0,
        "mfu": 0.384,
        "peak_allocated_bytes": 5 * 2**30,
    }
    assert report.progress_text(row) == "loss 2.346, lr 3.00e-04, grad 0.9, 24.1k tok/s, MFU 38.4%, 5.00 GiB"
    assert report.progress_text({"loss": 1.0, "mfu": None, "grad_norm": math.inf}) == "loss 1, grad inf"
    memory = {"peak_allocated_bytes": 5 * 2**30, "peak_reserved_bytes": 6 * 2**30}
    assert report.progress_text(memory) == "5.00 GiB"
    memory["peak_reserved_bytes"] = 7 * 2**30
    assert report.progress_text(memory) == "5.00 GiB, 7.00 GiB reserved"


def test_importing_these_parts_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, train.extras.report.files, train.extras.report.model_card, train.extras.meter.throughput;"
        "print(sorted({'torch', 'matplotlib', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
