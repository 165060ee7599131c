"""The report page: complete, escaped, self-contained, and there whatever is missing."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from train.config import Config, from_values
from train.extras.report.charts import charts, points
from train.extras.report.machine import progress_text
from train.extras.report.page import page
from train.figures import read_metrics, write_whole
from train.tasks import Task
from train.tasks.causal_lm import Task as CausalLM

pytestmark = pytest.mark.charts
METRICS: list[dict[str, Any]] = [
    {
        "kind": "train",
        "step": step,
        "loss": 5 - step / 10,
        "learning_rate": 1e-3,
        "grad_norm": None if step == 20 else 1.5,
        "tokens_per_second": 2000.0,
        "mfu": None,
        "peak_allocated_bytes": 3 * 2**30,
    }
    for step in (10, 20, 30)
] + [
    {"kind": "skipped", "step": 14, "grad_norm": None},
    {"kind": "evaluation", "step": 20, "split": "validation", "loss": 4.0, "bits_per_byte": 3.9, "seconds": 1.0},
    {
        "kind": "evaluation",
        "step": 30,
        "split": "validation",
        "loss": 3.5,
        "bits_per_byte": 3.25,
        "seconds": 1.0,
        "data": "5f25",
    },
]
SUMMARY: dict[str, Any] = {
    "num_parameters": 1_840_000,
    "steps": 30,
    "tokens": 122_880,
    "training_seconds": 92.0,
    "tokens_per_second": 23_500.0,
    "mfu": 0.381,
    "peak_allocated_bytes": 3 * 2**30,
    "predicted_peak_bytes": 3.1 * 2**30,
    "bytes_by_kind": {
        "parameters": 2**29,
        "gradients": 0,
        "optimizer state": 2**30,
        "activations": 2**30,
        "logits and loss": 2**28,
        "workspace": 2**28,
    },
    "peak_bytes_by_phase": {"forward": int(2.75 * 2**30), "backward": 3 * 2**30, "optimizer": int(1.5 * 2**30)},
    "metric_name": "bits_per_byte",
    "metric_value": 3.25,
    "best_step": 30,
    "global_batch_size": 1,
    "max_grad_norm": 1.0,
    "notes": ["2 records skipped"],
    "hardware": {"cpu": "A CPU", "cpu_cores": 2, "gpus": [], "memory_bytes": 8 * 2**30},
    "versions": {"torch": "2.13.0"},
}
VOID = {"meta", "br", "hr", "input", "img", "link"}


class _Outline(HTMLParser):
    """Checks that tags match, and gathers ids, figures and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def _config(**values: Any) -> Config:
    return from_values({"tokenizer": "bytes", "model_config": {"model_type": "llama"}, **values})


def _page(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    return page(_config(), CausalLM.title, summary, metrics, None)


@pytest.fixture(scope="module")
def html() -> str:
    return page(_config(seed=42), CausalLM.title, SUMMARY, METRICS, "once upon a time")


def test_the_page_says_what_happened(html: str):
    text = " ".join(_Outline(html).text.split())
    assert (
        "Trained a causal language model of 1.84M parameters for 30 steps of 1 example on 123k tokens in 1 min 32 s "
        "on A CPU. Validation loss went from 4.000 to 3.500." in text
    )
    for said in ("Bits per byte 3.250", "23.5k MFU 38.1%", "3.00 GiB predicted 3.10 GiB", "2 records skipped"):
        assert said in text
    assert "once upon a time" in text and "seed: 42" in text and "torch 2.13.0" in text
    assert "30 validation 3.500 3.250 1.000" in text and "5f25" not in text  # which data it is of: not a metric


def test_the_page_is_well_formed_and_fetches_nothing(html: str):
    outline = _Outline(html)
    assert outline.tags.count("figure") == outline.tags.count("figcaption") == outline.tags.count("svg") == 6
    assert len(outline.ids) == len(set(outline.ids))
    assert "://" not in html and "script" not in outline.tags and "@import" not in html
    assert set(re.findall(r'(?:href|src)="(.)', html)) <= {"#"}
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert "default-src 'none'" in html


def test_references_within_a_chart_point_to_its_own_ids(html: str):
    ids = set(_Outline(html).ids)
    assert set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html)) <= ids


class _Attack(Task):
    title = "<script>alert('$x$')</script>"


def test_everything_from_the_run_is_escaped():
    attack = _Attack.title
    matrix = {"kind": "evaluation", "step": 1, "split": attack, "bits_per_byte": 2.0, attack: attack}
    matrix["confusion_matrix"] = [[1, 0], [0, 1]]  # type: ignore
    summary = {
        **SUMMARY,
        "metric_name": attack,
        "label_names": [attack, "b"],
        "notes": [attack],
        "hardware": {"cpu": attack, "platform": attack, "gpus": [{"name": attack, "memory_bytes": 1}]},
        "versions": {attack: attack},
    }
    html = page(_config(run_name=attack), _Attack.title, summary, [matrix], attack)
    assert "<script" not in html and "script" not in _Outline(html).tags
    assert html.count("&lt;script&gt;") >= 12


