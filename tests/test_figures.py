"""The metrics log, the summary, what is said of the machine, and how values read."""

import errno
import getpass
import json
import math
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import run_for
from train.config import Architecture, Config, Output
from train.extras.report.machine import hardware, versions
from train.figures import (
    count,
    duration,
    gib,
    number,
    read_metrics,
    several,
    show_error,
    to_json,
    without_secrets,
    write_whole,
)
from train.records import Progress, UserError

ROOT = Path(__file__).resolve().parents[1]


def append_row(path: Path, kind: str, step: int, values: dict[str, Any]) -> None:
    run = run_for(Config().changed(output_dir=str(path.parent)))
    run.outputs.is_main = True
    run.outputs.record(run, kind, step, {"loss": None, **values})


def _log(folder: Path, steps: list[int]) -> Path:
    """A log with rows of these steps."""
    for step in steps:
        append_row(folder / "metrics.jsonl", "train", step, {"loss": 1.0 / step})
    return folder / "metrics.jsonl"


def _keep(log: Path, last: int) -> list[str]:
    """Keeps what belongs to a run that stands at step ``last``; what was said."""
    run = run_for(Config().changed(output_dir=str(log.parent)))
    run.outputs.is_main = True
    run.outputs.keep_log(Progress(step=last))
    return run.outputs.notes


def _steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path):
    values = {"loss": 0.5, "confusion_matrix": torch.tensor([[1, 2], [3, 4]]), "best": torch.tensor(2.5)}
    append_row(tmp_path / "run" / "metrics.jsonl", "train", 7, values)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert list(row)[:3] == ["kind", "step", "time"]
    assert (row["kind"], row["step"], row["loss"]) == ("train", 7, 0.5)
    assert row["confusion_matrix"] == [[1, 2], [3, 4]] and row["best"] == 2.5
    assert row["time"].endswith("+00:00")


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    append_row(
        tmp_path / "metrics.jsonl", "train", 1, {"grad_norm": math.inf, "loss": math.nan, "all": [1.0, -math.inf]}
    )

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["grad_norm"] is None and row["loss"] is None and row["all"] == [1.0, None]


def test_a_silent_rank_writes_nothing(tmp_path: Path):
    config = Config(architecture=Architecture(model="x"), output=Output(output_dir=str(tmp_path / "run")))
    run = run_for(config)
    run.outputs.record(run, "train", 1, {"loss": 1.0})
    run.outputs.keep_log(Progress())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_validation_is_kept_if_its_checkpoint_knows_of_it(tmp_path: Path, is_known: bool):
    """Else it is made again, and would stand in the log twice."""
    log = _log(tmp_path, [1, 2])
    for split in ("validation", "test"):
        append_row(log, "evaluation", 2, {"split": split})
    run = run_for(Config().changed(output_dir=str(tmp_path)))
    run.outputs.is_main = True
    run.outputs.keep_log(Progress(step=2, evaluated_step=2 if is_known else 1))
    assert [row.get("split", row["kind"]) for row in read_metrics(log)] == ["train"] * 2 + ["validation"] * is_known


def test_keep_drops_later_steps_and_the_log_continues(tmp_path: Path):
    log = _log(tmp_path, [1, 2, 3, 4])
    _keep(log, 2)
    assert _steps(tmp_path) == [1, 2]
    append_row(log, "train", 3, {"loss": 9.0})
    assert _steps(tmp_path) == [1, 2, 3]
    _keep(log, 0)
    assert _steps(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"kind": "train"', "\u2028", "[1]"])
def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path, torn: str):
    _log(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(torn)
    assert _steps(tmp_path) == [1, 2]
    log = tmp_path / "metrics.jsonl"
    _keep(log, 5)
    append_row(log, "train", 3, {"note": "a line\u2028break\nor two"})
    assert _steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("damage", [b"hello", b"\0" * 100, b'{"kind": "train"}', b"[" * 10_000])
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, damage: bytes):
    log = _log(tmp_path, [1, 2])
    log.write_bytes(log.read_bytes() + damage + b"\n")
    append_row(log, "train", 3, {})
    assert _steps(tmp_path) == [1, 2, 3]
    assert _keep(log, 3) == [f"{log}: a crash has damaged 1 line, left out from now on"]
    assert _keep(log, 2) == []
    assert _steps(tmp_path) == [1, 2]


def test_rows_after_half_a_row_stay_whole(tmp_path: Path):
    log = _log(tmp_path, [1])
    with log.open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "ste')  # a full disk
    with log.open("a", encoding="utf-8") as file:
        file.write("\n")
    for step in (2, 3):
        append_row(log, "train", step, {"loss": 1.0})
    assert _steps(tmp_path) == [1, 2, 3]


