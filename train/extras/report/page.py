"""The report of a run as one HTML page: no scripts, nothing fetched, readable in light and dark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import Config, dump
from train.extras.report import Options
from train.extras.report.charts import Chart, Row, charts
from train.extras.report.machine import machine_facts, scalars, shown, words
from train.figures import count, duration, gib, number, read_metrics, several, without_secrets, write_whole

if TYPE_CHECKING:
    from train.tasks import Task

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

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser fetches and runs nothing


def write_report(config: Config, task: type[Task], summary: Mapping[str, Any], sample: str | None = None) -> Path:
    """Writes ``report.html`` next to ``metrics.jsonl``; raises UserError if it cannot, or the latter is damaged."""
    folder = Path(config.output.output_dir)
    write_whole(folder / "report.html", page(config, task, summary, read_metrics(folder / "metrics.jsonl"), sample))
    return folder / "report.html"


def page(
    config: Config, task: type[Task], summary: Mapping[str, Any], metrics: Sequence[Row], sample: str | None = None
) -> str:
    """One page that needs no other file; everything that comes from the run is escaped, everything missing left out.

    ``summary`` is as in ``summary.json``, ``metrics`` as in ``metrics.jsonl``; ``sample`` is what the model wrote.
    """
    latest = {(row["split"], row["step"]): row for row in metrics if row["kind"] == "evaluation"}
    evaluations = sorted(latest.values(), key=lambda row: row["step"])  # one row per split and step, the later of two
    labels = [str(name) for name in summary.get("label_names") or ()]
    notes = [*(summary.get("notes") or ()), *filter(None, [summary.get("memory_leak")])]
    listed = "".join(f"<li>{escape(str(note))}</li>" for note in notes)
    settings = "<summary>Every setting of this run; saved as config.yaml, re-runs it</summary>"
    sections = [
        _cards(summary),
        section_html("Curves", figures_html(charts(metrics, summary))),
        section_html("Evaluations", _evaluations(evaluations, summary.get("best_step"))),
        section_html("Confusion matrix", _confusion_matrix(evaluations, labels)),
        section_html("Most frequent confusions", _confusions(evaluations, labels)),
        section_html("Sample", sample and f'<div class="box"><pre>{escape(sample)}</pre></div>'),
        section_html("Notes", listed and f"<ul>{listed}</ul>"),
        section_html("Configuration", f'<details class="box">{settings}<pre>{escape(dump(config))}</pre></details>'),
        section_html("Machine and versions", facts_html(machine_facts(summary))),
    ]
    title = escape(config.of(Options).run_name or Path(config.output.output_dir).resolve().name)
    return without_secrets(f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{CSS}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="glance">{escape(_glance(task, summary, evaluations))}</p>
{"".join(sections)}<footer>
Sizes in GiB of 2<sup>30</sup> bytes. Figures: summary.json and metrics.jsonl in the same folder.</footer>
</main>
</body>
</html>
""")


def _glance(task: type[Task], summary: Mapping[str, Any], evaluations: Sequence[Row]) -> str:
    """What happened, in a sentence or two."""
    parts = [
        f"Trained a {task.title or words(task.name)} model",
        shown(summary, "num_parameters", lambda value: f"of {count(value)} parameters"),
        shown(summary, "steps", lambda value: f"for {several(value, 'step')}"),
        shown(summary, "tokens", lambda value: f"on {count(value)} tokens"),
        shown(summary, "training_seconds", lambda value: f"in {duration(value)}"),
        f"on {_device(summary)}" if _device(summary) else None,
    ]
    text = " ".join(filter(None, parts)) + "."
    losses = [row["loss"] for row in evaluations if row["split"] == "validation" and row.get("loss")]
    if len(losses) > 1:
        text += f" Validation loss went from {number(losses[0])} to {number(losses[-1])}."
    return text


