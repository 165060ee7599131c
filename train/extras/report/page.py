"""The report of a run as one HTML page: no scripts, nothing fetched, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from train.extras.report.charts import Chart, Row, charts
from train.wording import count, duration, gib, number, percent, scalars, shown, words

CSS = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #ffffff; --ink: #1b1f24; --muted: #656d76; --line: #d8dee4;
  --first: #0b62d6; --second: #c2570c; --warn: #c21f30; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3; --muted: #9198a1;
  --line: #30363d; --first: #58a6ff; --second: #f0954a; --warn: #ff7b80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 40px 0 12px; }
.glance { font-size: 1.05rem; color: var(--muted); margin: 0 0 24px; max-width: 75ch; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); margin: 0; }
.cards > div, figure, .box { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.cards > div { padding: 14px 16px; }
.cards dt { color: var(--muted); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.55rem; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums; }
.cards .wide dd:not(.more) { font-size: 1.2rem; line-height: 1.6; }
@media (min-width: 540px) { .cards .wide { grid-column: span 2; } }
.cards dd.more { color: var(--muted); font-size: .85rem; font-weight: 400; line-height: 1.4; margin-top: 2px; }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; padding: 14px 16px 8px; min-width: 0; }
figcaption { color: var(--muted); font-size: .85rem; margin-bottom: 6px; }
figcaption strong { display: block; color: var(--ink); font-size: 1rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.box { overflow: auto; max-height: 38rem; padding: 4px 16px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px 7px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 500; }
th:first-child, td:first-child, .facts td, .text { text-align: left; }
.facts th { color: var(--muted); font-weight: 500; width: 14rem; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.best { font-weight: 600; }
.matrix { width: auto; }
.matrix td, .matrix th { text-align: center; padding: 8px 12px; }
.matrix tbody th { text-align: right; font-weight: 500; }
.matrix tbody td { border: 1px solid var(--card); min-width: 4.2em;
  background: color-mix(in srgb, var(--first) calc(var(--share) * 55%), transparent); }
.matrix tbody td.recall { background: none; color: var(--muted); }
pre { margin: 0; padding: 12px 0; font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; padding: 8px 0; font-weight: 500; }
footer { color: var(--muted); font-size: .85rem; margin-top: 40px; }
@media print { body { background: none; } .box { max-height: none; } figure, .cards > div { break-inside: avoid; } }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Tells the browser to fetch nothing and to run nothing."""


def page(
    title: str,
    config_yaml: str,
    summary: Mapping[str, Any],
    metrics: Sequence[Row],
    sample: str | None = None,
) -> str:
    """The whole page; everything that comes from the run is escaped, everything missing is left out.

    Args:
        title: heading of the page.
        config_yaml: the resolved configuration.
        summary: any of metric_name, metric_value, best_step, status, task, model, num_parameters, steps, epochs,
            tokens, padding_share, max_length, global_batch_size, mixed_precision, training_seconds,
            tokens_per_second, mfu, peak_allocated_bytes, predicted_peak_bytes, bytes_by_kind and peak_bytes_by_phase
            (name: bytes), memory_leak (text), max_grad_norm, references (name: bits per byte), label_names, notes
            (texts), hardware (as :func:`train.extras.report.files.hardware`), versions, world_size.
        metrics: rows of ``metrics.jsonl``.
        sample: text that the trained model wrote.
    """
    evaluations = _latest(row for row in metrics if row.get("kind") == "evaluation")
    sections = [
        _cards(summary, evaluations),
        section_html("Curves", figures_html(charts(metrics, summary))),
        section_html("Evaluations", _evaluation_table(evaluations, summary.get("best_step"))),
        section_html("Confusion matrix", _confusion_matrix(evaluations, summary.get("label_names") or ())),
        section_html("Most frequent confusions", _confusions(evaluations, summary.get("label_names") or ())),
        section_html("Sample", _pre(sample)),
        section_html("Notes", _notes([*(summary.get("notes") or ()), *filter(None, [summary.get("memory_leak")])])),
        section_html(
            "Configuration", _details("Every setting of this run; saved as config.yaml, re-runs it", config_yaml)
        ),
        section_html("Machine and versions", facts_html(machine_facts(summary))),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="glance">{escape(_glance(summary, evaluations))}</p>\n'
        + "\n".join(section for section in sections if section)
        + "\n<footer>Sizes in GiB of 2<sup>30</sup> bytes. Figures: summary.json and metrics.jsonl beside this page."
        "</footer>\n</main>\n</body>\n</html>\n"
    )


def _latest(rows: Iterable[Row]) -> list[Row]:
    """One row per split and step, the later of two, by step."""
    found = {(str(row.get("split", "validation")), row["step"]): row for row in rows}
    return sorted(found.values(), key=lambda row: row["step"])


