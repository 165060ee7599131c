"""The report page: complete, escaped, self-contained, and there whatever is missing."""

import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from train.extras.report.charts import charts, points, thinned
from train.extras.report.files import write_report
from train.extras.report.page import page

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
    {"kind": "evaluation", "step": 30, "split": "validation", "loss": 3.5, "bits_per_byte": 3.25, "seconds": 1.0},
]
SUMMARY: dict[str, Any] = {
    "task": "causal_lm",
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
    "max_grad_norm": 1.0,
    "references": {"order-0 entropy": 4.96, "xz -9": 1.28},
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


@pytest.fixture(scope="module")
def html() -> str:
    return page("quickstart", "seed: 42\n", SUMMARY, METRICS, "once upon a time")


def test_the_page_says_what_happened(html: str):
    text = " ".join(_Outline(html).text.split())
    assert (
        "Trained a causal language model of 1.84M parameters for 30 steps on 123k tokens in 1 min 32 s on A CPU, "
        "2 cores. Validation loss went from 4.000 to 3.500." in text
    )
    for words in ("Bits per byte 3.250", "23.5k MFU 38.1%", "3.00 GiB predicted 3.10 GiB", "2 records skipped"):
        assert words in text
    assert "once upon a time" in text and "seed: 42" in text and "torch 2.13.0" in text
    assert "30 validation 3.500 3.250 1.000" in text


def test_the_page_is_well_formed_and_fetches_nothing(html: str):
    outline = _Outline(html)
    assert outline.tags.count("figure") == outline.tags.count("figcaption") == outline.tags.count("svg") == 7
    assert len(outline.ids) == len(set(outline.ids))
    assert "://" not in html and "script" not in outline.tags and "@import" not in html
    assert set(re.findall(r'(?:href|src)="(.)', html)) <= {"#"}
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html


def test_references_within_a_chart_point_to_its_own_ids(html: str):
    ids = set(_Outline(html).ids)
    assert set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html)) <= ids


def test_everything_from_the_run_is_escaped():
    attack = "<script>alert('$x$')</script>"
    matrix = {"kind": "evaluation", "step": 1, "split": attack, "bits_per_byte": 2.0, attack: attack}
    matrix["confusion_matrix"] = [[1, 0], [0, 1]]
    summary = {
        **SUMMARY,
        "task": attack,
        "status": attack,
        "metric_name": attack,
        "references": {attack: 1.5},
        "label_names": [attack, "b"],
        "notes": [attack],
        "hardware": {"cpu": attack, "platform": attack, "gpus": [{"name": attack, "memory_bytes": 1}]},
        "versions": {attack: attack},
    }
    html = page(attack, f"run_name: {attack}", summary, [matrix], attack)
    assert "<script" not in html and "script" not in _Outline(html).tags
    assert html.count("&lt;script&gt;") >= 12


def test_an_empty_run_has_a_page():
    outline = _Outline(page("nothing", "", {}, []))
    assert "figure" not in outline.tags and "table" not in outline.tags
    assert "Trained a model." in outline.text


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


def test_the_gradient_chart_marks_threshold_and_skipped_steps():
    chart = next(chart for chart in charts(METRICS, SUMMARY) if chart.title == "Gradient norm")
    assert "clipped to 1" in chart.svg and "not finite, skipped (2)" in chart.svg


def test_memory_is_shown_by_kind_and_phase_beside_the_prediction():
    chart = next(chart for chart in charts([], SUMMARY) if chart.title == "Memory by kind and phase")
    for words in ("optimizer state 1.00 GiB", "activations 1.00 GiB", "predicted 3.10 GiB", "at the peak", "2.75 GiB"):
        assert words in chart.svg
    assert "gradients" not in chart.svg  # there were none at the peak
    assert "backward 3.00 GiB" in chart.svg  # in the spoken label
    assert charts([], {"peak_allocated_bytes": 1, "bytes_by_kind": {}, "peak_bytes_by_phase": None}) == []


def test_a_leak_is_among_the_notes():
    assert "<li>memory leak: 1.0 MiB</li>" in page("t", "", {"memory_leak": "memory leak: 1.0 MiB"}, [])


def test_reference_values_stand_beside_bits_per_byte():
    chart = next(chart for chart in charts(METRICS, SUMMARY) if chart.title == "Bits per byte")
    assert "xz -9 1.28" in chart.svg and "4.96" in chart.svg


def test_confusion_matrix_shows_counts_shares_and_recall():
    row = {"kind": "evaluation", "step": 5, "split": "test", "accuracy": 0.75, "confusion_matrix": [[3, 1], [0, 0]]}
    html = page("t", "", {"label_names": ["cat", "dog"]}, [row])
    assert '<td style="--share:0.750">3</td><td style="--share:0.250">1</td><td class="recall">75.0%</td>' in html
    assert '<th scope="row">dog</th>' in html and '<td class="recall">–</td>' in html


def test_of_many_classes_the_most_frequent_confusions_are_shown():
    confusions = [{"reference": 1, "prediction": 0, "count": 1200}, {"reference": 0, "prediction": 7, "count": 3}]
    row = {"kind": "evaluation", "step": 5, "split": "test", "accuracy": 0.75, "most_frequent_confusions": confusions}
    html = page("t", "", {"label_names": ["<cat>", "dog"]}, [row])
    assert '<td class="text">dog</td><td class="text">&lt;cat&gt;</td><td>1,200</td>' in html
    assert '<td class="text">&lt;cat&gt;</td><td class="text">7</td><td>3</td>' in html


def test_a_row_written_twice_counts_once():
    again = {"kind": "evaluation", "step": 30, "split": "validation", "loss": 3.25}
    text = " ".join(_Outline(page("t", "", {}, [*METRICS, again])).text.split())
    assert "from 4.000 to 3.250" in text and "3.500" not in text


def test_points_skip_what_is_no_number():
    rows = [{"step": 2, "loss": 1}, {"step": 1, "loss": 2.5}, {"step": 3, "loss": None}, {"step": 4}]
    assert points(rows, "loss") == [(1, 2.5), (2, 1.0)]


def test_thinning_keeps_the_spike():
    series = [(step, math.sin(step / 100)) for step in range(20_000)]
    series[7_777] = (7_777, 50.0)
    kept = thinned(series, 1000)
    assert len(kept) <= 1000 and (7_777, 50.0) in kept and kept == sorted(kept)


def test_the_report_is_written_whole(tmp_path):
    path = write_report(tmp_path, "t", "a: 1", {}, [], "bad \udc80 text")
    assert path == tmp_path / "report.html" and path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
