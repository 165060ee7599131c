"""The study itself: measures the grid, predicts what fits beyond it, and writes results and pages."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.benchmarks import building, harness
from scripts.benchmarks.study.cells import (
    DOES_NOT_FIT,
    FAILED,
    LEFT_OUT,
    MEASURED,
    NOT_REACHED,
    OUT_OF_MEMORY,
    PREDICTED,
    Cell,
    Results,
    Sweep,
    sweep_from,
)
from scripts.benchmarks.study.measure import Processes, Task
from scripts.benchmarks.study.page import page
from scripts.benchmarks.study.request import Request, job_for, pages_of, read_request, shapes
from scripts.benchmarks.study.tables import markdown
from train.figures import count, duration, gib
from train.memory.predict import Job, Prediction, Predictor
from train.records import UsageError, UserError

FENCE = 1.25
"""Times the limit: a CPU cell that needs so much more than was predicted is stopped by its own allocator."""
FRONTIER_SIZES = (*range(1, 9), *(quarters * 2**power for power in range(1, 8) for quarters in (5, 6, 7, 8)))
"""Micro-batch sizes that may be predicted for the budget: up to 1,024, four for each doubling."""
START_SECONDS = 8
"""Of a cell's process, until its first step."""
CELL_TIMEOUT = 10
"""Times --seconds_per_cell, plus a minute: then a cell is stopped."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    return harness.exit_status(lambda: sweep_of(sys.argv[1:] if arguments is None else arguments))


def sweep_of(words: list[str]) -> None:
    """Measures, or reads an earlier study, and writes the pages."""
    if (path := pages_of(words)) is not None:
        try:
            folder, sweep = path.parent, sweep_from(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"--pages_of {path}: it is not the sweep.json of an earlier study.") from None
        write_pages(folder, sweep)
    else:
        request = read_request(words)
        command = shlex.join(["python", "scripts/study.py", "sweep", *words])
        folder, sweep = request.output, replace(run(request), command=command)
        write_pages(folder, sweep, with_figures=True)
    print(f"{folder / 'index.html'} shows the result; sweep.md and sweep.json next to it hold the figures")


def run(request: Request) -> Sweep:
    """Measures all cells that are not known yet, and predicts what fits the budget.

    Raises:
        UserError: no cell at all could be measured or predicted.
    """
    machine = {name: harness.about()[name] for name in ("hardware", "versions")}
    deadline = time.perf_counter() + request.stop_after_seconds
    results = Results(request.output, request.again)
    try:
        with Predictor() as predictor:
            cells = _grid(request, predictor, results, machine, deadline)
            if not any(cell.peak_bytes or cell.predicted_bytes for cell in cells):
                reasons = dict.fromkeys(cell.reason for cell in cells if cell.status == FAILED)
                raise UserError(f"no cell could be measured: {next(iter(reasons), None) or 'all were left out'}")
            cells += _beyond(request, predictor, results, machine, cells, deadline)
    finally:
        results.close()
    name = request.config.architecture.model or (request.config.architecture.model_config or {}).get("model_type")
    return Sweep(
        model=str(name),
        vocab_size=request.vocab_size,
        device_type=request.target.device_type,
        tokens_per_update=request.tokens_per_update,
        budget_bytes=request.budget_bytes,
        limit_bytes=request.limit_bytes,
        cells=tuple(cells),
        **machine,
    )


def _grid(
    request: Request, predictor: Predictor, results: Results, machine: dict[str, Any], deadline: float
) -> list[Cell]:
    """The cells of the grid; the next one is predicted while one is measured."""
    cells: list[Cell] = []
    open_cells: list[tuple[Cell, Job]] = []
    for length, size, accumulation, problem in shapes(
        request.lengths, request.micro_batch_sizes, request.tokens_per_update
    ):
        for technique in request.techniques:
            cell = Cell(technique, length, size, accumulation, LEFT_OUT, problem)
            if problem is None:
                job = job_for(request, technique, length, size, accumulation)
                cell = replace(cell, key=key_of(job, accumulation, request.steps, machine))
                known = results.of(cell.key)
                if known is None or _may_fit_now(known, request.limit_bytes):
                    open_cells.append((cell, job))
                    continue
                cell = known
            cells.append(cell)
    print(
        f"{len(open_cells)} cells to measure, {sum(c.status != LEFT_OUT for c in cells)} known, "
        f"{sum(c.status == LEFT_OUT for c in cells)} left out; {request.tokens_per_update:,} tokens per update; about "
        f"{duration(len(open_cells) * (START_SECONDS + request.seconds_per_cell))} at most",
        flush=True,
    )
    processes = Processes(on_cpu=request.target.device_type == "cpu")
    upcoming = iter(open_cells)
    asked = next(upcoming, None)
    if asked:
        predictor.ask(asked[1])
    number = 0
    while asked:
        cell, job = asked
        prediction = _answer_of(predictor)
        if time.perf_counter() > deadline:
            cells += [replace(c, status=NOT_REACHED, reason="no time") for c, _ in open_cells[number:]]
            break
        asked = next(upcoming, None)
        if asked:
            predictor.ask(asked[1])
        number += 1
        cell = _measured(request, cell, job, prediction, processes)
        results.add(cell)
        cells.append(cell)
        print(f"[{number}/{len(open_cells)}] {line(cell)}", flush=True)
    order = {technique: place for place, technique in enumerate(request.techniques)}
    return sorted(cells, key=lambda c: (order[c.technique], c.length, c.micro_batch_size))


def _may_fit_now(cell: Cell, limit_bytes: int | None) -> bool:
    """Whether a cell that was not run, or was stopped, because of an earlier limit is run with this one."""
    if cell.status == OUT_OF_MEMORY and cell.limit_bytes is not None:
        return limit_bytes is None or limit_bytes > cell.limit_bytes
    if cell.status != DOES_NOT_FIT:
        return False
    return limit_bytes is None or (cell.predicted_bytes or 0) <= limit_bytes


def _answer_of(predictor: Predictor) -> Prediction | UserError:
    try:
        return predictor.answer()
    except UserError as error:
        return error


def _measured(request: Request, cell: Cell, job: Job, prediction: Prediction | UserError, processes: Processes) -> Cell:
    """``cell`` with its prediction and measurement."""
    predicted = None if isinstance(prediction, UserError) else prediction
    if predicted is not None:
        cell = replace(cell, predicted_bytes=predicted.peak_bytes, num_parameters=predicted.num_parameters)
        if request.limit_bytes is not None and predicted.peak_bytes > request.limit_bytes:
            reason = f"predicted to need more than the limit of {gib(request.limit_bytes)}: not run"
            return replace(cell, status=DOES_NOT_FIT, reason=reason)
    fence = None
    if request.target.device_type == "cpu" and request.limit_bytes is not None:
        fence = int(FENCE * request.limit_bytes)
    task = Task(cell.technique, job, cell.accumulation_steps, request.steps, request.seconds_per_cell, fence)
    values = processes.measure(task, 60 + CELL_TIMEOUT * request.seconds_per_cell)
    is_stopped = fence is not None and values["status"] == OUT_OF_MEMORY
    return replace(cell, **values, limit_bytes=request.limit_bytes if is_stopped else None)


def _beyond(
    request: Request,
    predictor: Predictor,
    results: Results,
    machine: dict[str, Any],
    cells: Sequence[Cell],
    deadline: float,
) -> list[Cell]:
    """Predictions around the largest micro-batch within the budget, by technique and length, with accumulation."""
    from train.memory.ladder import largest_fitting

    found: list[Cell] = []

    def predicted(technique: str, length: int, size: int) -> Cell:
        job = job_for(request, technique, length, size, accumulation=2)
        key = key_of(job, 2, 0, machine)
        cell = results.of(key)
        if cell is None:
            cell = Cell(technique, length, size, 0, FAILED, key=key)
            try:
                prediction = predictor.predict(job)
                cell = replace(
                    cell,
                    status=PREDICTED,
                    predicted_bytes=prediction.peak_bytes,
                    num_parameters=prediction.num_parameters,
                )
            except UserError as error:
                cell = replace(cell, reason=str(error))
            results.add(cell)
        return cell

    for technique in request.techniques:
        for length in request.lengths:
            inside = {c.micro_batch_size: c for c in cells if (c.technique, c.length) == (technique, length)}
            if not any(c.needed_bytes for c in inside.values()) or time.perf_counter() > deadline:
                continue
            print(
                f"predicting what fits within {gib(request.budget_bytes)}: {technique}, {length:,} tokens", flush=True
            )

            def needs(
                size: int, technique: str = technique, length: int = length, inside: dict[int, Cell] = inside
            ) -> int | None:
                own = inside.get(size)
                if own is not None and own.needed_bytes is not None:
                    return own.needed_bytes if own.is_known(request.budget_bytes) else None
                cell = predicted(technique, length, size)
                found.append(cell)
                return cell.predicted_bytes

            first = max(size for size, c in inside.items() if c.needed_bytes)
            largest_fitting(sorted({*FRONTIER_SIZES, *inside}), needs, request.budget_bytes, first)
    return [cell for cell in found if cell.status == PREDICTED]


def line(cell: Cell) -> str:
    """A cell for the terminal."""
    text = f"{cell.technique}: {cell.micro_batch_size} × {cell.length:,}"
    if cell.status != MEASURED or cell.peak_bytes is None:
        return f"{text}: {cell.status.replace('_', ' ')}: {cell.reason}"
    predicted = f", predicted {gib(cell.predicted_bytes)}" if cell.predicted_bytes else ""
    return f"{text}: {gib(cell.peak_bytes)}{predicted}, {count(cell.tokens_per_second or 0)} tokens/s"


def key_of(job: Job, accumulation: int, steps: int, machine: dict[str, Any]) -> str:
    """A hash of all that a result depends on: settings, files with functions, versions and hardware."""
    text = json.dumps([asdict(job), accumulation, steps, machine], sort_keys=True)
    text = "\n".join([text, *building.texts_of_functions(text)])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def write_pages(folder: Path, sweep: Sweep, with_figures: bool = False) -> None:
    """Writes ``sweep.md`` and ``index.html`` to ``folder``; ``with_figures``: ``sweep.json``, too.

    Raises:
        UserError: the folder cannot be written.
    """
    figures = {"sweep.json": json.dumps(asdict(sweep), indent=1) + "\n"} if with_figures else {}
    texts = {
        **figures,
        "sweep.md": markdown(sweep),
        "index.html": page(sweep),
    }
    for name, text in texts.items():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror or error}. Give another --output.") from None
