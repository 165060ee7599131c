"""What a sweep over length, micro-batch and technique found: sentences, tables, heat maps and charts on one page."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from train.extras.report.charts import FIRST, INK, MUTED, SECOND, STYLE, WARN, Chart, for_page, short_count
from train.extras.report.page import CSS, POLICY, facts_html, figures_html, machine_facts, section_html
from train.outputs_log import count, gib, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, PREDICTED = "measured", "predicted"
DOES_NOT_FIT, OUT_OF_MEMORY, FAILED = "does_not_fit", "out_of_memory", "failed"
LEFT_OUT, NOT_REACHED = "left_out", "not_reached"
BASELINE = "baseline"
_WORDS = {
    BASELINE: "the baseline",
    "checkpointing": "full checkpointing",
    "selective": "selective checkpointing",
    "chunked_loss": "a chunked loss",
    "bf16": "bf16",
}
_NEARLY_EQUAL = 0.05
"""Peaks that differ by less are called the same in the text."""
_COLOURS = (INK, FIRST, SECOND, WARN, MUTED)
_MARKERS = "osD^v"
_MORE_CSS = """
.maps { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.maps figure { overflow-x: auto; }
.matrix { width: 100%; }
.matrix thead th, .matrix tbody th { color: var(--muted); }
.matrix tbody td { background: color-mix(in srgb, var(--first) calc(var(--share) * 62%), transparent); }
.matrix tbody td.speed { background: color-mix(in srgb, var(--second) calc(var(--share) * 62%), transparent); }
.matrix tbody td.none { color: var(--muted); font-size: .8rem; background: repeating-linear-gradient(45deg,
  var(--line) 0 1px, transparent 1px 6px); }
.findings { max-width: 80ch; padding-left: 1.2em; }
.findings li { margin: 6px 0; }
.estimated { color: var(--muted); font-style: italic; }
"""


@dataclass(frozen=True)
class Cell:
    """One technique at one length and micro-batch size."""

    technique: str
    length: int
    micro_batch_size: int
    accumulation_steps: int
    """Micro-batches of an update; 0: more than one, the number makes no difference."""
    status: str
    """measured; predicted (never meant to be run); does_not_fit (predicted above the limit, not run); out_of_memory;
    failed; left_out (its tokens do not divide an update's); not_reached (no time)."""
    reason: str | None = None
    """Why it was not measured."""
    key: str = ""
    """Names the settings, versions and hardware that the figures depend on."""
    peak_bytes: int | None = None
    """Largest number of bytes that tensors held."""
    held_bytes: int | None = None
    """On CUDA what the caching allocator held, on a CPU the largest resident set of the process."""
    predicted_bytes: int | None = None
    """Of ``peak_bytes``."""
    seconds_per_step: float | None = None
    """Median of ``steps`` optimizer steps."""
    steps: int = 0
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    """Of the model, recomputation not counted."""
    mfu: float | None = None
    num_parameters: int | None = None
    precision: str | None = None

    @property
    def needed_bytes(self) -> int | None:
        """Measured where it was, else predicted, else None."""
        return self.predicted_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None where one of the two is missing."""
        if self.peak_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Sweep:
    """All cells, and what they have in common."""

    model: str
    vocab_size: int
    device_type: str
    tokens_per_update: int
    budget_bytes: int
    """Memory of tensors to show what fits in."""
    limit_bytes: int | None
    """Cells that were predicted to need more were not run."""
    cells: tuple[Cell, ...]
    hardware: dict[str, Any]
    versions: dict[str, str]

    @property
    def techniques(self) -> list[str]:
        return list(dict.fromkeys(cell.technique for cell in self.cells))

    @property
    def grid(self) -> list[Cell]:
        """The cells that were asked for."""
        return [cell for cell in self.cells if cell.status != PREDICTED]

    @property
    def measured(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.status == MEASURED]

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.grid})

    @property
    def micro_batch_sizes(self) -> list[int]:
        return sorted({cell.micro_batch_size for cell in self.grid})

    @property
    def device(self) -> str:
        """The name of what it ran on."""
        if self.device_type == "cuda":
            return str(self.hardware["gpus"][0]["name"])
        return f"{self.hardware['cpu']}, {self.hardware['cpu_cores']} cores"


@dataclass(frozen=True)
class Reach:
    """The largest micro-batch of one technique and length within the budget."""

    technique: str
    length: int
    micro_batch_size: int
    """0: not even one example fits."""
    num_bytes: int
    """What it needs; for 0, what one example needs."""
    measured: bool
    complete: bool
    """Whether it is known that more do not fit."""


# ---- what follows from the cells -------------------------------------------------------------------------------------


def frontier(cells: Iterable[Cell], budget_bytes: int) -> list[Reach]:
    """The largest micro-batch within ``budget_bytes`` by technique and length, as far as cells tell."""
    rows: dict[tuple[str, int], dict[int, Cell]] = {}
    for cell in cells:
        if cell.needed_bytes is not None:
            row = rows.setdefault((cell.technique, cell.length), {})
            if cell.micro_batch_size not in row or cell.status == MEASURED:
                row[cell.micro_batch_size] = cell
    found = []
    for (technique, length), row in rows.items():
        fits = {size: _fits(cell, budget_bytes) for size, cell in row.items()}
        if largest := max((size for size, good in fits.items() if good), default=0):
            cell = row[largest]
            needed = cell.needed_bytes or 0
            complete = any(size > largest for size in fits)
            found.append(Reach(technique, length, largest, needed, cell.status == MEASURED, complete))
        elif 1 in row:
            found.append(Reach(technique, length, 0, row[1].needed_bytes or 0, row[1].status == MEASURED, True))
    return found


def _fits(cell: Cell, budget_bytes: int) -> bool:
    return cell.status != OUT_OF_MEMORY and cell.needed_bytes is not None and cell.needed_bytes <= budget_bytes


def in_words(technique: str) -> str:
    """A technique as it reads in a sentence."""
    return " and ".join(_WORDS.get(part, part) for part in technique.split("+"))


def findings(sweep: Sweep) -> list[str]:
    """What the figures say, in sentences."""
    reference = BASELINE if BASELINE in sweep.techniques else sweep.techniques[0]
    others = [name for name in sweep.techniques if name != reference]
    sentences = [_against(sweep, reference, name) for name in others]
    sentences += [
        _longest(sweep, reference),
        _shape_or_tokens(sweep, reference),
        _larger_batches(sweep, reference),
        _longer_sequences(sweep, reference),
        _accuracy(sweep),
        _missing(sweep),
    ]
    return [sentence for sentence in sentences if sentence]


def _against(sweep: Sweep, reference: str, technique: str) -> str | None:
    """One technique against the reference: at the largest micro-batch that both ran, and over all of them."""
    own, base = ({_shape(c): c for c in sweep.measured if c.technique == name} for name in (technique, reference))
    both = sorted(own.keys() & base.keys(), key=lambda shape: (shape[0] * shape[1], shape[0]))
    if not both:
        return None
    memory = [(own[shape].peak_bytes or 0) / (base[shape].peak_bytes or 1) - 1 for shape in both]
    slowdown = [(own[shape].seconds_per_step or 0) / (base[shape].seconds_per_step or 1) for shape in both]
    length, size = both[-1]
    text = (
        f"With {in_words(technique)} a micro-batch of {size} × {length:,} tokens takes "
        f"{gib(own[both[-1]].peak_bytes or 0)} instead of {gib(base[both[-1]].peak_bytes or 0)} "
        f"({_change(memory[-1])}), a step {slowdown[-1]:.2f} × the time of {in_words(reference)}."
    )
    if len(both) > 1:
        text += (
            f" Over {len(both)} shapes: {_change(statistics.median(memory))} of memory at the median, from "
            f"{_change(min(memory))} to {_change(max(memory))}; {statistics.median(slowdown):.2f} × the time."
        )
    return text


def _longest(sweep: Sweep, reference: str) -> str | None:
    """How the longest length and the largest micro-batch within the budget grow."""
    reaches = frontier(sweep.cells, sweep.budget_bytes)
    longest = {
        name: max((r.length for r in reaches if r.technique == name and r.micro_batch_size), default=0)
        for name in sweep.techniques
    }
    best = max(sweep.techniques, key=lambda name: longest[name])
    within = f"within {gib(sweep.budget_bytes)}"
    if longest[best] > longest[reference]:
        began = f"from {longest[reference]:,}" if longest[reference] else "from none of those tried"
        text = f"The longest length tried that fits {within} grows {began} to {longest[best]:,} tokens"
        text += f" with {in_words(best)}."
    elif longest[reference]:
        text = f"The longest length tried, {longest[reference]:,} tokens, fits {within} with {in_words(reference)}."
    else:
        return f"Nothing tried fits {within}."
    if not longest[reference]:
        return text
    at = {r.technique: r for r in reaches if r.length == longest[reference]}
    largest = max(at.values(), key=lambda reach: reach.micro_batch_size)
    if largest.micro_batch_size > at[reference].micro_batch_size:
        text += (
            f" At {longest[reference]:,} tokens the largest micro-batch {within} grows from {_reach(at[reference])} to "
            f"{_reach(largest)} with {in_words(largest.technique)}."
        )
    return text


def _reach(reach: Reach) -> str:
    return f"{'' if reach.complete else 'at least '}{reach.micro_batch_size}{'' if reach.measured else ' (predicted)'}"


def _shape_or_tokens(sweep: Sweep, reference: str) -> str | None:
    """Whether memory follows the tokens of a micro-batch or its shape."""
    by_tokens: dict[tuple[int, bool], list[Cell]] = {}
    for cell in sweep.measured:
        if cell.technique == reference:
            key = (cell.length * cell.micro_batch_size, cell.accumulation_steps > 1)
            by_tokens.setdefault(key, []).append(cell)
    tokens, cells = max(
        ((key[0], group) for key, group in by_tokens.items()), key=lambda e: (len(e[1]), e[0]), default=(0, [])
    )
    if len(cells) < 2:
        return None
    cells = sorted(cells, key=lambda cell: cell.length)
    peaks = [cell.peak_bytes or 0 for cell in cells]
    spread = max(peaks) / min(peaks) - 1
    shapes = _and([f"{cell.micro_batch_size} × {cell.length:,}" for cell in cells])
    sizes = _and([gib(peak) for peak in peaks])
    follows = (
        "memory follows the tokens of a micro-batch, not how they are cut into sequences"
        if spread <= _NEARLY_EQUAL
        else "memory depends on the shape too, not on the tokens of a micro-batch alone"
    )
    return f"With {in_words(reference)}, {shapes} ({tokens:,} tokens each) take {sizes}: {follows}."


def _larger_batches(sweep: Sweep, reference: str) -> str | None:
    """What a larger micro-batch brings at the shortest length."""
    cells = [c for c in sweep.measured if c.technique == reference and c.length == min(sweep.lengths)]
    if len(cells) < 2:
        return None
    small, large = min(cells, key=lambda c: c.micro_batch_size), max(cells, key=lambda c: c.micro_batch_size)
    speed = (large.tokens_per_second or 0) / (small.tokens_per_second or 1)
    memory = (large.peak_bytes or 0) / (small.peak_bytes or 1)
    return (
        f"At {small.length:,} tokens a micro-batch of {large.micro_batch_size} instead of {small.micro_batch_size} "
        f"takes {memory:.2f} × the memory and brings {speed:.2f} × the tokens per second."
    )


def _longer_sequences(sweep: Sweep, reference: str) -> str | None:
    """What length costs, one sequence at a time."""
    size = min(sweep.micro_batch_sizes)
    cells = [c for c in sweep.measured if c.technique == reference and c.micro_batch_size == size]
    if len(cells) < 2:
        return None
    short, long = min(cells, key=lambda c: c.length), max(cells, key=lambda c: c.length)
    return (
        f"From {short.length:,} to {long.length:,} tokens, {size} at a time, memory goes from "
        f"{gib(short.peak_bytes or 0)} to {gib(long.peak_bytes or 0)} and speed from "
        f"{count(short.tokens_per_second or 0)} to {count(long.tokens_per_second or 0)} tokens per second."
    )


def _accuracy(sweep: Sweep) -> str | None:
    errors = [abs(cell.error) for cell in sweep.measured if cell.error is not None]
    if not errors:
        return None
    return (
        f"Predicted and measured peak differ by {_small(statistics.median(errors))} at the median of {len(errors)} "
        f"cell{'s' if len(errors) > 1 else ''}, by {_small(max(errors))} at most."
    )


def _missing(sweep: Sweep) -> str | None:
    """Which cells have no measurement, and why."""
    kinds = {
        DOES_NOT_FIT: "predicted to need more than the limit, and not run",
        OUT_OF_MEMORY: "ran out of memory",
        FAILED: "failed",
        LEFT_OUT: "left out, for an update is no multiple of their tokens",
        NOT_REACHED: "not reached in the time given",
    }
    numbers = {text: sum(cell.status == status for cell in sweep.grid) for status, text in kinds.items()}
    parts = [f"{number} {text}" for text, number in numbers.items() if number]
    if not parts:
        return None
    return f"Of {len(sweep.grid)} cells {len(sweep.measured)} were measured; {', '.join(parts)}."


def _shape(cell: Cell) -> tuple[int, int]:
    return cell.length, cell.micro_batch_size


def _change(share: float) -> str:
    text = f"{100 * share:+.0f} %".replace("-", "−")
    return "±0 %" if text in ("+0 %", "−0 %") else text


def _small(share: float) -> str:
    return f"{100 * share:.2g} %" if share >= 1e-4 else "less than 0.01 %"


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]


def subject(sweep: Sweep) -> str:
    """What was swept, where and how, in two sentences."""
    known = [cell for cell in sweep.cells if cell.num_parameters]
    size = f" of {count(known[0].num_parameters or 0)} parameters" if known else ""
    precisions = sorted({cell.precision for cell in sweep.measured if cell.precision})
    steps = max((cell.steps for cell in sweep.measured), default=0)
    text = (
        f"{sweep.model[:1].upper()}{sweep.model[1:]}{size}, vocabulary of {sweep.vocab_size:,}"
        f"{', ' + ' and '.join(precisions) if precisions else ''}, on {sweep.device}. "
        f"Every optimizer step has {sweep.tokens_per_update:,} tokens: micro-batch × length × accumulation."
    )
    if steps:
        fewer = " or, where those took long, fewer" if any(cell.steps < steps for cell in sweep.measured) else ""
        text += f" Times are medians of {steps} step{'s' if steps > 1 else ''}{fewer}."
    return text


# ---- the page --------------------------------------------------------------------------------------------------------


def page(sweep: Sweep) -> str:
    """The whole page: no scripts, nothing fetched, readable in light and dark."""
    reaches = frontier(sweep.cells, sweep.budget_bytes)
    title = f"Memory and speed of {sweep.model} over length and micro-batch"
    budget = gib(sweep.budget_bytes)
    items = "".join(f"<li>{_unbroken(escape(sentence))}</li>" for sentence in findings(sweep))
    sections = [
        f'<ul class="findings">{items}</ul>',
        section_html("Peak memory, GiB", _maps(sweep, _memory_text, lambda cell: cell.peak_bytes)),
        section_html(
            f"What fits within {budget}",
            figures_html([_frontier_chart(reaches, sweep.techniques, budget)]) + _frontier_table(reaches, sweep),
        ),
        section_html("Tokens per second", _maps(sweep, _speed_text, lambda cell: cell.tokens_per_second, kind="speed")),
        section_html("Speed and prediction", figures_html(_charts(sweep))),
        section_html("All cells", _all_cells(sweep)),
        section_html(
            "Machine and versions", facts_html(machine_facts({"hardware": sweep.hardware, "versions": sweep.versions}))
        ),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}{_MORE_CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="glance">{escape(subject(sweep))}</p>\n'
        + "\n".join(section for section in sections if section)
        + "\n<footer>Sizes in GiB of 2<sup>30</sup> bytes; memory is what tensors hold at the peak of a step. "
        "Figures: sweep.json beside this page.</footer>\n</main>\n</body>\n</html>\n"
    )


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
        cells = {_shape(cell): cell for cell in sweep.grid if cell.technique == technique}
        head = "".join(f'<th scope="col">{size}</th>' for size in sweep.micro_batch_sizes)
        rows = []
        for length in sweep.lengths:
            row = ""
            for size in sweep.micro_batch_sizes:
                cell = cells.get((length, size))
                if cell is None or cell.status != MEASURED:
                    row += f'<td class="none" title="{escape((cell and cell.reason) or "")}">{_why_not(cell)}</td>'
                else:
                    row += f'<td class="{kind}" style="--share:{(value(cell) or 0) / most:.3f}">{text(cell)}</td>'
            rows.append(f'<tr><th scope="row">{length:,}</th>{row}</tr>')
        figures.append(
            f"<figure><figcaption><strong>{escape(technique)}</strong>Rows: length; columns: micro-batch size; –: not "
            f'run.</figcaption><table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></figure>"
        )
    return f'<div class="maps">{"".join(figures)}</div>'


def _memory_text(cell: Cell) -> str:
    return _in_gib(cell.peak_bytes)


def _speed_text(cell: Cell) -> str:
    return count(cell.tokens_per_second or 0) + (f" · {percent(cell.mfu)}" if cell.mfu is not None else "")


def _in_gib(size_bytes: float | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**30:.{1 if size_bytes >= 100 * 2**30 else 2}f}"


def _why_not(cell: Cell | None) -> str:
    """What stands in a cell without a measurement."""
    if cell is None or cell.status in (LEFT_OUT, NOT_REACHED):
        return "–"
    if cell.status == FAILED:
        return "failed"
    needs = f" ({_in_gib(cell.predicted_bytes)})" if cell.predicted_bytes else ""
    return f"does not fit{needs}" if cell.status == DOES_NOT_FIT else f"out of memory{needs}"


def _frontier_table(reaches: Sequence[Reach], sweep: Sweep) -> str:
    found = {(reach.technique, reach.length): reach for reach in reaches}
    head = "".join(f'<th scope="col">{length:,}</th>' for length in sweep.lengths)
    rows = []
    for technique in sweep.techniques:
        cells = ""
        for length in sweep.lengths:
            reach = found.get((technique, length))
            kind = ' class="estimated"' if reach is not None and not reach.measured else ""
            cells += f"<td{kind}>{_size_text(reach)}</td>"
        rows.append(f'<tr><th scope="row">{escape(technique)}</th>{cells}</tr>')
    return (
        f'<div class="box" style="margin-top:16px"><table><thead><tr><th scope="col">largest micro-batch at length</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _size_text(reach: Reach | None) -> str:
    """A size: with ~ where it was predicted, with ≥ where more may fit."""
    if reach is None:
        return "–"
    if not reach.micro_batch_size:
        return "none" if reach.measured else "~none"
    return f"{'' if reach.measured else '~'}{'' if reach.complete else '≥'}{reach.micro_batch_size}"


def _all_cells(sweep: Sweep) -> str:
    held = "resident" if sweep.device_type == "cpu" else "reserved"
    names = ("technique", "length", "micro-batch", "accumulation", "peak GiB", "predicted", "error", f"{held} GiB")
    names += ("s per step", "tokens/s", "GFLOP/s", "MFU", "")
    texts = [_cell_texts(cell) for cell in sweep.grid]
    used = [column for column in range(len(names)) if any(row[column] for row in texts)]
    head = "".join(f'<th scope="col">{names[column]}</th>' for column in used)
    rows = "".join("<tr>" + "".join(f"<td>{escape(row[column])}</td>" for column in used) + "</tr>" for row in texts)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell_texts(cell: Cell) -> list[str]:
    return [
        cell.technique,
        f"{cell.length:,}",
        str(cell.micro_batch_size),
        str(cell.accumulation_steps or ""),
        _in_gib(cell.peak_bytes),
        _in_gib(cell.predicted_bytes),
        "" if cell.error is None else f"{100 * cell.error:+.2f} %".replace("-", "−"),
        _in_gib(cell.held_bytes),
        "" if cell.seconds_per_step is None else f"{cell.seconds_per_step:.2f}",
        "" if cell.tokens_per_second is None else count(cell.tokens_per_second),
        "" if cell.flops_per_second is None else f"{cell.flops_per_second / 1e9:,.0f}",
        "" if cell.mfu is None else percent(cell.mfu),
        "" if cell.status == MEASURED else f"{cell.status.replace('_', ' ')}: {cell.reason}",
    ]


# ---- charts ----------------------------------------------------------------------------------------------------------


def _frontier_chart(reaches: Sequence[Reach], techniques: Sequence[str], budget: str) -> Chart:
    def draw(axes: Axes) -> None:
        for number, technique in enumerate(techniques):
            own = sorted((r for r in reaches if r.technique == technique), key=lambda r: r.length)
            own = [reach for reach in own if reach.micro_batch_size]
            colour, marker = _look(number)
            sizes = [reach.micro_batch_size for reach in own]
            axes.plot([r.length for r in own], sizes, color=colour, label=technique, marker=marker, markersize=6)
            for reach in own:
                if not reach.measured:  # hollow
                    place = [reach.length], [reach.micro_batch_size]
                    axes.plot(*place, color=colour, marker=marker, markersize=6, markerfacecolor="white")
        axes.set_ylabel("micro-batch size")
        _powers_of_two(axes, "y", [r.micro_batch_size for r in reaches if r.micro_batch_size])
        _powers_of_two(axes, "x", [r.length for r in reaches])
        axes.set_xlabel("sequence length, tokens")

    title = f"Largest micro-batch within {budget}"
    caption = (
        "Of tensors at the peak of a step. Filled: measured; hollow, and ~ in the table: predicted, with gradients "
        "accumulated over several micro-batches. ≥: more may fit. A line ends where not even one sequence fits."
    )
    return Chart(title, caption, _drawn(title, caption, draw, size=(9.6, 3.4)))


def _charts(sweep: Sweep) -> list[Chart]:
    compared = any(cell.error is not None for cell in sweep.measured)
    return [_speed_chart(sweep), _accuracy_chart(sweep)] if compared else [_speed_chart(sweep)]


def _speed_chart(sweep: Sweep) -> Chart:
    def draw(axes: Axes) -> None:
        for number, technique in enumerate(sweep.techniques):
            best: dict[int, float] = {}
            for cell in sweep.measured:
                if cell.technique == technique:
                    best[cell.length] = max(best.get(cell.length, 0.0), cell.tokens_per_second or 0.0)
            colour, marker = _look(number)
            lengths = sorted(best)
            axes.plot(lengths, [best[length] for length in lengths], color=colour, marker=marker, label=technique)
        axes.set_ylim(0, 1.08 * max((c.tokens_per_second or 0 for c in sweep.measured), default=1))
        _powers_of_two(axes, "x", [cell.length for cell in sweep.measured])
        axes.yaxis.set_major_formatter(lambda value, _: short_count(value))
        axes.set_xlabel("sequence length, tokens")

    title = "Tokens per second"
    caption = "With the micro-batch size that was fastest at each length."
    return Chart(title, caption, _drawn(title, caption, draw))


def _accuracy_chart(sweep: Sweep) -> Chart:
    compared = [cell for cell in sweep.measured if cell.error is not None]

    def draw(axes: Axes) -> None:
        ends = [f((c.peak_bytes or 0) / 2**30 for c in compared) for f in (min, max)]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
        for number, technique in enumerate(sweep.techniques):
            own = [cell for cell in compared if cell.technique == technique]
            colour, marker = _look(number)
            measured, predicted = ([(s or 0) / 2**30 for s in sizes] for sizes in _both_sizes(own))
            axes.plot(measured, predicted, color=colour, marker=marker, markersize=5, linestyle="none", label=technique)
        axes.set_xlabel("measured, GiB")
        axes.set_ylabel("predicted, GiB")

    title = "Predicted against measured peak"
    errors = [abs(cell.error or 0) for cell in compared]
    caption = (
        f"Dashed: equal. {len(errors)} cells, the prediction off by {_small(statistics.median(errors))} at the median, "
        f"{_small(max(errors))} at most."
    )
    return Chart(title, caption, _drawn(title, caption, draw))


def _both_sizes(cells: Sequence[Cell]) -> tuple[list[int | None], list[int | None]]:
    return [cell.peak_bytes for cell in cells], [cell.predicted_bytes for cell in cells]


def _look(number: int) -> tuple[str, str]:
    return _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]


def _powers_of_two(axes: Axes, which: str, values: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each power of two around ``values``."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    low, high = min(values, default=1), max(values, default=1)
    exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    axis.set_major_locator(FixedLocator([2**exponent for exponent in exponents]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low / 1.15, high * 1.15)


def _drawn(title: str, label: str, draw: Callable[[Axes], None], size: tuple[float, float] = (6.2, 3.6)) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if size[0] < 8 else 4, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return for_page(text.getvalue(), title, f"{title}. {label}")


# ---- markdown --------------------------------------------------------------------------------------------------------


def markdown(sweep: Sweep) -> str:
    """The sentences and the main tables."""
    cells = {(c.technique, c.length, c.micro_batch_size): c for c in sweep.grid}
    shapes = sorted({_shape(cell) for cell in sweep.grid if cell.status not in (LEFT_OUT, NOT_REACHED)})

    def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
        ruler = ["---"] + ["---:"] * (len(head) - 1)
        return [f"| {' | '.join(row)} |" for row in (head, ruler, *rows)] + [""]

    def by_shape(text: Callable[[Cell], str]) -> list[str]:
        rows = []
        for length, size in shapes:
            found = [cells.get((technique, length, size)) for technique in sweep.techniques]
            texts = [text(c) if c is not None and c.status == MEASURED else _why_not(c) for c in found]
            rows.append([f"{size} × {length:,}", *texts])
        return table(["micro-batch × length", *sweep.techniques], rows)

    reaches = {(r.technique, r.length): r for r in frontier(sweep.cells, sweep.budget_bytes)}
    fitting = [
        [technique, *(_size_text(reaches.get((technique, length))) for length in sweep.lengths)]
        for technique in sweep.techniques
    ]
    machine = machine_facts({"hardware": sweep.hardware, "versions": sweep.versions})
    lines = [
        f"# Memory and speed of {sweep.model} over length and micro-batch",
        "",
        f"{subject(sweep)} Written by `scripts/sweep.py`.",
        "",
        *(f"- {sentence}" for sentence in findings(sweep)),
        "",
        "## Peak memory, GiB",
        "",
        *by_shape(_memory_text),
        "## Tokens per second",
        "",
        *by_shape(_speed_text),
        f"## Largest micro-batch within {gib(sweep.budget_bytes)}, by length",
        "",
        "~ predicted, with gradients accumulated; ≥ more may fit.",
        "",
        *table(["technique", *(f"{length:,}" for length in sweep.lengths)], fitting),
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
    ]
    return "\n".join(lines) + "\n"