def test_control_characters_and_secrets_are_not_in_the_page():
    summary = {"notes": ["\x1b[31m", "http://h/x?jwt=abc"], "label_names": ["\x07"]}
    html = page(_config(), CausalLM.title, summary, [], "sample \x1b]0;title\x07\nnext")
    assert not {"\x1b", "\x07"} & set(html) and "jwt=…" in html and "\nnext" in html


def test_an_empty_run_has_a_page():
    outline = _Outline(_page({}, []))
    assert "figure" not in outline.tags and "table" not in outline.tags
    assert "Trained a causal language model." in outline.text


def test_one_point_is_drawn_and_values_that_are_missing_are_not():
    rows = [
        {"kind": "train", "step": 1, "loss": 2.0, "grad_norm": None, "learning_rate": None, "tokens_per_second": 0.0}
    ]
    drawn = charts(rows, {})
    assert [chart.title for chart in drawn] == ["Loss", "Tokens per second"]
    assert "#m" in drawn[0].svg or "<use" in drawn[0].svg  # a marker, since one point makes no line


def test_charts_are_the_same_each_time_and_valid_xml():
    first, second = charts(METRICS, SUMMARY), charts(METRICS, SUMMARY)
    assert first == second
    for chart in first:
        root = ElementTree.fromstring(chart.svg.replace("xlink:href", "href"))
        assert root.attrib["role"] == "img" and root.attrib["aria-label"].startswith(chart.title)


def test_without_matplotlib_a_page_says_what_it_would_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for chart in charts(METRICS, SUMMARY):
        said = re.fullmatch("<p>(.+) Not drawn: matplotlib is not installed.</p>", chart.svg)
        assert said is not None and said[1].startswith(chart.title)
    outline = _Outline(_page(SUMMARY, METRICS))
    assert "Not drawn" in outline.text and "svg" not in outline.tags


def test_of_thousands_of_evaluations_the_last_hundred_are_shown() -> None:
    rows = [{"kind": "evaluation", "split": "validation", "step": n, "loss": 1 / n} for n in range(1, 4001)]
    html = _page({}, rows)
    table = html.partition("<h2>Evaluations</h2>")[2]
    steps = [
        int(step) for step in re.findall(r'<tr><th scope="row">validation</th><td>(\d+)</td>', table.replace(",", ""))
    ]
    assert steps == list(range(3901, 4001)) and "The last 100 of 4,000; metrics.jsonl has all." in table
    assert "; metrics.jsonl has all" not in _page({}, rows[:100])
    (chart,) = charts(rows, {})
    assert chart.svg.count("<use ") < 100


def test_the_gradient_chart_marks_threshold_and_skipped_steps():
    chart = next(chart for chart in charts(METRICS, SUMMARY) if chart.title == "Gradient norm")
    assert "clipped to 1" in chart.svg and "not finite, skipped (1)" in chart.svg


def test_the_prediction_is_a_line_next_to_the_measured_peak():
    chart = next(chart for chart in charts(METRICS, SUMMARY) if chart.title == "Peak memory")
    assert "measured" in chart.svg and "predicted 3.10 GiB" in chart.svg


def test_gradient_health_shows_how_far_layers_are_apart() -> None:
    health = [
        {"kind": "health", "step": step, "norms": [2.0, 0.0, None, low, 0.5]} for step, low in ((1, 0.25), (50, 1e-5))
    ]
    (chart,) = charts([*health, {"kind": "health", "step": 51, "norms": [None, 0.0]}], {})
    assert (
        chart.title == "Gradient norms by layer"
        and "from step 1 to 50; at the end the largest 2.000, the smallest" in chart.svg
    )
    texts = re.findall(">([^<>]+)</text>", chart.svg)
    assert {"the largest", "the smallest", "1e\N{MINUS SIGN}05", "1"} <= set(texts)


def test_passes_over_the_data_are_counted_in_english() -> None:
    counted = [re.findall(r">([^<>]+ epochs?)<", _page({**SUMMARY, "epochs": n}, [])) for n in (1.0, 0.25, 2.0)]
    assert counted == [["1 epoch"], ["0.25 epochs"], ["2 epochs"]]


def test_memory_is_shown_by_kind_and_phase():
    rows = re.findall('<th scope="row">([^<]+)</th><td>([^<]+)</td>', _page(SUMMARY, []))
    assert {("optimizer state", "1.00 GiB"), ("forward", "2.75 GiB"), ("backward", "3.00 GiB")} <= set(rows)
    assert "Peak memory by phase" not in _page({"bytes_by_kind": {}, "peak_bytes_by_phase": None}, [])


