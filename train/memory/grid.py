"""Memory over sequence length and micro-batch size: a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.figures import gib
from train.memory.plan import Predictions, predicted
from train.memory.question import Question, position_limit, replace_length
from train.records import UserError

LENGTHS = tuple(1024 * 2**power for power in range(9))  # 1,024 to 262,144 tokens
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Cell:
    """One micro-batch."""

    length: int
    micro_batch_size: int
    needed_bytes: int  # of the device
    peak_bytes: int  # in tensors
    fits: bool

    def __str__(self) -> str:
        gibs = self.needed_bytes / 2**30
        return f"{gibs:.{2 if gibs < 100 else 1 if gibs < 1000 else 0}f}"


@dataclass(frozen=True)
class Grid:
    """Cells by length and micro-batch size."""

    title: str
    settings: str
    total_bytes: int  # of the device
    room_bytes: int  # the part of it that may be taken
    micro_batch_sizes: tuple[int, ...]
    cells: tuple[tuple[Cell, ...], ...]  # one row per length, one column per size, both ascending


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
    rows: list[tuple[Cell, ...]] = []
    num_parameters = 0
    for length in chosen:
        if lengths is None and rows and not rows[-1][0].fits:
            break
        row: list[Cell] = []
        for size in sizes:
            sized = replace_length(question, length)
            sized = replace(sized, config=sized.config.changed(**changes, micro_batch_size=size))
            try:
                found = predicted(sized, predictions)
            except UserError as error:
                raise UserError(f"{size} × {length:,} tokens: {error}") from None
            num_parameters = found.prediction.num_parameters
            row.append(Cell(length, size, found.needed_bytes, found.prediction.peak_bytes, found.fits))
        rows.append(tuple(row))
    total_bytes, room_bytes = question.device.total_bytes, question.room_bytes
    return Grid(*_titles(question, num_parameters), total_bytes, room_bytes, tuple(sizes), tuple(rows))


def _titles(question: Question, num_parameters: int) -> tuple[str, str]:
    config, device = question.config, question.device
    ranks = f"{question.world_size} × " if question.world_size > 1 else ""
    title = f"{config.architecture.name}, {num_parameters / 1e6:.1f}M parameters, on {ranks}{device.name}"
    settings = f"{config.data.task}, {question.asked.techniques}, {config.optimization.optimizer}"
    return f"{title} ({gib(device.total_bytes)})", settings


def grid_text(grid: Grid) -> str:
    """The grid as a table."""
    sizes = "".join(f"{size:>9}   " for size in grid.micro_batch_sizes)
    lines = [grid.title, grid.settings, "", "GiB needed   micro-batch size", f"    tokens  {sizes}".rstrip()]
    for row in grid.cells:
        cells = "".join(f"{cell!s:>9} {'  ' if cell.fits else 'no'}" for cell in row)
        lines.append(f"{row[0].length:>10,}  {cells}".rstrip())
    lines += ["", f"no: more than the {gib(grid.room_bytes)} that may be taken of {gib(grid.total_bytes)}."]
    return "\n".join(lines)


def grid_values(grid: Grid) -> dict[str, Any]:
    """The grid as plain values for JSON."""
    return {**asdict(grid), "cells": [asdict(cell) for row in grid.cells for cell in row]}


def draw(grid: Grid, path: Path) -> None:
    """Draws the grid: darker colours for a fuller device, grey cells for what does not fit."""
    import matplotlib
    from matplotlib.figure import Figure

    rows, columns = len(grid.cells), len(grid.micro_batch_sizes)
    figure = Figure(figsize=(max(6.4, 2.6 + columns), 2.2 + 0.46 * rows), layout="constrained")
    axes = figure.subplots()
    shown = [[cell.needed_bytes / 2**30 if cell.fits else float("nan") for cell in row] for row in grid.cells]
    colours, room_gib = matplotlib.colormaps["YlGnBu"], grid.room_bytes / 2**30
    image = axes.imshow(shown, cmap=colours, alpha=0.5, vmin=0, vmax=room_gib, aspect="auto", origin="lower")
    axes.set_facecolor("#cccccc")  # seen where no cell fits
    for i, row in enumerate(grid.cells):
        for j, cell in enumerate(row):
            axes.text(j, i, str(cell), ha="center", va="center", color="black" if cell.fits else "#b30000")
    axes.set_xticks(range(columns), [str(size) for size in grid.micro_batch_sizes])
    axes.set_yticks(range(rows), [f"{row[0].length:,}" for row in grid.cells])
    axes.set(xlabel="micro-batch size (examples)", ylabel="sequence length (tokens)")
    axes.set_title(f"{grid.settings}. Grey: does not fit", fontsize=9)
    figure.suptitle(grid.title, fontsize=11)
    figure.colorbar(image, ax=axes, label="memory needed (GiB)")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {error}. Give a file that can be written, ending in .png.") from None
