"""The report of a run as one HTML page: no scripts, nothing fetched."""

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from train.config import Config, dump
from train.extras.report import Options
from train.extras.report.charts import Chart, Row, charts
from train.extras.report.machine import machine_facts, scalars, shown
from train.figures import count, duration, gib, number, several, without_secrets

TEMPLATE, CSS = (Path(__file__).with_suffix(kind).read_text(encoding="utf-8") for kind in (".html", ".css"))


def page(config: Config, kind: str, summary: Row, rows: Sequence[Row], sample: str | None) -> str:
    """One page that needs no other file; everything that comes from the run is escaped, everything missing left out.

    ``summary`` and ``rows`` are as in ``summary.json`` and ``metrics.jsonl``; a ``kind`` of model wrote ``sample``.
    """
    data = {row["split"]: row.get("data") for row in rows if row["kind"] == "evaluation"}  # of the last
    data |= {split: metrics.get("data") for split, metrics in (summary.get("result") or {}).items()}
    metrics = [row for row in rows if "split" not in row or row.get("data") in (None, data.get(row["split"]))]
    latest = {(row["split"], row["step"]): row for row in metrics if row["kind"] == "evaluation"}
    evaluations = sorted(latest.values(), key=lambda row: row["step"])  # one row per split and step, the later of two
    notes = [*(summary.get("notes") or ()), *filter(None, [summary.get("memory_leak")])]
    listed = "".join(f"<li>{escape(str(note))}</li>" for note in notes)
    sizes = {k: gib(v) for of in ("peak_bytes_by_phase", "bytes_by_kind") for k, v in (summary.get(of) or {}).items()}
    settings = "<summary>Every setting but what dataset_options holds; config.yaml has all and re-runs this</summary>"
    settings += f"<pre>{escape(dump(config.changed(dataset_options=None)))}</pre>"
    sections = [
        _cards(summary),
        section_html("Curves", figures_html(charts(metrics, summary))),
        section_html("Peak memory by phase, and the highest by kind", facts_html(sizes)),
        section_html("Evaluations", _evaluations(evaluations)),
        section_html("Confusions", _confusions(summary)),
        section_html("Sample", sample and f'<div class="box"><pre>{escape(sample)}</pre></div>'),
        section_html("Notes", listed and f"<ul>{listed}</ul>"),
        section_html("Configuration", f'<details class="box">{settings}</details>'),
        section_html("Machine and versions", facts_html(machine_facts(summary))),
        "<footer>\nFigures: summary.json, metrics.jsonl. GiB, MiB: 2<sup>30</sup>, 2<sup>20</sup> bytes.</footer>\n",
    ]
    title = config.of(Options).run_name or Path(config.output.output_dir).resolve().name
    return without_secrets(html_page(title, _glance(kind, summary, evaluations), "".join(sections)))


def html_page(title: str, glance: str, body: str, more_css: str = "") -> str:
    """A page that needs no other file, around ``body``."""
    return TEMPLATE.format(title=escape(title), css=CSS + more_css, glance=escape(glance), body=body)


def _glance(kind: str, summary: Mapping[str, Any], evaluations: Sequence[Row]) -> str:
    machine, used = summary.get("hardware") or {}, summary.get("world_size") or 1
    device = f"{used} × {machine['gpus'][0]['name']}" if machine.get("gpus") else machine.get("cpu")
    parts = [
        f"Trained a {kind} model",
        shown(summary, "num_parameters", lambda value: f"of {count(value)} parameters"),
        shown(summary, "steps", lambda value: f"for {several(value, 'step')}"),
        shown(summary, "global_batch_size", lambda value: f"of {several(value, 'example')}"),
        shown(summary, "tokens", lambda value: f"on {count(value)} tokens"),
        shown(summary, "padding_share", "({:.1%} padding)".format),
        shown(summary, "training_seconds", lambda value: f"in {duration(value)}"),
        device and f"on {device}",
        shown(summary, "mixed_precision", "in {}".format),
    ]
    text = " ".join(filter(None, parts)) + "."
    losses = [row["loss"] for row in evaluations if row["split"] == "validation" and row.get("loss")]
    if len(losses) > 1:
        text += f" Validation loss went from {number(losses[0])} to {number(losses[-1])}."
    return text


def _cards(summary: Mapping[str, Any]) -> str:
    """Boxes with a name, its value and a line below; those without a value are left out."""
    get = partial(shown, summary)
    metric = (summary.get("metric_name") or "").replace("_", " ")
    cards = [
        (metric[:1].upper() + metric[1:], get("metric_value", number), get("best_step", "best step: {:,}".format)),
        ("Tokens per second", get("tokens_per_second", count), get("mfu", "MFU {:.1%}".format)),
        ("Peak memory", get("peak_allocated_bytes", gib), get("predicted_peak_bytes", lambda n: f"predicted {gib(n)}")),
        ("Training time", get("training_seconds", duration), get("epochs", lambda n: f"{n:.3g} epoch{'s' * (n != 1)}")),
    ]
    boxes = ""
    for name, value, more in cards:
        below = f'<dd class="more">{escape(more)}</dd>' if more else ""
        boxes += f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd>{below}</div>\n" if value else ""
    return f'<dl class="cards">\n{boxes}</dl>\n'


def section_html(heading: str, body: str | None) -> str:
    """A section under its heading; nothing without a body."""
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>\n" if body else ""


def figures_html(drawn: Sequence[Chart]) -> str:
    figures = ""
    for chart in drawn:
        caption = f"<strong>{escape(chart.title)}</strong>{escape(chart.caption)}"
        figures += f"<figure><figcaption>{caption}</figcaption>\n{chart.svg}</figure>\n"
    return figures and f'<div class="charts">\n{figures}</div>'


def facts_html(values: Mapping[str, Any]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(str(v))}</td></tr>' for k, v in values.items())
    return f'<div class="box"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = ([escape(number(value)) for value in row] for row in rows)
    body = "".join(f'<tr><th scope="row">{name}</th><td>{"</td><td>".join(more)}</td></tr>\n' for name, *more in lines)
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table>" if rows else ""
    return table and f'<div class="box">{table}</div>'


def _evaluations(evaluations: Sequence[Row]) -> str:
    """The last 100 evaluations, with a column per scalar that any of them has."""
    names = dict.fromkeys(name for row in evaluations for name in scalars(row) if name not in ("kind", "time", "data"))
    rows = [[row.get(name) for name in names] for row in evaluations[-100:]]
    some = f"<p>The last 100 of {len(evaluations):,}; metrics.jsonl has all.</p>" if len(evaluations) > 100 else ""
    return some + _table([name.replace("_", " ") for name in names], rows)


def _confusions(summary: Mapping[str, Any]) -> str:
    """The matrix of ``final/`` on the test split, or else the validation split, a row per true class; up to 100."""
    result: dict[str, Any] = {"": {}} | (summary.get("result") or {})
    split, metrics = list(result.items())[-1]
    names = {index: str(label) for index, label in enumerate(summary.get("label_names") or ())}
    matrix: Sequence[Any] = metrics.get("confusion_matrix") or ()
    rows = [[names.get(true, str(true)), *counts] for true, counts in enumerate(matrix)]
    return _table([f"true class, {split}", *(row[0] for row in rows)], rows)