def test_no_file_has_no_rows(tmp_path: Path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_folder_that_cannot_be_written_is_a_clear_message(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output_dir"):
        append_row(tmp_path / "file" / "metrics.jsonl", "train", 1, {})
    with pytest.raises(UserError, match="output_dir"):
        write_whole(tmp_path / "file" / "summary.json", "")


def test_summary_is_strict_json_and_replaces_the_old_one(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_whole(path, to_json({"steps": 1}))
    write_whole(path, to_json({"steps": 2, "loss": math.nan, "labels": ("a", "é"), "odd": "\udc80"}, indent=2))
    assert json.loads(path.read_text()) == {"steps": 2, "loss": None, "labels": ["a", "é"], "odd": "\udc80"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_file_that_cannot_be_replaced_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_whole(tmp_path / "file", "old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"file: cannot be written: No space left on device\. Free space"):
        write_whole(tmp_path / "file", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"taken: cannot be written: File exists\. Give another --output_dir\.$"):
        write_whole(tmp_path / "taken" / "config.yaml", "new")


SECRET = ("access_token", "auth", "pwd", "jwt", "bearer", "Password", "api-key")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://…@host/x"),
        ("https://host/x?a=1&sig=abc&access_token=t", "https://host/x?a=1&sig=…&access_token=…"),
        ("<li>?token=abc</li><li>last", "<li>?token=…</li><li>last"),  # of a page
        ("with hf_" + "a" * 30, "with hf_…"),
        *((f"https://host/x{mark}{name}=abc", f"https://host/x{mark}{name}=…") for mark in "?#" for name in SECRET),
        ("?design=round&author=me", "?design=round&author=me"),
        ("red \x1b[31mtext\x07\r\u202e", "red \\x1b[31mtext\\x07\\x0d\\x202e"),
        ("a\tb\nc ü 漢 🤗", "a\tb\nc ü 漢 🤗"),
        ("me@host key=4", "me@host key=4"),
    ],
)
def test_without_secrets(text: str, shown: str):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2000, "2,000 rows")])
def test_several(count: int, text: str):
    assert several(count, "row") == text


def test_hardware_names_neither_machine_nor_user(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(name="NVIDIA L4", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    found = hardware()
    assert found["gpus"] == [{"name": "NVIDIA L4", "memory_bytes": 24 * 2**30}] * 2
    assert found["cpu_cores"] >= 1 and found["memory_bytes"] > 2**28 and found["cpu"]
    words = json.dumps(found).replace('"', " ").replace(",", " ").split()
    assert platform.node() not in words and getpass.getuser() not in words


def test_versions():
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"template", "transformers", "accelerate", "datasets", "evaluate"} <= set(found)


def test_importing_the_log_does_not_load_torch():
    code = "import sys, train.figures; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_rows_are_read_with_whole_steps_and_without_those_that_have_none(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = ('{"kind": "train", "step": 2.0}', '{"kind": "train", "step": null}', '{"kind": "train", "step": "3"}')
    path.write_text("\n".join(rows) + "\n")
    assert [(type(row["step"]), row["step"]) for row in read_metrics(path)] == [(int, 2), (int, 3)]


@pytest.mark.parametrize(("rank", "head"), [(None, "error: "), ("0", "error: "), ("3", "error (rank 3): ")])
def test_an_error_names_its_rank_unless_it_is_the_first(
    rank: str | None, head: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    show_error("the disk is full")
    assert capsys.readouterr().err == f"{head}the disk is full\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (2**30, "1.00 GiB"),
        (int(139.8 * 2**30), "139.8 GiB"),
        (100 * 2**30, "100.0 GiB"),
        (100 * 2**30 - 1, "100.00 GiB"),
        (0.1 * 2**30, "0.10 GiB"),
        (107_374_182, "102.4 MiB"),
        (50 * 2**20, "50.0 MiB"),
        (0, "0.0 MiB"),
    ],
)
def test_gib(size: float, text: str):
    assert gib(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (874, "874"),
        (999.4, "999"),
        (999.5, "1.00k"),
        (24_123, "24.1k"),
        (123_456, "123k"),
        (1_843_200, "1.84M"),
        (7.62e9, "7.62B"),
        (15e12, "15.0T"),
    ],
)
def test_count(value: float, text: str):
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.345, "2.3 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (59.4, "59 s"),
        (59.5, "1 min"),
        (119.6, "2 min"),
        (92.4, "1 min 32 s"),
        (3600, "1 h"),
        (7325, "2 h 2 min"),
        (90_061, "1 d 1 h"),
        (172_800 + 59 * 60, "2 d 59 min"),
        (3 * 3600 + 5, "3 h 5 s"),
    ],
)
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (12345, "12,345"),
        (0.5, "0.5000"),
        (1234.5, "1234"),
        (9999.4, "9999"),
        (9999.7, "10,000"),
        (1e4, "10,000"),
        (-12345.6, "-12,346"),
        (9e14, "900,000,000,000,000"),
        (1e15, "1.000e+15"),
        (-3, "-3"),
        (98765.4, "98,765"),
        ("x", "x"),
        (True, "True"),
    ],
)
def test_number(value: Any, text: str):
    assert number(value) == text