def test_a_leak_is_among_the_notes():
    assert "<li>memory leak: 1.0 MiB</li>" in _page({"memory_leak": "memory leak: 1.0 MiB"}, [])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hardware_and_precision_are_in_the_sentence(precision: str):
    html = _page({"hardware": {"cpu": "A CPU"}, "mixed_precision": precision}, [])
    assert f"Trained a causal language model on A CPU in {precision}." in html
    gpus = {"cpu": "A CPU", "gpus": [{"name": "NVIDIA L4", "memory_bytes": 2**34}] * 4}
    assert "model on 2 × NVIDIA L4." in _page({"hardware": gpus, "world_size": 2}, [])


def test_confusion_matrix_shows_counts():
    """Of ``final/``, which may hold an earlier step than the last that was evaluated."""
    row = {
        "kind": "evaluation",
        "step": 9,
        "split": "validation",
        "accuracy": 0.1,
        "confusion_matrix": [[8, 8], [8, 8]],
    }
    result = {"validation": {"confusion_matrix": [[7, 7], [7, 7]]}, "test": {"confusion_matrix": [[3, 1], [0, 0]]}}
    html = _page({"label_names": ["cat", "<dog>"], "final_step": 5, "result": result}, [row])
    assert "cat</th><td>8</td>" not in html
    assert '<th scope="col">true class, test</th><th scope="col">cat</th><th scope="col">&lt;dog&gt;</th>' in html
    rows = ['<th scope="row">cat</th><td>3</td><td>1</td>', '<th scope="row">&lt;dog&gt;</th><td>0</td><td>0</td>']
    assert all(row in html for row in rows)


def test_losses_of_other_validation_data_are_not_compared():
    other = {"kind": "evaluation", "step": 10, "split": "validation", "loss": 9.875, "data": "1234"}
    text = " ".join(_Outline(_page({}, [other, *METRICS])).text.split())
    assert "from 4.000 to 3.500" in text and "9.875" not in text


def test_a_row_written_twice_counts_once():
    again = {"kind": "evaluation", "step": 30, "split": "validation", "loss": 3.25}
    text = " ".join(_Outline(_page({}, [*METRICS, again])).text.split())
    assert "from 4.000 to 3.250" in text and "3.500" not in text


def test_points_skip_missing_values():
    rows = [{"step": 2, "loss": 1}, {"step": 1, "loss": 2.5}, {"step": 3, "loss": None}, {"step": 4}]
    assert points(rows, "loss") == [(1, 2.5), (2, 1.0)]


def test_a_long_curve_takes_little_room_and_keeps_its_spike():
    rows = [{"kind": "train", "step": step, "loss": math.sin(step / 100)} for step in range(20_000)]
    rows[7_777]["loss"] = 50.0
    svg = charts(rows, {})[0].svg
    curve = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0b62d6', svg)[0]
    heights = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", curve)]  # downwards from the upper edge
    assert len(svg) < 50_000 and heights.count(min(heights)) == 1 and min(heights) < sorted(heights)[1] / 5


@pytest.mark.parametrize("title", ["causal language", "my task"])
def test_the_report_is_written_whole(tmp_path: Path, title: str):
    config = _config(output_dir=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    path = tmp_path / "report.html"
    write_whole(path, page(config, title, {}, read_metrics(tmp_path / "metrics.jsonl"), "bad \udc80 text"))
    html = path.read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert f"<h1>{tmp_path.name}</h1>" in html and f"Trained a {title} model." in html and "<svg" in html
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


def test_importing_what_studies_share_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, train.extras.report.page, train.extras.meter.cards;"
        "print(sorted({'torch', 'matplotlib', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.strip() == "[]"


def test_progress_text() -> None:
    row: dict[str, Any] = {
        "loss": 2.3456,
        "learning_rate": 3e-4,
        "grad_norm": 0.9,
        "tokens_per_second": 24123.0,
        "mfu": 0.384,
        "peak_allocated_bytes": 5 * 2**30,
    }
    assert progress_text(row) == "loss 2.346, lr 3.00e-04, grad 0.9, 24.1k tok/s, MFU 38.4%, 5.00 GiB"
    assert progress_text({"loss": 1.0, "mfu": None, "grad_norm": math.inf}) == "loss 1, grad inf"


def test_a_card_that_a_run_on_the_cpu_leaves_alone_is_not_its_hardware(monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from train.extras.report.machine import hardware

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    card = SimpleNamespace(name="NVIDIA L4", total_memory=2**34)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    assert hardware("cpu")["gpus"] == []
    assert hardware("cuda")["gpus"] == hardware()["gpus"] == [{"name": "NVIDIA L4", "memory_bytes": 2**34}]
