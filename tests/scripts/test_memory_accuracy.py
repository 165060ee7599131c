"""The cases of ``memory_accuracy.py``, what of them is kept, and what counts as a failure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import takes_minutes

from scripts.benchmarks import accuracy_cases, attention_kernels, memory_accuracy
from scripts.benchmarks.accuracy_cases import large_cases, small_cases, title
from train.memory.card_kernels import attention_kernel
from train.memory.devices import find_device
from train.memory.predict import Job, Prediction, Target
from train.memory.question import target_of
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED, UserError

ABOUT = {"date": "2026-01-01", "hardware": {"cpu": "CPU", "cpu_cores": 2, "gpus": []}, "versions": {"torch": "2"}}
CARDS = ("t4", "rtx-4090", "h100", "h200")


@pytest.mark.parametrize("card", CARDS)
def test_cases_are_sized_to_the_card(card: str) -> None:
    device = find_device(card)
    cases = large_cases(device)
    titles = list(map(title, cases))
    assert len(set(titles)) == len(titles)  # by them an earlier call's rows are known
    assert all(case.target == target_of(device) for case in cases)
    assert [case.padded for case in cases].index(False) == sum(case.padded for case in cases) == 3  # these come first
    groups = cases[3]
    own = groups.values["model_config"]
    assert own["num_key_value_heads"] < own["num_attention_heads"] and groups.values["mixed_precision"] == "no"
    precisions = {case.values["mixed_precision"] for case in cases}
    if card == "t4":  # without bf16
        assert precisions == {"no", "fp16"} and {case.values["dtype"] for case in cases} == {"float32"}
    else:
        assert "bf16" in precisions and "bfloat16" in {case.values["dtype"] for case in cases}


def test_lengths_grow_with_the_card() -> None:
    longest = [max(case.length for case in large_cases(find_device(card))) for card in CARDS]
    assert longest == [8192, 16384, 32768, 65536]


class Planner:
    """Predicts what it is told to."""

    def __init__(self, needed: dict[str, int]) -> None:
        self.needed, self.waiting = needed, list[Job]()

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def ask(self, job: Job) -> None:
        self.waiting.append(job)

    def answer(self) -> Prediction:
        needed = self.needed.get(title(self.waiting.pop(0)), 2**30)
        if needed < 0:
            raise UserError("this model or setting cannot be predicted")
        prediction: Any = SimpleNamespace(
            peak_bytes=needed, reserved_bytes=needed, least_reserved_bytes=needed, phase="forward",
            attention_kernels=(), seconds=1.0,
        )  # fmt: skip
        return prediction


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compares cases whose predictions and measurements are given; returns what was measured, the rows and status."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(memory_accuracy, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def run(
        jobs: list[Job], needed: dict[str, int], measured: Any, budget_seconds: float = 1e9, versions: str = "2"
    ) -> tuple[list[str], dict[str, dict[str, Any]], int]:
        made: list[str] = []

        def measure(job: Job) -> dict[str, Any]:
            made.append(title(job))
            clock.now += 100.0
            return measured(job)

        monkeypatch.setattr("train.memory.predict.Predictor", lambda: Planner(needed))
        monkeypatch.setattr(memory_accuracy, "measured_apart", measure)
        path = tmp_path / "memory_accuracy.json"
        options = memory_accuracy.Options(device="cuda")
        figures = memory_accuracy.Figures(options, path, {**ABOUT, "versions": {"torch": versions}})
        memory_accuracy.compare(jobs, find_device("t4"), figures, budget_seconds)
        found = json.loads(path.read_text())
        assert found["cases"] == len(found["rows"])
        memory_accuracy.page(found)
        return made, {row["case"]: row for row in found["rows"]}, figures.exit_status

    return run


def ok(job: Job) -> dict[str, Any]:
    return {"measured_bytes": 2**30, "reserved_bytes": 2**30, "seconds": 1.0}


def test_what_cannot_fit_is_left_out_and_not_a_failure(compare: Any) -> None:
    jobs = large_cases(find_device("t4"))[:3]
    made, rows, status = compare(jobs, {title(jobs[1]): 15 * 2**30}, ok)
    assert made == [title(jobs[0]), title(jobs[2])] and status == EXIT_DONE
    assert rows[title(jobs[1])]["left_out"] == "left out: predicted to need 15.3 GiB, more than the card has"
    assert rows[title(jobs[0])]["error_percent"] == 0.0


def test_what_could_have_run_and_did_not_is_a_failure(compare: Any) -> None:
    jobs = large_cases(find_device("t4"))[:2]
    made, rows, status = compare(jobs, {}, lambda job: {"error": "CUDA out of memory"})
    assert len(made) == 2 and status == EXIT_ERROR
    assert rows[title(jobs[0])]["error"] == "CUDA out of memory"
    made, rows, status = compare(jobs[:1], {title(jobs[0]): -1}, ok, versions="3")
    assert made == [] and status == EXIT_ERROR and "cannot be predicted" in rows[title(jobs[0])]["error"]


def test_a_later_call_measures_what_was_left_and_nothing_twice(compare: Any) -> None:
    jobs = large_cases(find_device("t4"))[:5]
    made, rows, status = compare(jobs, {}, ok, budget_seconds=150)
    assert (len(made), status) == (2, EXIT_STOPPED)
    assert [row.get("left_out") for row in rows.values()] == [None, None, *["left out: no time"] * 3]
    later, rows, status = compare(jobs, {}, ok)
    assert made + later == [title(job) for job in jobs] and status == EXIT_DONE
    assert not any("left_out" in row for row in rows.values())
    again, _, _ = compare(jobs, {}, ok, versions="3")  # other versions: all are measured again
    assert len(again) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "error_percent"),
    [pytest.param("opt causal_lm 2×256 mixed_precision bf16", 1, marks=takes_minutes), ("size 32", 0.05)],
)
def test_a_small_case_is_compared_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, error_percent: float
) -> None:
    """The second one evaluates with a mask, which is 2 % of its peak."""
    words = ["--only", case, "--write", "--output_dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["memory_accuracy.py", *words])
    assert memory_accuracy.main() == EXIT_DONE
    [path] = tmp_path.glob("*.json")
    [row] = json.loads(path.read_text())["rows"]
    assert abs(row["error_percent"]) < error_percent
    monkeypatch.setattr(memory_accuracy, "measured_apart", lambda job: pytest.fail("it is known"))
    assert memory_accuracy.main() == EXIT_DONE


def test_a_card_is_asked_for_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["memory_accuracy.py", "--device", "cuda"])
    assert memory_accuracy.main() == EXIT_ERROR
    assert "no CUDA device here" in capsys.readouterr().err


def test_a_title_names_the_model() -> None:
    assert accuracy_cases.model_name(large_cases(find_device("h100"))[3]) == "qwen2-0.5b"
    assert {title(job).split()[0] for job in small_cases()} == set(accuracy_cases.SMALL)


# ---- attention -------------------------------------------------------------------------------------------------------


def test_the_truth_table_is_what_the_planner_expects() -> None:
    cases = attention_kernels.cases()
    assert len(cases) == len(set(cases)) == 594
    expected = {case: attention_kernels.expected(case, Target("cuda", (7, 5))) for case in cases}
    assert {expected[case] for case in cases if case.dtype == "bfloat16"} == {"math"}
    query, key = (torch.empty(1, heads, 8, 64, dtype=torch.float16, device="meta") for heads in (8, 2))
    case = attention_kernels.Case("float16", 8, 2, 64, False, 0.0)
    assert expected[case] == attention_kernel(Target("cuda", (7, 5)), (query, key, key), is_causal=True)


def test_where_torch_chooses_otherwise_is_shown_first_and_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train.memory.card_kernels.RELEASE", (2, 13))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("train.memory.devices.this_device", lambda: find_device("h100"))
    monkeypatch.setattr(attention_kernels.building, "this_target", lambda: Target("cuda", (9, 0), True))

    def chosen(case: attention_kernels.Case) -> str:
        right = attention_kernels.expected(case, Target("cuda", (9, 0), True))
        return "math" if case.dropout and right == "cudnn" else right

    monkeypatch.setattr(attention_kernels, "chosen", chosen)
    monkeypatch.setattr("sys.argv", ["attention_kernels.py"])
    assert attention_kernels.main() == EXIT_ERROR
    said = capsys.readouterr().out
    assert said.index("## Where they differ") < said.index("## All")
    assert "| bfloat16 | 8 on 2 | 32, 64, 72, 96, 128, 192, 200, 224, 256 | no | 0.125 | cudnn | math |" in said


@pytest.mark.gpu
def test_the_planner_expects_the_kernels_that_torch_chooses_on_this_card() -> None:
    target = attention_kernels.building.this_target()
    rows = [attention_kernels.row_of(case, target, asks_torch=True) for case in attention_kernels.cases()]
    assert attention_kernels.differing(rows) == []


def test_torch_is_asked_as_attention_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the same function chooses between flash and math."""
    tensors = attention_kernels.Case.tensors
    monkeypatch.setattr(attention_kernels.Case, "tensors", lambda case, device: tensors(case, "cpu"))
    found = {
        (case.key_heads == 8, case.has_mask, bool(case.dropout)): attention_kernels.chosen(case)
        for case in attention_kernels.cases()
        if (case.dtype, case.head_size) == ("float32", 64)
    }
    assert found[True, False, False] == found[True, True, False] == "flash"
    assert found[True, False, True] == "math"  # on a CPU flash has no dropout
