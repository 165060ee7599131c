"""Memory over sequence length and micro-batch size: a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.figures import gib
from train.memory.plan import Predictions, outcome_of
from train.memory.question import Question, position_limit, replace_length
from train.records import UserError

LENGTHS = tuple(1024 * 2**power for power in range(9))  # 1,024 to 262,144 tokens
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
FAR = 2  # a cell is not predicted if a smaller one needs more than this many times the room
_COLUMNS_PER_TABLE = 7
_GREY = "#f2f2f2"


@dataclass(frozen=True)
class Cell:
    """One micro-batch."""

    length: int
    micro_batch_size: int
    needed_bytes: int  # of the device; a lower bound where not ``exact``
    peak_bytes: int | None  # in tensors; None where not predicted
    fits: bool
    exact: bool  # predicted; otherwise ``needed_bytes`` is that of a smaller micro-batch

    def __str__(self) -> str:
        gibs = self.needed_bytes / 2**30
        return f"{'' if self.exact else '≥ '}{gibs:.{2 if gibs < 100 else 1 if gibs < 1000 else 0}f}"


@dataclass(frozen=True)
class Grid:
    """Cells by length and micro-batch size."""

    title: str
    settings: str
    total_bytes: int  # of the device
    room_bytes: int  # the part of it that may be taken
    cells: tuple[tuple[Cell, ...], ...]  # one row per length, one column per size, both ascending

    @property
    def micro_batch_sizes(self) -> list[int]:
        return [cell.micro_batch_size for cell in self.cells[0]]


def make_grid(
    question: Question, predictions: Predictions, lengths: Sequence[int] | None, micro_batch_sizes: Sequence[int] | None
) -> Grid:
    """The memory of the configuration's other settings over lengths and micro-batch sizes.

    Without ``lengths``: 1,024 to 262,144 tokens, up to the model's positions and the first length of which not even
    the smallest micro-batch fits. Raises UserError if a cell cannot run.
    """
    limit = position_limit(question.config) or LENGTHS[-1] if lengths is None else 0
    chosen = sorted(set(lengths or [length for length in LENGTHS if length <= limit] or [limit]))
    sizes = sorted(set(micro_batch_sizes or MICRO_BATCH_SIZES))
    # Whether gradients are accumulated stays as it is, so that cells differ by their size alone.
    accumulates = question.global_batch_size > question.asked.micro_batch_size * question.world_size
    changes: dict[str, Any] = {"global_batch_size": None, "gradient_accumulation_steps": 2 if accumulates else 1}
    if question.config.get("max_tokens_per_micro_batch") is not None:
        changes["max_tokens_per_micro_batch"] = None
    known: dict[tuple[int, int], Cell] = {}
    num_parameters = 0
    # Diagonal by diagonal: all smaller neighbours of a cell are known, and the cells of one can be predicted at once.
    for diagonal in range(len(chosen) + len(sizes) - 1):
        jobs = {}
        for row, column in ((row, diagonal - row) for row in range(len(chosen)) if 0 <= diagonal - row < len(sizes)):
            if lengths is None and row and ((row - 1, 0) not in known or not known[row - 1, 0].fits):
                continue
            below = [known[place] for place in ((row - 1, column), (row, column - 1)) if place in known]
            least = max((cell.needed_bytes for cell in below), default=0)
            if least > FAR * question.room_bytes:
                known[row, column] = Cell(chosen[row], sizes[column], least, None, fits=False, exact=False)
            else:
                sized = replace_length(question, chosen[row])
                sized = replace(sized, config=sized.config.changed(**changes, micro_batch_size=sizes[column]))
                jobs[row, column] = sized.job(sized.asked)
        for (row, column), found in zip(jobs, predictions.of_all(list(jobs.values())), strict=True):
            length, size = chosen[row], sizes[column]
            if isinstance(found, UserError):
                raise UserError(f"{size} × {length:,} tokens: {found}")
            outcome = outcome_of(question, question.asked, jobs[row, column], found)
            num_parameters = found.num_parameters
            known[row, column] = Cell(length, size, outcome.needed_bytes, found.peak_bytes, outcome.fits, exact=True)
    shown = [row for row in range(len(chosen)) if (row, 0) in known]
    rows = tuple(tuple(known[row, column] for column in range(len(sizes))) for row in shown)
    return Grid(*_titles(question, num_parameters), question.device.total_bytes, question.room_bytes, rows)


def _titles(question: Question, num_parameters: int) -> tuple[str, str]:
    setting, config, device = question.asked, question.config, question.device
    ranks, sharding = (f"{question.world_size} × ", f", {setting.sharding}") if question.world_size > 1 else ("", "")
    title = f"{config.architecture.name}, {num_parameters / 1e6:.1f}M parameters, on {ranks}{device.name}"
    precision = "fp32" if setting.mixed_precision in (None, "no") else setting.mixed_precision
    techniques = f"checkpointing {setting.gradient_checkpointing}, loss {setting.loss}, {config.optimization.optimizer}"
    return f"{title} ({gib(device.total_bytes)})", f"{config.data.task}, {precision}, {techniques}{sharding}"


def grid_text(grid: Grid) -> str:
    """The grid as tables of at most 100 columns."""
    lines = [grid.title, grid.settings, ""]
    for first in range(0, len(grid.micro_batch_sizes), _COLUMNS_PER_TABLE):
        part = slice(first, first + _COLUMNS_PER_TABLE)
        lines.append("GiB needed".ljust(12) + "micro-batch size".rjust(17))
        sizes = "".join(f"{size:>9}   " for size in grid.micro_batch_sizes[part])
        lines.append(f"{'tokens':>10}  {sizes}".rstrip())
        for row in grid.cells:
            cells = "".join(f"{cell!s:>9} {'  ' if cell.fits else 'no'}" for cell in row[part])
            lines.append(f"{row[0].length:>10,}  {cells}".rstrip())
        lines.append("")
    lines.append(f"no: more than the {gib(grid.room_bytes)} that may be taken of {gib(grid.total_bytes)}.")
    if any(not cell.exact for row in grid.cells for cell in row):
        lines.append("≥: not predicted; a smaller micro-batch already needs that much.")
    return "\n".join(lines)


def grid_values(grid: Grid) -> dict[str, Any]:
    """The grid as plain values for JSON."""
    return {**asdict(grid), "cells": [asdict(cell) for row in grid.cells for cell in row]}


def draw(grid: Grid, path: Path) -> None:
    """Draws the grid: darker colours for a fuller device, hatched cells for what does not fit."""
    import matplotlib
    from matplotlib.figure import Figure

    rows, columns = len(grid.cells), len(grid.micro_batch_sizes)
    figure = Figure(figsize=(max(6.4, 2.6 + 1.0 * columns), 2.2 + 0.46 * rows), layout="constrained")
    axes = figure.subplots()
    shown = [[c.needed_bytes / 2**30 if c.fits else float("nan") for c in row] for row in grid.cells]
    colours, room_gib = matplotlib.colormaps["YlGnBu"], grid.room_bytes / 2**30
    image = axes.imshow(shown, cmap=colours, vmin=0, vmax=room_gib, aspect="auto", origin="lower")
    axes.patch.set(facecolor=_GREY, edgecolor="#bdbdbd", hatch="////")  # seen where no cell fits
    for i, row in enumerate(grid.cells):
        for j, cell in enumerate(row):
            is_dark = cell.fits and cell.needed_bytes >= 0.55 * grid.room_bytes
            box = None if cell.fits else {"facecolor": _GREY, "edgecolor": "none", "pad": 1.5}
            colour = "white" if is_dark else "#333333"
            axes.text(j, i, str(cell), ha="center", va="center", fontsize=9, color=colour, bbox=box)
            for above, right in ((0, 1), (1, 0)) if cell.fits else ():  # the frontier
                if i + above < rows and j + right < columns and not grid.cells[i + above][j + right].fits:
                    xs, ys = (j - 0.5 + right, j + 0.5), (i - 0.5 + above, i + 0.5)
                    axes.plot(xs, ys, color="#b30000", linewidth=3, solid_capstyle="round")
    axes.set_xticks(range(columns), [str(size) for size in grid.micro_batch_sizes])
    axes.set_yticks(range(rows), [f"{row[0].length:,}" for row in grid.cells])
    axes.set_xlabel("micro-batch size (examples)")
    axes.set_ylabel("sequence length (tokens)")
    axes.tick_params(length=0)
    axes.set_title(f"{grid.settings}. Hatched: does not fit", fontsize=9)
    figure.suptitle(grid.title, fontsize=11, fontweight="bold")
    figure.colorbar(image, ax=axes, label="memory needed (GiB)", pad=0.02)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {error}. Give a file that can be written, ending in .png.") from None
