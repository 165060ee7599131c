"""Charts and the page of studies whose cells are real runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from scripts.benchmarks.harness import Table, machine_line
from scripts.benchmarks.study.charts import COLOURS, drawn_svg
from scripts.benchmarks.study.page import study_page
from scripts.benchmarks.study.trials import DONE, Outcome, interval, outcomes_of
from train.extras.report.charts import FIRST, MUTED, Chart
from train.extras.report.page import facts_html, figures_html, machine_facts, section_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows: TypeAlias = Sequence[Sequence[str]]
"""A table; the first row has the titles, and the last column is prose."""


def variants_chart(outcomes: Sequence[Outcome], name: str) -> Chart:
    """A metric of each variant: every seed as a dot, the mean and its 95 % interval as a line."""
    outcomes = [outcome for outcome in outcomes if name in outcome.metrics]
    variants = list(dict.fromkeys(outcome.variant for outcome in outcomes))

    def draw(axes: Axes) -> None:
        for place, variant in enumerate(reversed(variants)):
            values = [o.metrics[name] for o in outcomes if o.variant == variant]
            mean = interval(values)
            axes.plot(values, [place] * len(values), "o", color=MUTED, markersize=4)
            if mean.count > 1:
                axes.plot([mean.low, mean.high], [place] * 2, color=FIRST, linewidth=2)
            axes.plot([mean.mean], [place], "D", color=FIRST, markersize=6, label="mean" if not place else None)
        axes.set_yticks(range(len(variants)), list(reversed(variants)))
        axes.set_xlabel(name.replace("_", " "))

    caption = "Dots: seeds; diamond and line: mean and its 95 % interval over seeds."
    return Chart(name.replace("_", " "), caption, drawn_svg(f"variants {name}", caption, draw))


def losses_chart(outcomes: Sequence[Outcome]) -> Chart:
    """The training loss of each variant, of its first seed."""
    first = {outcome.variant: outcome for outcome in reversed(outcomes) if outcome.losses}

    def draw(axes: Axes) -> None:
        for number, (variant, outcome) in enumerate(reversed(first.items())):
            style = ("-", "--", ":")[number // len(COLOURS) % 3]
            steps, losses = zip(*outcome.losses, strict=True)
            axes.plot(steps, losses, style, color=COLOURS[number % len(COLOURS)], linewidth=1.4, label=variant)
        axes.set_xlabel("step")

    caption = "Training loss of the first seed of each variant."
    return Chart("Loss", caption, drawn_svg("losses", caption, draw))


def run_page(found: dict[str, Any], said: Sequence[str], tables: Mapping[str, Rows], charts: Sequence[Chart]) -> str:
    """The page of a study: what its figures say, its tables by their titles, and the charts."""
    outcomes = [outcome for outcome in outcomes_of(found) if outcome.status == DONE]
    drawn = [*charts, *([losses_chart(outcomes)] if outcomes else [])]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
    sections = [
        f'<ul class="findings">{items}</ul>\n',
        *(section_html(title, _table_html(table)) for title, table in tables.items()),
        section_html("Charts", figures_html(drawn)),
        section_html("Machine and versions", facts_html(machine_facts(found))),
    ]
    return study_page(found["title"], f"scripts/study.py {found['command']}", "".join(sections))


def _table_html(table: Rows) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in table[1:])
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def run_markdown(found: dict[str, Any], said: Sequence[str], tables: Mapping[str, Rows]) -> str:
    """The page in Markdown."""
    lines: list[str] = []
    for title, table in tables.items():
        heading = [f"## {title}", ""] if len(tables) > 1 else []
        lines += [*heading, *Table(table[0], "l" + "r" * (len(table[0]) - 2) + "l").lines(table[1:]), ""]
    head = [f"# {found['title']}", "", f"`python scripts/study.py {found['command']}`: {machine_line(found)}.", ""]
    return "\n".join([*head, *(f"- {sentence}" for sentence in said), "", *lines])


def write(
    folder: Path, found: dict[str, Any], said: Sequence[str], tables: Rows | Mapping[str, Rows], charts: Sequence[Chart]
) -> None:
    """Writes figures and pages, and says where; empty columns are left out."""
    named = tables if isinstance(tables, Mapping) else {"Table": tables}
    used = {title: [i for i in range(len(t[0])) if any(row[i] for row in t)] for title, t in named.items()}
    named = {title: [[row[i] for i in used[title]] for row in table] for title, table in named.items()}
    name = found["title"].lower().replace(" ", "_")
    texts = {
        f"{name}.json": json.dumps(found, indent=1) + "\n",
        f"{name}.md": run_markdown(found, said, named),
        "index.html": run_page(found, said, named, charts),
    }
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")
    print(f"\n{texts[f'{name}.md']}\n{folder / 'index.html'} shows the result; {name}.md and .json hold the figures")