def _glance(summary: Mapping[str, Any], evaluations: Sequence[Row]) -> str:
    """What happened, in a sentence or two."""
    parts = [
        f"Trained a {words(summary['task'])} model" if summary.get("task") else "Trained a model",
        shown(summary, "num_parameters", lambda value: f"of {count(value)} parameters"),
        shown(summary, "steps", lambda value: f"for {value:,} step{'' if value == 1 else 's'}"),
        shown(summary, "tokens", lambda value: f"on {count(value)} tokens"),
        shown(summary, "training_seconds", lambda value: f"in {duration(value)}"),
        f"on {_device(summary)}" if _device(summary) else None,
    ]
    text = " ".join(part for part in parts if part) + "."
    if summary.get("status") not in (None, "completed", "done"):
        text += f" Status: {summary['status']}."
    losses = [row["loss"] for row in evaluations if row.get("split", "validation") == "validation" and row.get("loss")]
    if len(losses) > 1:
        text += f" Validation loss went from {number(losses[0])} to {number(losses[-1])}."
    return text


def _headline(summary: Mapping[str, Any], evaluations: Sequence[Row]) -> tuple[str, Any] | None:
    """The run's own metric, or the most telling one of its last evaluation."""
    if summary.get("metric_name") and summary.get("metric_value") is not None:
        return summary["metric_name"], summary["metric_value"]
    for row in reversed(evaluations):
        of_classes = row.get("confusion_matrix") or row.get("most_frequent_confusions")
        names = ("accuracy",) if of_classes else ("bits_per_byte", "perplexity", "loss")
        for name in names:
            if row.get(name) is not None:
                return name, row[name]
    return None


def _cards(summary: Mapping[str, Any], evaluations: Sequence[Row]) -> str:
    name, value = _headline(summary, evaluations) or ("", None)
    best = shown(summary, "best_step", lambda step: f"best at step {step:,}")
    batch = shown(summary, "global_batch_size", lambda examples: f"of {count(examples)} examples")
    per_example = shown(summary, "max_length", lambda tokens: f"at most {tokens:,} per example")
    padding = shown(summary, "padding_share", lambda share: f"{percent(share)} padding")
    epochs = shown(summary, "epochs", lambda passes: f"{passes:.3g} epoch{'' if passes == 1 else 's'}")
    cards = [
        _card(words(name), None if value is None else number(value), best),
        _card("Tokens per second", shown(summary, "tokens_per_second", count), shown(summary, "mfu", _mfu)),
        _card("Peak memory", shown(summary, "peak_allocated_bytes", gib), _memory_context(summary)),
        _card("Training time", shown(summary, "training_seconds", duration), epochs),
        _card("Steps", shown(summary, "steps", number), batch),
        _card("Tokens", shown(summary, "tokens", count), ", ".join(filter(None, [per_example, padding]))),
        _card("Hardware", _device(summary), shown(summary, "mixed_precision", _precision), kind="wide"),
    ]
    return f'<dl class="cards">\n{"".join(cards)}</dl>'


def _card(name: str, value: str | None, more: str | None, kind: str = "") -> str:
    """A name, its value and a line below; nothing where there is no value."""
    if not value:
        return ""
    below = f'<dd class="more">{escape(more)}</dd>' if more else ""
    heading = escape(name[:1].upper() + name[1:])
    return f'<div class="{kind}"><dt>{heading}</dt><dd>{escape(value)}</dd>{below}</div>\n'


def _mfu(share: float) -> str:
    return f"MFU {percent(share)}"


def _precision(name: str) -> str:
    return "fp32" if name in ("no", "fp32") else f"{name} mixed precision"


def _memory_context(summary: Mapping[str, Any]) -> str | None:
    predicted = shown(summary, "predicted_peak_bytes", lambda size: f"predicted {gib(size)}")
    gpus = (summary.get("hardware") or {}).get("gpus") or []
    return predicted or (f"of {gib(gpus[0]['memory_bytes'])} on the device" if gpus else None)


def _device(summary: Mapping[str, Any]) -> str:
    """What the run ran on: the GPUs it used, or the processor."""
    machine = summary.get("hardware") or {}
    gpus = machine.get("gpus") or []
    used = summary.get("world_size") or 1
    if gpus:
        return f"{used} × {gpus[0]['name']}"
    parts = [
        shown(machine, "cpu", str),
        shown(machine, "cpu_cores", lambda cores: f"{cores} cores"),
        f"{used} processes" if used > 1 else None,
    ]
    return ", ".join(part for part in parts if part)