def _cards(summary: Mapping[str, Any]) -> str:
    """Boxes with a name, its value and a line below; those without a value are left out."""
    get = partial(shown, summary)
    gpus = (summary.get("hardware") or {}).get("gpus")
    memory = get("predicted_peak_bytes", lambda size: f"predicted {gib(size)}")
    memory = memory or (f"of {gib(gpus[0]['memory_bytes'])} on the device" if gpus else None)
    epochs = get("epochs", lambda passes: f"{passes:.3g} epoch{'' if passes == 1 else 's'}")
    batch = get("global_batch_size", lambda examples: f"of {count(examples)} examples")
    lengths = [get("max_length", "at most {:,} per example".format), get("padding_share", "{:.1%} padding".format)]
    full = summary.get("mixed_precision") in ("no", "fp32")
    precision = "fp32" if full else get("mixed_precision", "{} mixed precision".format)
    metric = words(summary.get("metric_name") or "")
    cards = [
        (metric[:1].upper() + metric[1:], get("metric_value", number), get("best_step", "best at step {:,}".format)),
        ("Tokens per second", get("tokens_per_second", count), get("mfu", "MFU {:.1%}".format)),
        ("Peak memory", get("peak_allocated_bytes", gib), memory),
        ("Training time", get("training_seconds", duration), epochs),
        ("Steps", get("steps", number), batch),
        ("Tokens", get("tokens", count), ", ".join(filter(None, lengths))),
        ("Hardware", _device(summary), precision),
    ]
    boxes = []
    for name, value, more in cards:
        kind, below = "wide" if name == "Hardware" else "", f'<dd class="more">{escape(more)}</dd>' if more else ""
        if value:
            boxes.append(f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd>{below}</div>\n')
    return f'<dl class="cards">\n{"".join(boxes)}</dl>\n'


def _device(summary: Mapping[str, Any]) -> str:
    """What the run ran on: the GPUs it used, or the processor."""
    machine, used = summary.get("hardware") or {}, summary.get("world_size") or 1
    if machine.get("gpus"):
        return f"{used} × {machine['gpus'][0]['name']}"
    cores = shown(machine, "cpu_cores", lambda number_of_cores: f"{number_of_cores} cores")
    return ", ".join(filter(None, [machine.get("cpu"), cores, f"{used} processes" if used > 1 else None]))


def section_html(heading: str, body: str | None) -> str:
    """A section under its heading; nothing without a body."""
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>\n" if body else ""


def figures_html(drawn: Sequence[Chart]) -> str:
    """Charts in a grid, each with its caption."""
    figures = ""
    for chart in drawn:
        caption = f"<strong>{escape(chart.title)}</strong>{escape(chart.caption)}"
        figures += f"<figure><figcaption>{caption}</figcaption>\n{chart.svg}</figure>\n"
    return figures and f'<div class="charts">\n{figures}</div>'


def facts_html(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    cells = [f'<th scope="row">{escape(name)}</th><td>{escape(str(value))}</td>' for name, value in values.items()]
    rows = "".join(f"<tr>{pair}</tr>" for pair in cells)
    return f'<div class="box"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], best: Collection[int] = ()) -> str:
    """Rows of values under the names of their columns, texts to the left, and the rows ``best`` in bold."""
    if not rows:
        return ""
    columns = zip(*rows, strict=True)
    kinds = [' class="text"' if any(isinstance(value, str) for value in column) else "" for column in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(names, kinds, strict=True))
    body = ""
    for place, row in enumerate(rows):
        cells = (f"<td{kind}>{escape(number(value))}</td>" for value, kind in zip(row, kinds, strict=True))
        mark = ' class="best"' if place in best else ""
        body += f"<tr{mark}>{''.join(cells)}</tr>\n"
    return f'<div class="box"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>'


def _evaluations(evaluations: Sequence[Row], best_step: int | None) -> str:
    """All evaluations, a column per scalar that any of them has; the best one in bold."""
    names = dict.fromkeys(name for row in evaluations for name in scalars(row) if name not in ("kind", "time"))
    best = [i for i, row in enumerate(evaluations) if (row["split"], row["step"]) == ("validation", best_step)]
    return _table([words(name) for name in names], [[row.get(name) for name in names] for row in evaluations], best)


def _confusion_matrix(evaluations: Sequence[Row], labels: Sequence[str]) -> str:
    """The last evaluation's matrix; a cell is as dark as its share of the class it belongs to."""
    matrix, where = _last("confusion_matrix", evaluations)
    if not matrix:
        return ""
    names = [escape(labels[index] if len(labels) == len(matrix) else str(index)) for index in range(len(matrix))]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = []
    for index, counts in enumerate(matrix):
        shares = [value / max(1, sum(counts)) for value in counts]
        cells = [f'<td style="--share:{share:.3f}">{value:,}</td>' for share, value in zip(shares, counts, strict=True)]
        recall = f"{shares[index]:.1%}" if sum(counts) else "–"
        lines.append(f'<tr><th scope="row">{names[index]}</th>{"".join(cells)}<td class="recall">{recall}</td></tr>')
    return (
        '<figure style="overflow-x:auto"><figcaption>Rows: the true class; columns: the predicted one; '
        f"{escape(where)}. Last column: share of the class that was found."
        '</figcaption><table class="matrix"><thead><tr><td></td>'
        f'{head}<th scope="col">recall</th></tr></thead><tbody>{"".join(lines)}</tbody></table></figure>'
    )


def _confusions(evaluations: Sequence[Row], labels: Sequence[str]) -> str:
    """Those of the last evaluation, in place of a matrix of many classes."""
    confusions, where = _last("most_frequent_confusions", evaluations)
    names, rows = dict(enumerate(labels)), []
    for found in confusions:
        true, predicted = (names.get(found[key], str(found[key])) for key in ("reference", "prediction"))
        rows.append([true, predicted, found["count"]])
    return _table(["true class", "predicted instead", f"examples, {where}"], rows)


def _last(name: str, evaluations: Sequence[Row]) -> tuple[list[Any], str]:
    """The last evaluation's value of this name, and of which split and step it is."""
    found = ((row[name], f"{row['split']} at step {row['step']:,}") for row in reversed(evaluations) if row.get(name))
    return next(found, ([], ""))
