"""A study's figures as text: the cells of its tables, and the page in Markdown."""

from __future__ import annotations

from collections.abc import Callable

from scripts.benchmarks.harness import Table
from scripts.benchmarks.study.cells import (
    DOES_NOT_FIT,
    FAILED,
    LEFT_OUT,
    MEASURED,
    NOT_REACHED,
    Cell,
    Reach,
    Sweep,
    frontier,
)
from scripts.benchmarks.study.findings import findings, shape_of, subject
from train.extras.report.page import machine_facts
from train.figures import count, gib


def memory_text(cell: Cell) -> str:
    """Peak in GiB."""
    return in_gib(cell.peak_bytes)


def speed_text(cell: Cell) -> str:
    """Tokens per second, and MFU if known."""
    return count(cell.tokens_per_second or 0) + (f" · {cell.mfu:.1%}" if cell.mfu is not None else "")


def in_gib(size_bytes: float | None) -> str:
    """GiB without the unit; nothing for None."""
    return "" if size_bytes is None else f"{size_bytes / 2**30:.{1 if size_bytes >= 100 * 2**30 else 2}f}"


def why_not(cell: Cell | None) -> str:
    """The text of a cell without a measurement."""
    if cell is None or cell.status in (LEFT_OUT, NOT_REACHED):
        return "–"
    if cell.status == FAILED:
        return "failed"
    needs = f" ({in_gib(cell.predicted_bytes)})" if cell.predicted_bytes else ""
    return f"does not fit{needs}" if cell.status == DOES_NOT_FIT else f"out of memory{needs}"


def size_text(reach: Reach | None) -> str:
    """A size, with ~ if it was predicted and ≥ if more may fit."""
    if reach is None:
        return "–"
    if not reach.micro_batch_size:
        return "none" if reach.measured else "~none"
    return f"{'' if reach.measured else '~'}{'' if reach.complete else '≥'}{reach.micro_batch_size}"


def cell_texts(cell: Cell) -> list[str]:
    """A cell's row in the table of all cells."""
    return [
        cell.technique,
        f"{cell.length:,}",
        str(cell.micro_batch_size),
        str(cell.accumulation_steps or ""),
        in_gib(cell.peak_bytes),
        in_gib(cell.predicted_bytes),
        "" if cell.error is None else f"{100 * cell.error:+.2f} %".replace("-", "−"),
        in_gib(cell.held_bytes),
        "" if cell.seconds_per_step is None else f"{cell.seconds_per_step:.2f}",
        "" if cell.tokens_per_second is None else count(cell.tokens_per_second),
        "" if cell.flops_per_second is None else f"{cell.flops_per_second / 1e9:,.0f}",
        "" if cell.mfu is None else f"{cell.mfu:.1%}",
        "" if cell.status == MEASURED else f"{cell.status.replace('_', ' ')}: {cell.reason}",
    ]


def markdown(sweep: Sweep) -> str:
    """The sentences and the main tables in Markdown."""
    cells = {(c.technique, c.length, c.micro_batch_size): c for c in sweep.grid}
    shapes = sorted({shape_of(cell) for cell in sweep.grid if cell.status not in (LEFT_OUT, NOT_REACHED)})

    def byshape_of(text: Callable[[Cell], str]) -> list[str]:
        rows = []
        for length, size in shapes:
            found = [cells.get((technique, length, size)) for technique in sweep.techniques]
            texts = [text(c) if c is not None and c.status == MEASURED else why_not(c) for c in found]
            rows.append([f"{size} × {length:,}", *texts])
        align = "l" + "r" * len(sweep.techniques)
        return [*Table(["micro-batch × length", *sweep.techniques], align).lines(rows), ""]

    reaches = {(r.technique, r.length): r for r in frontier(sweep.cells, sweep.budget_bytes)}
    fitting = [
        [technique, *(size_text(reaches.get((technique, length))) for length in sweep.lengths)]
        for technique in sweep.techniques
    ]
    lengths = ["technique", *(f"{length:,}" for length in sweep.lengths)]
    machine = machine_facts({"hardware": sweep.hardware, "versions": sweep.versions})
    lines = [
        f"# Memory and speed of {sweep.model} over length and micro-batch",
        "",
        f"{subject(sweep)} Written by `{sweep.command}`.",
        "",
        *(f"- {sentence}" for sentence in findings(sweep)),
        "",
        "## Peak memory, GiB",
        "",
        *byshape_of(memory_text),
        "## Tokens per second",
        "",
        *byshape_of(speed_text),
        f"## Largest micro-batch within {gib(sweep.budget_bytes)}, by length",
        "",
        "~ predicted, with gradients accumulated; ≥ more may fit.",
        "",
        *Table(lengths, "l" + "r" * len(sweep.lengths)).lines(fitting),
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + ".",
    ]
    return "\n".join(lines) + "\n"