def section_html(heading: str, body: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>" if body else ""


def figures_html(drawn: Sequence[Chart]) -> str:
    figures = [
        f"<figure><figcaption><strong>{escape(chart.title)}</strong>{escape(chart.caption)}</figcaption>\n"
        f"{chart.svg}</figure>"
        for chart in drawn
    ]
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>" if figures else ""


def _evaluation_table(evaluations: Sequence[Row], best_step: int | None) -> str:
    """All evaluations, a column per scalar that any of them has; the best one in bold."""
    if not evaluations:
        return ""
    first, last = ["step", "split", "loss", "perplexity", "bits_per_byte", "accuracy", "macro_f1"], ["seconds"]
    names = dict.fromkeys(name for row in evaluations for name in scalars(row) if name not in ("kind", "time"))
    columns = (
        [n for n in first if n in names] + [n for n in names if n not in first + last] + [n for n in last if n in names]
    )
    texts = {name for row in evaluations for name in columns if isinstance(row.get(name), str)}
    kinds = {name: ' class="text"' if name in texts else "" for name in columns}
    head = "".join(f'<th scope="col"{kinds[name]}>{escape(words(name))}</th>' for name in columns)
    lines = []
    for row in evaluations:
        cells = "".join(f"<td{kinds[name]}>{escape(number(row.get(name)))}</td>" for name in columns)
        best = row["step"] == best_step and row.get("split", "validation") == "validation"
        mark = ' class="best"' if best else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>{"".join(lines)}</tbody>\n</table></div>'


def _confusion_matrix(evaluations: Sequence[Row], label_names: Sequence[str]) -> str:
    """The last evaluation's matrix; a cell is as dark as its share of the class it belongs to."""
    row = next((row for row in reversed(evaluations) if row.get("confusion_matrix")), None)
    if row is None:
        return ""
    matrix: list[list[int]] = row["confusion_matrix"]
    names = (
        [str(name) for name in label_names] if len(label_names) == len(matrix) else [str(i) for i in range(len(matrix))]
    )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = []
    for index, counts in enumerate(matrix):
        total = sum(counts)
        shares = [value / total if total else 0.0 for value in counts]
        cells = "".join(
            f'<td style="--share:{share:.3f}">{number(value)}</td>' for value, share in zip(counts, shares, strict=True)
        )
        recall = percent(shares[index]) if total else "–"
        lines.append(f'<tr><th scope="row">{escape(names[index])}</th>{cells}<td class="recall">{recall}</td></tr>')
    caption = (
        f"<figcaption>Rows: the true class; columns: the predicted one; {escape(str(row.get('split', 'validation')))} "
        f"at step {row['step']:,}. Last column: share of the class that was found.</figcaption>"
    )
    return (
        f'<figure style="overflow-x:auto">{caption}<table class="matrix"><thead><tr><td></td>{head}'
        f'<th scope="col">recall</th></tr></thead><tbody>{"".join(lines)}</tbody></table></figure>'
    )


def _confusions(evaluations: Sequence[Row], label_names: Sequence[str]) -> str:
    """Those of the last evaluation, in place of a matrix of many classes."""
    row = next((row for row in reversed(evaluations) if row.get("most_frequent_confusions")), None)
    if row is None:
        return ""
    names = dict(enumerate(map(str, label_names)))
    lines = []
    for confusion in row["most_frequent_confusions"]:
        classes = (confusion["reference"], confusion["prediction"])
        cells = "".join(f'<td class="text">{escape(names.get(index, str(index)))}</td>' for index in classes)
        lines.append(f"<tr>{cells}<td>{number(confusion['count'])}</td></tr>")
    where = f"{escape(str(row.get('split', 'validation')))} at step {row['step']:,}"
    return (
        f'<div class="box"><table>\n<thead><tr><th scope="col" class="text">true class</th>'
        f'<th scope="col" class="text">predicted instead</th><th scope="col">examples, {where}</th></tr></thead>\n'
        f"<tbody>{''.join(lines)}</tbody>\n</table></div>"
    )


def _pre(text: str | None) -> str:
    return f'<div class="box"><pre>{escape(text)}</pre></div>' if text else ""


def _details(heading: str, text: str) -> str:
    return (
        f'<details class="box"><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>' if text else ""
    )


def _notes(notes: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(str(note))}</li>" for note in notes) + "</ul>" if notes else ""


def machine_facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    machine = summary.get("hardware") or {}
    memory = machine.get("memory_bytes")
    gpus = ", ".join(f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in machine.get("gpus") or [])
    values = {
        "GPUs": gpus,
        "CPU": machine.get("cpu"),
        "CPU cores": machine.get("cpu_cores"),
        "Memory": memory and gib(memory),
        "Platform": machine.get("platform"),
        **(summary.get("versions") or {}),
    }
    return {name: value for name, value in values.items() if value}


def facts_html(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>' for name, value in values.items()
    )
    return f'<div class="box"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""
