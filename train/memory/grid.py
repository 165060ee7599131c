"""Memory over sequence length and micro-batch size: a table and a picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.figures import count, gib
from train.memory.plan import Outcome, Predictions, predicted
from train.memory.question import UNPADDED, Question, position_limit, replace_length
from train.records import UsageError, UserError

LENGTHS = tuple(1024 * 2**power for power in range(9))  # 1,024 to 262,144 tokens
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
Grid = list[list[Outcome]]  # one row per length, one column per micro-batch size, both ascending


def make_grid(
    question: Question, predictions: Predictions, lengths: Sequence[int] | None, micro_batch_sizes: Sequence[int] | None
) -> Grid:
    """The memory of the configuration's other settings over lengths and micro-batch sizes.

    Without ``lengths``: 1,024 to 262,144 tokens, up to the model's positions and the first length of which not even
    the smallest micro-batch fits. Raises UserError if a cell cannot run.
    """
    limit = position_limit(question.config) or LENGTHS[-1]
    # Whether gradients are accumulated stays as it is, so that cells differ by their size alone.
    accumulates = question.global_batch_size > question.asked.micro_batch_size * question.world_size
    changes: dict[str, Any] = {"global_batch_size": None, "gradient_accumulation_steps": 2 if accumulates else 1}
    changes |= {"max_tokens_per_micro_batch": None} if question.config.get("max_tokens_per_micro_batch") else {}
    sizes = micro_batch_sizes or (MICRO_BATCH_SIZES if question.pads else (1,))
    if not question.pads and max(sizes) > 1:
        raise UsageError(f"--micro_batch_sizes: {UNPADDED}.")
    rows, cell = list[list[Question]](), question
    try:
        for length in lengths or [length for length in LENGTHS if length <= limit] or [limit]:
            sized = replace_length(question, length)
            rows.append([replace(sized, config=sized.config.changed(**changes, micro_batch_size=n)) for n in sizes])
            for cell in rows[-1]:  # several at a time
                predictions.ask(cell.job(cell.asked), cell.asked.techniques)
            if lengths is None and not predicted(cell := rows[-1][0], predictions).fits:
                break
        return [[predicted(cell := one, predictions) for one in row] for row in rows]
    except UserError as error:
        size, length = cell.config.optimization.micro_batch_size, cell.config.data.max_length
        raise UserError(f"{size} × {length:,} tokens: {error}") from None


def _titles(question: Question, grid: Grid) -> tuple[str, str]:
    """What the grid is of: model and device, and settings."""
    config, device, parameters = question.config, question.device, count(grid[0][0].prediction.num_parameters)
    ranks = f"{question.world_size} × " if question.world_size > 1 else ""
    title = f"{config.architecture.name}, {parameters} parameters, on {ranks}{device.name} ({gib(device.total_bytes)})"
    return title, f"{config.data.task}, {question.asked.techniques}, {config.optimization.optimizer}"


def grid_text(question: Question, grid: Grid) -> str:
    sizes = "".join(f"{cell.job.micro_batch_size:>9}   " for cell in grid[0])
    lines = [*_titles(question, grid), "", "GiB needed   micro-batch size", f"    tokens  {sizes}".rstrip()]
    for row in grid:
        cells = "".join(f"{cell.needed_bytes / 2**30:>9.2f} {'  ' if cell.fits else 'no'}" for cell in row)
        lines.append(f"{row[0].job.values['max_length']:>10,}  {cells}".rstrip())
    total, room = gib(question.total_bytes), gib(question.room_bytes)
    lines += ["", f"no: more than the usable {room} of {total}."]
    return "\n".join(lines if question.pads else [*lines, f"Note: {UNPADDED}."])


def draw(question: Question, grid: Grid, path: Path) -> None:
    """Draws the grid: darker colours for a fuller device, grey cells for what does not fit."""
    from matplotlib.figure import Figure

    rows, columns = len(grid), len(grid[0])
    figure = Figure(figsize=(max(6.4, 2.6 + columns), 2.2 + 0.46 * rows), layout="constrained")
    axes = figure.subplots()
    shown = [[cell.needed_bytes / 2**30 if cell.fits else float("nan") for cell in row] for row in grid]
    room_gib = question.room_bytes / 2**30
    image = axes.imshow(shown, cmap="YlGnBu", vmin=0, vmax=1.8 * room_gib, aspect="auto", origin="lower")
    axes.set_facecolor("#cccccc")  # seen where no cell fits
    for i, row in enumerate(grid):
        for j, cell in enumerate(row):
            text, colour = f"{cell.needed_bytes / 2**30:.2f}", "black" if cell.fits else "#b30000"
            axes.text(j, i, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(columns), [str(cell.job.micro_batch_size) for cell in grid[0]])
    axes.set_yticks(range(rows), [f"{row[0].job.values['max_length']:,}" for row in grid])
    axes.set(xlabel="micro-batch size (examples)", ylabel="sequence length (tokens)")
    title, settings = _titles(question, grid)
    axes.set_title(f"{settings}. Grey: does not fit", fontsize=9)
    figure.suptitle(title, fontsize=11)
    bar = figure.colorbar(image, ax=axes, label="memory needed (GiB)")
    bar.ax.set_ylim(0, room_gib)  # the darker half of the colours would hide the figures
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {error}. Give a file that can be written, ending in .png.") from None
