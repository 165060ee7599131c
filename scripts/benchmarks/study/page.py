"""The page of a study: sentences, heat maps, tables and charts in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

from scripts.benchmarks.study.cells import MEASURED, Cell, Reach, Sweep, frontier
from scripts.benchmarks.study.charts import charts, frontier_chart
from scripts.benchmarks.study.findings import findings, shape_of, subject
from scripts.benchmarks.study.tables import cell_texts, memory_text, size_text, speed_text, why_not
from train.extras.report.page import facts_html, figures_html, html_page, machine_facts, section_html
from train.figures import gib

_MORE_CSS = """
.maps { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.maps figure { overflow-x: auto; }
.matrix td, .matrix th { text-align: center; padding: 8px 12px; }
.matrix thead th, .matrix tbody th { color: var(--muted); font-weight: 500; }
.matrix tbody th { text-align: right; }
.matrix tbody td { border: 1px solid var(--card); min-width: 4.2em; }
.matrix tbody td { background: color-mix(in srgb, var(--first) calc(var(--share) * 62%), transparent); }
.matrix tbody td.speed { background: color-mix(in srgb, var(--second) calc(var(--share) * 62%), transparent); }
.matrix tbody td.none { color: var(--muted); font-size: .8rem; background: repeating-linear-gradient(45deg,
  var(--line) 0 1px, transparent 1px 6px); }
.findings { max-width: 80ch; padding-left: 1.2em; }
.findings li { margin: 6px 0; }
.estimated { color: var(--muted); font-style: italic; }
"""
study_page = partial(html_page, more_css=_MORE_CSS)  # of a title, a line below it, and the body


def page(sweep: Sweep) -> str:
    """The whole page: no scripts, nothing fetched."""
    reaches = frontier(sweep.cells, sweep.budget_bytes)
    title = f"Memory and speed of {sweep.model} over length and micro-batch"
    budget = gib(sweep.budget_bytes)
    items = "".join(f"<li>{_unbroken(escape(sentence))}</li>" for sentence in findings(sweep))
    sections = [
        f'<ul class="findings">{items}</ul>\n',
        section_html("Peak memory, GiB", _maps(sweep, memory_text, lambda cell: cell.peak_bytes)),
        section_html(
            f"What fits within {budget}",
            figures_html([frontier_chart(reaches, sweep.techniques, budget)]) + _frontier_table(reaches, sweep),
        ),
        section_html("Tokens per second", _maps(sweep, speed_text, lambda cell: cell.tokens_per_second, kind="speed")),
        section_html("Speed and prediction", figures_html(charts(sweep))),
        section_html("All cells", _all_cells(sweep)),
        section_html(
            "Machine and versions", facts_html(machine_facts({"hardware": sweep.hardware, "versions": sweep.versions}))
        ),
    ]
    footer = (
        "<footer>Sizes in GiB of 2<sup>30</sup> bytes; memory is what tensors hold at the peak of a step. "
        "Figures: sweep.json next to this page.</footer>\n"
    )
    return study_page(title, subject(sweep), "".join(sections) + footer)


def _unbroken(text: str) -> str:
    """Keeps figures and their units on one line."""
    for unit in ("%", "GiB", "MiB", "×"):
        text = text.replace(f" {unit}", f"&nbsp;{unit}")
    return text


def _maps(
    sweep: Sweep, text: Callable[[Cell], str], value: Callable[[Cell], float | None], kind: str = "memory"
) -> str:
    """A heat map per technique; all have the same scale."""
    most = max((value(cell) or 0 for cell in sweep.measured), default=0) or 1
    figures = []
    for technique in sweep.techniques:
        cells = {shape_of(cell): cell for cell in sweep.grid if cell.technique == technique}
        head = "".join(f'<th scope="col">{size}</th>' for size in sweep.micro_batch_sizes)
        rows = []
        for length in sweep.lengths:
            row = ""
            for size in sweep.micro_batch_sizes:
                cell = cells.get((length, size))
                if cell is None or cell.status != MEASURED:
                    row += f'<td class="none" title="{escape((cell and cell.reason) or "")}">{why_not(cell)}</td>'
                else:
                    row += f'<td class="{kind}" style="--share:{(value(cell) or 0) / most:.3f}">{text(cell)}</td>'
            rows.append(f'<tr><th scope="row">{length:,}</th>{row}</tr>')
        figures.append(
            f"<figure><figcaption><strong>{escape(technique)}</strong>Rows: length; columns: micro-batch size; –: not "
            f'run.</figcaption><table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></figure>"
        )
    return f'<div class="maps">{"".join(figures)}</div>'


def _frontier_table(reaches: Sequence[Reach], sweep: Sweep) -> str:
    found = {(reach.technique, reach.length): reach for reach in reaches}
    head = "".join(f'<th scope="col">{length:,}</th>' for length in sweep.lengths)
    rows = []
    for technique in sweep.techniques:
        cells = ""
        for length in sweep.lengths:
            reach = found.get((technique, length))
            kind = ' class="estimated"' if reach is not None and not reach.measured else ""
            cells += f"<td{kind}>{size_text(reach)}</td>"
        rows.append(f'<tr><th scope="row">{escape(technique)}</th>{cells}</tr>')
    return (
        f'<div class="box" style="margin-top:16px"><table><thead><tr><th scope="col">largest micro-batch at length</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _all_cells(sweep: Sweep) -> str:
    held = "resident" if sweep.device_type == "cpu" else "reserved"
    names = ("technique", "length", "micro-batch", "accumulation", "peak GiB", "predicted", "error", f"{held} GiB")
    names += ("s per step", "tokens/s", "GFLOP/s", "MFU", "")
    texts = [cell_texts(cell) for cell in sweep.grid]
    used = [column for column in range(len(names)) if any(row[column] for row in texts)]
    head = "".join(f'<th scope="col">{names[column]}</th>' for column in used)
    rows = "".join("<tr>" + "".join(f"<td>{escape(row[column])}</td>" for column in used) + "</tr>" for row in texts)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
