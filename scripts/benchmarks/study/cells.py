"""The cells of a study and what it knows of each: dataclasses, the file that keeps them, and what fits a budget."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from train.records import UserError

MEASURED, PREDICTED = "measured", "predicted"
DOES_NOT_FIT, OUT_OF_MEMORY, FAILED = "does_not_fit", "out_of_memory", "failed"
LEFT_OUT, NOT_REACHED = "left_out", "not_reached"
BASELINE = "baseline"


@dataclass(frozen=True)
class Cell:
    """One technique at one length and micro-batch size."""

    technique: str
    length: int
    micro_batch_size: int
    accumulation_steps: int
    """Micro-batches of an update; 0: more than one, the number makes no difference."""
    status: str
    """measured; predicted (not part of the grid); does_not_fit (predicted above the limit, not run); out_of_memory;
    failed; left_out (its tokens do not divide those of an update); not_reached (no time)."""
    reason: str | None = None
    """Why it was not measured."""
    key: str = ""
    """Names the settings, versions and hardware that the figures depend on."""
    peak_bytes: int | None = None
    """Largest number of bytes that tensors held."""
    held_bytes: int | None = None
    """On CUDA the peak of reserved memory, on a CPU the largest resident set of the process."""
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

    limit_bytes: int | None = None
    """On a CPU: the limit that has stopped its process."""

    def is_known(self, budget_bytes: int) -> bool:
        """Whether it tells if the step fits ``budget_bytes``: not if a smaller limit than that has stopped it."""
        return self.status != OUT_OF_MEMORY or (self.limit_bytes is not None and self.limit_bytes < budget_bytes)

    @property
    def needed_bytes(self) -> int | None:
        """Measured bytes, else predicted ones, else None."""
        return self.predicted_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None if one of the two is missing."""
        if self.peak_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Sweep:
    """All cells of a study, and what they have in common."""

    model: str
    vocab_size: int
    device_type: str
    tokens_per_update: int
    budget_bytes: int
    """Memory of tensors for which the page says what fits."""
    limit_bytes: int | None
    """Cells predicted to need more were not run."""
    cells: tuple[Cell, ...]
    hardware: dict[str, Any]
    versions: dict[str, str]
    command: str = "scripts/study.py"

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
        """The name of the device."""
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
    """Whether larger micro-batches are known not to fit."""


def frontier(cells: Iterable[Cell], budget_bytes: int) -> list[Reach]:
    """The largest micro-batch within ``budget_bytes`` by technique and length, as far as ``cells`` show."""
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
    return cell.is_known(budget_bytes) and cell.needed_bytes is not None and cell.needed_bytes <= budget_bytes


class Results:
    """The cells known so far: a line of JSON each in ``cells.jsonl``, written as soon as they are measured.

    Args:
        folder: of the file.
        again: forget what is known.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, again: bool = False) -> None:
        self._path = folder / "cells.jsonl"
        self._known: dict[str, Cell] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if again:
                self._path.unlink(missing_ok=True)
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            self._file = self._path.open("a", encoding="utf-8")
            self._file.write("" if text[-1:] in ("", "\n") else "\n")  # a run was killed in the middle of a line
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror or error}. Give another --output.") from None
        names = {field.name for field in fields(Cell)}
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # cut off when an earlier run was killed
                values = json.loads(line)
                cell = Cell(**{name: value for name, value in values.items() if name in names})
                self._known[cell.key] = cell

    def of(self, key: str) -> Cell | None:
        """The cell known under ``key``; None for failed ones, so that they are tried again."""
        cell = self._known.get(key)
        return None if cell is None or cell.status == FAILED else cell

    def add(self, cell: Cell) -> None:
        """Keeps ``cell``, in the file at once."""
        self._known[cell.key] = cell
        self._file.write(json.dumps(asdict(cell)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def sweep_from(values: dict[str, Any]) -> Sweep:
    """A sweep read from ``sweep.json``."""
    return Sweep(**values | {"cells": tuple(Cell(**cell) for cell in values["cells"])})
