"""The study of gradient health: what its figures say, what thresholds would have clipped, and a real one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import printed_and_imported, takes_minutes, write_recipe

from scripts.benchmarks import harness, study
from scripts.benchmarks.study import gradient_health as health
from scripts.benchmarks.study.trials import DIVERGED, DONE, REFUSED


def row(step: int, norms: Sequence[float] = (1.0, 0.5, 2.0), **other: Any) -> dict[str, Any]:
    names = ("flushed", "overflowed", "flushed_scaled", "overflowed_scaled")
    own = {name: [0.0] * len(norms) for name in names}
    own |= {"activations": [3.0] * len(norms), "loss_scale": None, "fp16": False}
    own |= {"exponents": {"-27": 0.05, "-26": 0.05, "-10": 0.4, "-3": 0.4}, "zeros": 0.1, "grad_norm": 2.3}
    return {"step": step, "layers": ["embed", "layers.0", "head"], "norms": list(norms), **own, **other}


def found(norms: Sequence[float | None], rows: Sequence[dict[str, Any]], **other: Any) -> dict[str, Any]:
    ran = {"variant": "run", "seed": 1, "status": DONE}
    given = {"max_grad_norm": 1.0, "max_grad_value": None, "outcomes": [ran]}
    return {"norms": [list(norms)], "rows": list(rows), **given, **other}


ROWS = [row(1), row(2)]
NORMS = [100.0] * 10 + [0.5 + i / 100 for i in range(90)]
"""The first tenth is larger; the others are 0.50, 0.51, ... 1.39."""


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (0.6, "max_grad_norm: 0.6 clips 88% of the steps: it sets the length of nearly every step"),
        (1.0, "max_grad_norm: 1 clips 43% of the steps, more than outliers. max_grad_norm: 1.35 would clip 4.4%"),
        (1.37, "max_grad_norm: 1.37 clips 2.2% of the steps: outliers only, as it should."),
        (5.0, "max_grad_norm: 5 clips none of these steps: it only guards against outliers."),
        (None, "The norm is not clipped. max_grad_norm: 1.35 would clip 4.4% of these steps, the outliers."),
    ],
)
def test_advice_on_the_present_threshold(bound: float | None, said: str) -> None:
    first, second = health.clipping_advice(health.late(found(NORMS, ROWS)), bound)
    assert first.startswith("After the first steps the norm of the gradient is 0.945 at the median, 1.35 at the 95th")
    assert second.startswith(said)


@pytest.mark.parametrize("count", [1, 2, 20, 40, 99, 100])
def test_the_bound_that_is_advised_clips_what_is_said_of_it(count: int) -> None:
    norms = [1.4 + i * 0.0004 for i in range(count)]  # two digits would not tell them apart
    assert health.share_above(norms, health.quantile(norms, 0.95)) == pytest.approx(count // 20 / count)
    said = re.search(r"max_grad_norm: ([\d.]+) would clip ([\d.]+)%", health.clipping_advice(norms, None)[1])
    assert said and 100 * health.share_above(norms, float(said[1])) == pytest.approx(float(said[2]), abs=0.05)
    assert float(said[2]) <= 5


def test_norms_that_are_two_quantiles_have_both_labels() -> None:
    _, *rows = health.norm_rows(found([1.7] * 20, ROWS))
    assert {cells[0]: cells[4] for cells in rows}["1.7"] == "50% are not above; 95% are not above; 99% are not above"


def test_what_each_norm_would_have_clipped() -> None:
    titles, *rows = health.norm_rows(found(NORMS, ROWS))
    by_norm = {cells[0]: cells[1:] for cells in rows}
    assert titles[:2] == ["norm", "steps clipped"]
    assert by_norm["1"] == ["49 %", "43.3 %", "0.93", "present"]
    assert by_norm["0.25"][:3] == ["100 %", "100 %", f"{sum(0.25 / n for n in NORMS[10:]) / 90:.2f}"]
    assert by_norm["10"] == ["10 %", "0 %", "1.00", ""]
    assert by_norm["1.35"][3] == "95% are not above"
    assert health.norm_rows(found([None, None], ROWS)) == [titles]


def test_what_each_value_would_have_clipped() -> None:
    _, *rows = health.value_rows(found(NORMS, ROWS, max_grad_value=0.07))
    shares = {cells[0]: cells[1] for cells in rows}
    assert (shares["0.25"], shares["0.0625"], shares["0.000977"]) == ("0 %", "40 %", "80 %")
    assert [cells[0] for cells in rows if cells[2]] == ["0.0625"]


def test_shares_in_fp16_follow_from_the_sizes_of_elements() -> None:
    poisoned = row(3, exponents={"128": 1.0}, grad_norm=None)  # of a step whose gradient was not finite
    shares = health.elements([*ROWS, poisoned])
    assert health.outside(shares, 0) == (pytest.approx(0.1 / 0.9), 0)
    assert health.outside(shares, 16) == (0, 0)
    assert health.outside(shares, 19) == (0, pytest.approx(0.4 / 0.9))
    said = health.sentences(found(NORMS, ROWS))[-1]
    assert "without a loss scale 11.1 % of" in said
    assert "of 65,536 0 % and 0 %. The largest scale without overflow is 2^18" in said


def test_problems_come_first_and_a_run_that_failed_is_told() -> None:
    assert health.sentences(found(NORMS, ROWS))[0] == "No problem in 2 measured steps up to step 2."
    sick = [row(step, (1.0, 1e-9, 2.0)) for step in (1, 2, 4)]
    ended = {"variant": "run", "seed": 1, "status": DIVERGED, "reason": "no finite gradient"}
    first, second, *_ = health.sentences(found(NORMS, sick, outcomes=[ended]))
    assert first == "Seed 1: diverged: no finite gradient."
    assert second.startswith("From step 2 on: vanishing gradient in layers.0: ")
    nothing = health.sentences(found([], [], outcomes=[ended]))
    assert nothing == [first, "No step was measured: look at errors.txt of the run."]


def test_runs_of_other_seeds_that_lie_in_the_folder_do_not_count(tmp_path: Path) -> None:
    for seed in (1, 2, 10):
        folder = tmp_path / "run-abc" / f"seed-{seed}" / "run"
        folder.mkdir(parents=True)
        values = {"kind": "train", "step": 1, "grad_norm": float(seed)}
        (folder / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    assert health.read(tmp_path, [10, 1])["norms"] == [[1.0], [10.0]]


def test_the_log_of_an_earlier_run_is_not_taken_for_that_of_a_refused_one(tmp_path: Path) -> None:
    folder = tmp_path / "run-abc" / "seed-1" / "run"
    folder.mkdir(parents=True)
    rows = [{"kind": "health", **row(1)}, {"kind": "train", "step": 1, "grad_norm": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in rows))
    refused = {"variant": "run", "seed": 1, "status": REFUSED, "reason": "lora_rank needs adapter."}
    given = {"title": "Gradient health", "command": "gradient_health", "flags": {"seeds": [1]}, "outcomes": [refused]}
    health.pages(tmp_path, {**harness.about(), **given})
    page = (tmp_path / "gradient_health.md").read_text()
    assert "Seed 1: refused: lora_rank needs adapter.\n" in page and "No step was measured" in page
    assert "median" not in page


@pytest.mark.parametrize("name", ["gradient_health", "learning_rate"])
def test_flags_that_cannot_work_at_all_are_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out")]
    assert study.main([*words, "--learning_rte", "3"]) == 2
    assert "unknown flag --learning_rte. Did you mean --learning_rate?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_layers_have_a_row_each() -> None:
    titles, *rows = health.layer_rows([row(1), row(2, flushed=[0.2, 0.0, 0.0], activations=[None, 5.0, 3.0])])
    assert titles[:4] == ["layer", "norm", "activation", "flushed"]
    assert rows[0][:4] == ["embed", "1", "3", "10 %"] and rows[1][2] == "5"


def test_charts_are_drawn_of_a_gradient_that_vanishes() -> None:
    drawn = health.charts(found(NORMS, [row(1, (1.0, 0.0, 2.0)), row(2, (1.0, 0.0, 2.0))]))
    assert len(drawn) == 5 and all("<svg" in chart.svg and "mathdefault" not in chart.svg for chart in drawn)


def test_help_names_its_flags() -> None:
    printed, imported = printed_and_imported("scripts/study.py", "gradient_health", "--help")
    assert "--every" in printed and "torch" not in imported


@pytest.mark.slow
@takes_minutes
def test_a_real_study_names_what_ails_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "out"), "--rehearse", "False"]
    words += ["--max_steps", "12", "--learning_rate", "3", "--every", "3"]
    assert study.main(["gradient_health", *words]) == 0, capsys.readouterr().err
    made = json.loads((tmp_path / "out" / "gradient_health.json").read_text())
    assert [r["step"] for r in made["rows"]] == [1, 2, 3, 6, 9, 12]
    assert len(made["norms"][0]) == 12 and made["max_grad_norm"] == 1.0
    text = (tmp_path / "out" / "gradient_health.md").read_text()
    assert "learning rate too high in transformer." in text
    assert "## What each norm would have clipped" in text and "## What each value would have clipped" in text
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<svg") == 6 and "Elements by size" in page and "mathdefault" not in page
