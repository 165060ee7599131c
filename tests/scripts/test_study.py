"""The study over length, micro-batch and technique: its cells, what it keeps and says, and a real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, printed_and_imported

from scripts.benchmarks.study import measure, request, run
from scripts.benchmarks.study.cells import (
    DOES_NOT_FIT,
    FAILED,
    LEFT_OUT,
    MEASURED,
    NOT_REACHED,
    OUT_OF_MEMORY,
    PREDICTED,
    Cell,
    Reach,
    Results,
    Sweep,
    frontier,
)
from scripts.benchmarks.study.findings import findings, in_words, subject
from scripts.benchmarks.study.page import page
from scripts.benchmarks.study.tables import markdown
from train.memory.predict import Job, Prediction
from train.records import UsageError, UserError

GIB = 2**30
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def flags(folder: Path, *more: str) -> list[str]:
    own = ["--model_config", json.dumps(MODEL), "--tokenizer", "bytes", "--task", "causal_lm"]
    return [*own, "--lengths", "64,128", "--micro_batch_sizes", "1,2", "--output_dir", str(folder), *more]


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_every_cell_has_the_tokens_of_an_update() -> None:
    found = list(request.shapes((64, 128, 192), (1, 2, 4), 256))
    kept = [(length, size, accumulation) for length, size, accumulation, problem in found if problem is None]
    assert kept == [(64, 1, 4), (64, 2, 2), (64, 4, 1), (128, 1, 2), (128, 2, 1)]
    problems = {(length, size): problem for length, size, _, problem in found if problem}
    assert problems[128, 4] == "more than the 256 tokens of an update"
    assert problems[192, 1] == "its tokens do not divide the 256 tokens of an update"


def test_a_technique_is_its_parts_and_nothing_else() -> None:
    none = {"gradient_checkpointing": "none", "gradient_checkpointing_every_n_layers": 1}
    assert request.changes_of("baseline") == {**none, "loss": "full"}
    assert request.changes_of("checkpointing+chunked_loss") == {"gradient_checkpointing": "full", "loss": "chunked"}
    assert request.changes_of("bf16+selective") == {
        "gradient_checkpointing": "selective",
        "loss": "full",
        "mixed_precision": "bf16",
    }


def test_the_step_of_a_cell_is_the_recipe_with_its_changes(tmp_path: Path) -> None:
    asked = request.read_request(flags(tmp_path, "--optimizer", "sgd", "--global_batch_size", "64"))
    assert asked.tokens_per_update == 256  # of the largest micro-batch
    job = request.job_for(asked, "checkpointing+chunked_loss", 64, 2, accumulation=2)
    wanted = {"max_length": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "global_batch_size": None}
    wanted |= {"gradient_checkpointing": "full", "loss": "chunked", "optimizer": "sgd"}
    assert {name: job.values[name] for name in wanted} == wanted
    assert (job.length, job.micro_batch_size, job.accumulates, job.eval_batch_size) == (64, 2, True, None)
    assert not request.job_for(asked, "baseline", 128, 2, accumulation=1).accumulates


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--techniques", "baseline,magic"], "'magic' is none of baseline, checkpointing"),
        (["--techniques", "checkpointing+selective"], "exclude each other"),
        (["--lengths", "64,many"], "'many' is not a whole number"),
        (["--lengths", "1"], "at least 2 tokens"),
        (["--micro_batch_sizes", "0"], "'0' is not a whole number above zero"),
        (["--budget_gib", "-1"], "not a number above zero"),
        (["--tokens_per_update", "32"], "the smallest micro-batch has 64 tokens"),
        (["--task", "knitting"], "'knitting' is not one of"),
        (["--model_config", json.dumps({**MODEL, "max_position_embeddings": 100})], "128 is more than the model's 100"),
        (["--tokenizer", "words"], "--vocab_size"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert run.main(flags(tmp_path / "out", *more)) == UsageError.exit_status
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert said in printed.err
    assert not (tmp_path / "out").exists()


def test_help_imports_nothing_heavy() -> None:
    printed, imported = printed_and_imported("scripts/study.py", "sweep", "--help")
    assert "--tokens_per_update" in printed
    assert "train.config" in imported and not imported & {"torch", "transformers", "matplotlib"}


# ---- what is kept ----------------------------------------------------------------------------------------------------


class LinearPredictor:
    """Predicts 2^20 bytes for each token of a micro-batch, half as many with full checkpointing."""

    def __init__(self) -> None:
        self._asked: list[Job] = []

    def __enter__(self) -> LinearPredictor:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def ask(self, job: Job) -> None:
        self._asked.append(job)

    def answer(self) -> Prediction:
        return self.predict(self._asked.pop(0))

    def predict(self, job: Job) -> Prediction:
        size = job.micro_batch_size * job.length * 2**20
        size //= 2 if job.values["gradient_checkpointing"] == "full" else 1
        return Prediction(size, "backward", "", {}, {}, size, size, 1000, 1000, (), 0.0, 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """Cells that were measured by a stand-in, which needs what is predicted and fails with one cell."""
    ran: list[tuple[str, int, int, int]] = []

    class Processes:
        def __init__(self, on_cpu: bool) -> None: ...

        def measure(self, task: measure.Task, timeout_seconds: float) -> dict[str, Any]:  # type: ignore
            job = task.job
            ran.append((task.technique, job.length, job.micro_batch_size, task.accumulation_steps))
            if ran[-1][:3] == ("checkpointing", 64, 2):
                return {"status": FAILED, "reason": "its process ended with status -9"}
            size = LinearPredictor().predict(job).peak_bytes
            return {"status": MEASURED, "peak_bytes": size, "tokens_per_second": 100.0, "seconds_per_step": 1.0}

    monkeypatch.setattr(run, "Predictor", LinearPredictor)
    monkeypatch.setattr(run, "Processes", Processes)
    return ran


def two_techniques(folder: Path, *more: str) -> request.Request:
    return request.read_request(flags(folder, "--techniques", "baseline,checkpointing", "--budget_gib", "0.25", *more))


def test_a_failing_cell_is_recorded_and_the_others_are_measured(
    tmp_path: Path, measured: list[tuple[str, int, int, int]]
) -> None:
    result = run.run(two_techniques(tmp_path))
    assert len(measured) == len(result.grid) == 8
    assert {length * size * accumulation for _, length, size, accumulation in measured} == {256}
    assert [c.reason for c in result.grid if c.status == FAILED] == ["its process ended with status -9"]
    assert len(result.measured) == 7
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) >= 8


def test_a_second_run_measures_only_what_failed(tmp_path: Path, measured: list[tuple[str, int, int, int]]) -> None:
    first = run.run(two_techniques(tmp_path))
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"technique": "base')  # cut off by a kill
    measured.clear()
    second = run.run(two_techniques(tmp_path))
    assert measured == [("checkpointing", 64, 2, 2)]
    assert second.cells == first.cells
    measured.clear()
    run.run(two_techniques(tmp_path, "--optimizer", "sgd"))
    assert len(measured) == 8  # other settings, other cells
    measured.clear()
    run.run(two_techniques(tmp_path, "--again"))
    assert len(measured) == 8


def test_a_cell_that_is_predicted_not_to_fit_is_not_run(
    tmp_path: Path, measured: list[tuple[str, int, int, int]]
) -> None:
    result = run.run(two_techniques(tmp_path, "--limit_gib", "0.2"))
    large = next(c for c in result.grid if (c.technique, c.length, c.micro_batch_size) == ("baseline", 128, 2))
    assert (large.status, large.predicted_bytes, large.peak_bytes) == (DOES_NOT_FIT, 256 * 2**20, None)
    assert ("baseline", 128, 2, 1) not in measured and ("checkpointing", 128, 2, 1) in measured
    measured.clear()
    run.run(two_techniques(tmp_path, "--limit_gib", "0.3"))
    assert ("baseline", 128, 2, 1) in measured  # now it may


def test_no_cell_begins_when_time_is_up(tmp_path: Path, measured: list[tuple[str, int, int, int]]) -> None:
    asked = two_techniques(tmp_path)
    run.run(replace(asked, micro_batch_sizes=(1,)))
    measured.clear()
    result = run.run(replace(asked, stop_after_seconds=0.0))
    assert measured == []
    assert {(c.micro_batch_size, c.status, c.reason) for c in result.grid if c.status != MEASURED} == {
        (2, NOT_REACHED, "no time")
    }


def test_what_fits_is_searched_beyond_the_grid(tmp_path: Path, measured: list[tuple[str, int, int, int]]) -> None:
    result = run.run(two_techniques(tmp_path, "--budget_gib", "0.32"))  # 327 tokens' worth
    reach = {(r.technique, r.length): (r.micro_batch_size, r.complete) for r in frontier(result.cells, int(0.32 * GIB))}
    assert reach == {
        ("baseline", 64): (5, True),
        ("baseline", 128): (2, True),
        ("checkpointing", 64): (10, True),
        ("checkpointing", 128): (5, True),
    }


def test_nothing_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(LinearPredictor):
        def predict(self, job: Job) -> Prediction:
            raise UserError("model_config: llama has no field knots.")

    class Processes:
        def __init__(self, on_cpu: bool) -> None: ...

        def measure(self, task: measure.Task, timeout_seconds: float) -> dict[str, Any]:  # type: ignore
            return {"status": FAILED, "reason": "model_config: llama has no field knots."}

    monkeypatch.setattr(run, "Predictor", Fails)
    monkeypatch.setattr(run, "Processes", Processes)
    with pytest.raises(UserError, match="no cell could be measured: model_config: llama has no field knots"):
        run.run(two_techniques(tmp_path))


# ---- what follows ----------------------------------------------------------------------------------------------------


def cell(technique: str, length: int, size: int, peak_gib: float | None, seconds: float = 1.0, **more: Any) -> Cell:
    peak = None if peak_gib is None else int(peak_gib * GIB)
    status = MEASURED if peak else more.pop("status")
    speed = 4096 / seconds if peak else None
    known: dict[str, Any] = {"peak_bytes": peak, "seconds_per_step": seconds if peak else None, "steps": 3}
    known |= {"tokens_per_second": speed, "num_parameters": 8_400_000, "precision": "no"}  # as accelerate calls fp32
    return Cell(technique, length, size, 4096 // (length * size), status, **{**known, **more})


def planted() -> Sweep:
    cells = [
        cell("baseline", 1024, 1, 0.5, 1.0, predicted_bytes=int(0.5 * GIB)),
        cell("baseline", 1024, 2, 0.98, 0.8, predicted_bytes=int(0.99 * GIB)),
        cell("baseline", 1024, 4, 2.0, 0.5),
        cell("baseline", 2048, 1, 1.0, 1.25),
        cell("baseline", 2048, 2, None, status=DOES_NOT_FIT, predicted_bytes=3 * GIB, reason="more than the limit"),
        cell("baseline", 2048, 4, None, status=LEFT_OUT, reason="more than the tokens"),
        cell("checkpointing", 1024, 1, 0.4, 1.2),
        cell("checkpointing", 1024, 2, 0.5, 1.2),
        cell("checkpointing", 1024, 4, 0.75, 1.0),
        cell("checkpointing", 2048, 1, 0.25, 1.5),
        cell("checkpointing", 2048, 2, 0.5, 1.6),
        cell("checkpointing", 2048, 4, None, status=FAILED, reason="a bug"),
        cell("checkpointing", 2048, 12, None, status=PREDICTED, predicted_bytes=int(0.9 * GIB)),
        cell("checkpointing", 2048, 14, None, status=PREDICTED, predicted_bytes=int(1.1 * GIB)),
    ]
    hardware = {"cpu": "Planted CPU", "cpu_cores": 2, "memory_bytes": 8 * GIB, "gpus": []}
    return Sweep("llama", 32000, "cpu", 4096, int(0.95 * GIB), 2 * GIB, tuple(cells), hardware, {"torch": "2.13.0"})


def test_the_sentences_say_what_the_figures_say() -> None:
    assert subject(planted()).startswith("Llama of 8.40M parameters, vocabulary of 32,000, fp32, on ")
    said = findings(planted())
    assert said[0] == (
        "With full checkpointing a micro-batch of 4 × 1,024 tokens takes 0.75 GiB instead of 2.00 GiB (−62 %), a step "
        "2.00 × the time of the baseline. Over 4 shapes: −56 % of memory at the median, from −75 % to −20 %; "
        "1.35 × the time."
    )
    assert said[1] == (
        "The longest length tried that fits within 0.95 GiB grows from 1,024 to 2,048 tokens with full checkpointing. "
        "At 1,024 tokens the largest micro-batch within 0.95 GiB grows from 1 to at least 4 with full checkpointing."
    )
    assert said[2] == (
        "With the baseline, 2 × 1,024 and 1 × 2,048 (2,048 tokens each) take 0.98 GiB and 1.00 GiB: memory follows the "
        "tokens of a micro-batch, not how they are cut into sequences."
    )
    assert said[3] == (
        "At 1,024 tokens a micro-batch of 2 instead of 1 takes 1.96 × the memory and brings 1.25 × the tokens per "
        "second."
    )  # that of 4 does not accumulate, so no gradients wait
    assert "from 0.50 GiB to 1.00 GiB and speed from 4.10k to 3.28k tokens per second" in said[4]
    assert said[5] == "Predicted and measured peak differ by 0.51 % at the median of 2 cells, by 1 % at most."
    assert said[6] == (
        "Of 12 cells 9 were measured; 1 predicted to need more than the limit, and not run, 1 failed, 1 left out, "
        "because their tokens do not divide those of an update."
    )
    assert len(said) == 7


def test_what_failed_is_not_said_to_be_too_large() -> None:
    cells = [
        cell("baseline", 1024, 1, 0.5, 1.0),
        cell("baseline", 2048, 1, None, status=FAILED, reason="a bug"),
        cell("checkpointing", 1024, 1, 0.4, 1.0),
        cell("checkpointing", 2048, 1, 0.5, 1.0),
    ]
    said = findings(replace(planted(), cells=tuple(cells)))
    assert "The longest length tried, 1,024 tokens, fits within 0.95 GiB with the baseline." in said


def test_memory_of_weights_follows_no_tokens() -> None:
    sizes = ((1024, 1, 1.60), (1024, 2, 1.61), (2048, 1, 1.61), (2048, 2, 1.62))
    cells = [cell("baseline", length, size, gib, 1.0) for length, size, gib in sizes]
    assert not any("memory follows" in text for text in findings(replace(planted(), cells=tuple(cells))))


def test_a_study_without_a_measured_cell_has_a_page() -> None:
    cells = [cell("baseline", 1024, 1, None, status=DOES_NOT_FIT, predicted_bytes=3 * GIB, reason="more")]
    made = page(replace(planted(), cells=tuple(cells)))
    assert "does not fit (3.00)" in made and "that was fastest at each length" not in made


def test_a_cell_that_a_smaller_limit_has_stopped_is_tried_again_and_says_nothing_of_the_budget() -> None:
    stopped = cell("baseline", 1024, 4, None, status=OUT_OF_MEMORY, predicted_bytes=GIB // 2, limit_bytes=GIB // 4)
    assert (
        run._may_fit_now(stopped, GIB) and run._may_fit_now(stopped, None) and not run._may_fit_now(stopped, GIB // 4)
    )
    [reach] = frontier([stopped], GIB)
    assert (reach.micro_batch_size, reach.measured) == (4, False)
    assert frontier([replace(stopped, limit_bytes=2 * GIB)], GIB) == []
    assert not run._may_fit_now(replace(stopped, limit_bytes=None), GIB)  # on a card, or of an earlier version


def test_a_changed_function_makes_other_cells(tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text("def build(): ...")
    job = request.job_for(request.read_request(flags(tmp_path)), "baseline", 64, 1, 1)
    job = replace(job, values={**job.values, "model": f"{source}:build"})
    first = run.key_of(job, 1, 3, {})
    assert run.key_of(job, 1, 3, {}) == first
    source.write_text("def build(): return None")
    assert run.key_of(job, 1, 3, {}) != first


def test_the_shape_matters_where_peaks_differ() -> None:
    changed = [replace(c, peak_bytes=2 * GIB) if c.length == 2048 and c.peak_bytes else c for c in planted().cells]
    said = findings(replace(planted(), cells=tuple(changed)))
    assert any("memory depends on the shape too" in sentence for sentence in said)


def test_names_of_techniques_read_in_a_sentence() -> None:
    assert in_words("checkpointing+chunked_loss") == "full checkpointing and a chunked loss"


def test_frontier_is_the_largest_that_fits_measured_where_it_was() -> None:
    found = frontier(planted().cells, int(0.95 * GIB))
    assert found == [
        Reach("baseline", 1024, 1, int(0.5 * GIB), measured=True, complete=True),
        Reach("baseline", 2048, 0, 1 * GIB, measured=True, complete=True),
        Reach("checkpointing", 1024, 4, int(0.75 * GIB), measured=True, complete=False),
        Reach("checkpointing", 2048, 12, int(0.9 * GIB), measured=False, complete=True),
    ]


def test_what_ran_out_of_memory_does_not_fit_whatever_was_predicted() -> None:
    cells = [
        cell("baseline", 1024, 1, 0.5),
        cell("baseline", 1024, 2, None, status=OUT_OF_MEMORY, predicted_bytes=GIB // 2),
    ]
    assert [(r.micro_batch_size, r.complete) for r in frontier(cells, 8 * GIB)] == [(1, True)]


def test_the_page_holds_the_figures_and_fetches_nothing() -> None:
    text = page(planted()).replace("&nbsp;", " ")
    for figure in ("0.50", "0.98", "2.00", "does not fit (3.00)", "failed", "~12", "≥4", "Planted CPU", "2.13.0"):
        assert figure in text, figure
    cells = re.findall(r'<td class="memory" style="--share:([\d.]+)">([\d.]+)</td>', text)
    assert ("1.000", "2.00") in cells and ("0.125", "0.25") in cells and len(cells) == 9  # one scale for all maps
    for sentence in findings(planted()):
        assert sentence in text
    assert text.count("<svg") == 3
    assert not re.search(r'(src|href)="(?!#)', text) and "<script" not in text


def test_a_reason_cannot_write_into_the_page() -> None:
    bad = replace(planted().cells[11], reason="<img src=x>")
    text = page(replace(planted(), cells=(*planted().cells[:11], bad)))
    assert "<img" not in text and "&lt;img" in text


def test_markdown_holds_the_tables() -> None:
    lines = markdown(planted()).splitlines()
    assert "| micro-batch × length | baseline | checkpointing |" in lines
    assert "| 4 × 1,024 | 2.00 | 0.75 |" in lines
    assert "| 2 × 2,048 | does not fit (3.00) | 0.50 |" in lines
    assert "| 4 × 1,024 | 8.19k | 4.10k |" in lines
    assert "| checkpointing | ≥4 | ~12 |" in lines


# ---- for real --------------------------------------------------------------------------------------------------------


def test_a_process_that_cannot_build_its_model_says_why(tmp_path: Path) -> None:
    asked = request.read_request(flags(tmp_path))
    job = request.job_for(asked, "baseline", 64, 1, accumulation=1)
    job = replace(job, values={**job.values, "model_config": {**MODEL, "knots": 1}})
    found = measure.Processes(on_cpu=True).measure(measure.Task("baseline", job, 1, 1, 1.0, None), 60)
    assert found == {"status": FAILED, "reason": "model_config: llama has no field knots."}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the data of a process")
@pytest.mark.parametrize("fence_bytes", [2**27, 2**29], ids=["in the builder", "in the step"])
def test_a_process_that_needs_more_than_was_predicted_stops_itself(tmp_path: Path, fence_bytes: int) -> None:
    asked = request.read_request(flags(tmp_path))
    job = request.job_for(asked, "baseline", 128, 2, accumulation=1)
    task = measure.Task("baseline", replace(job, vocab_size=500_000), 1, 1, 1.0, fence_bytes)
    found = measure.Processes(on_cpu=True).measure(task, 60)  # logits and their gradient take 2^30
    assert found["status"] == OUT_OF_MEMORY


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    techniques = ["--techniques", "baseline,checkpointing", "--steps", "1", "--budget_gib", "0.003"]
    command = [sys.executable, str(ROOT / "scripts" / "study.py"), *flags(tmp_path, *techniques), "--cpu_threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "sweep.json").read_text())
    grid = [Cell(**c) for c in values["cells"] if c["status"] != PREDICTED]
    assert [c.status for c in grid] == [MEASURED] * 8
    for found in grid:
        # checkpointing keeps the state of the generator, 5 KB a layer, of which a prediction does not know
        assert found.predicted_bytes == pytest.approx(found.peak_bytes, abs=2**14)
        assert found.micro_batch_size * found.length * found.accumulation_steps == 256
        assert (found.tokens_per_second or 0) > 0
    assert (tmp_path / "index.html").read_text().count('class="memory"') == 8
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "0 cells to measure, 8 known" in again.stdout


def test_a_cell_written_after_half_a_line_is_read_again(tmp_path: Path) -> None:
    first, second = (Cell("none", 1024, 1, 1, "measured", key=key) for key in ("first", "second"))
    results = Results(tmp_path)
    results.add(first)
    results.close()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"technique": "no')
    results = Results(tmp_path)
    results.add(second)
    results.close()
    assert [Results(tmp_path).of(key) for key in ("first", "second")] == [first, second]
