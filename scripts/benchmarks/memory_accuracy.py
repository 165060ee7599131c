"""Predicted against measured memory of the same training steps, each measured in a process of its own.

    python scripts/benchmarks/memory_accuracy.py --write                       # on a CPU, about 8 minutes
    python scripts/benchmarks/memory_accuracy.py --device cuda --write         # on a card; or scripts/gpu_check.sh

On a CPU memory is measured by torch's own allocator events (``torch.profiler``), on a card by
``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``. The prediction is made from the same
:class:`train.memory.predict.Job` by a process that has no real tensors.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

if TYPE_CHECKING:
    from train.memory.predict import Job

CASE_SECONDS = 240
"""After which the measurement of a case is ended."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares predicted with measured memory."""

    device: Literal["cpu", "cuda"] = "cpu"
    only: str = ""
    """Only cases whose title contains this."""
    budget_seconds: float = 3600
    """Start no case after this time."""


def measured(options: Options) -> dict[str, Any]:
    """The cases of the device, compared."""
    from scripts.benchmarks.accuracy_cases import large_cases, small_cases, title

    jobs = small_cases() if options.device == "cpu" else large_cases()
    if options.device == "cuda":
        jobs = [replace(case, target=building.this_target()) for case in jobs]
    rows = compare([case for case in jobs if options.only in title(case)], options.budget_seconds)
    errors = [row["error_percent"] for row in rows if "error_percent" in row]
    reserved = [abs(row["reserved_error_percent"]) for row in rows if "reserved_error_percent" in row]
    return {
        "device": options.device,
        "cases": len(rows),
        "compared": len(errors),
        "median_error_percent": statistics.median(map(abs, errors)) if errors else None,
        "worst_error_percent": max(map(abs, errors), default=None),
        "worst_underestimate_percent": -min(errors, default=0.0),
        "worst_reserved_error_percent": max(reserved, default=None),
        "rows": rows,
    }


def compare(jobs: list[Job], budget_seconds: float) -> list[dict[str, Any]]:
    """Predicted and measured figures; errors in percent of the measured, above zero if predicted too much."""
    from scripts.benchmarks.accuracy_cases import title
    from train.memory.predict import Predictor
    from train.records import UserError

    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with Predictor() as predictor:
        for case in jobs:
            if time.perf_counter() - started > budget_seconds:
                rows.append({"case": title(case), "error": "left out: no time"})
                continue
            row: dict[str, Any] = {"case": title(case)}
            try:
                predictor.ask(case)  # predicted while it is measured
                row |= measured_apart(case)
                predicted = predictor.answer()
                row |= {
                    "predicted_bytes": predicted.peak_bytes,
                    "predicted_reserved_bytes": predicted.reserved_bytes,
                    "phase": predicted.phase,
                    "attention": list(predicted.attention_kernels),
                    "prediction_seconds": predicted.prediction_seconds,
                    "predicted_seconds": predicted.seconds,
                }
            except UserError as error:
                row["error"] = str(error)
            for truth, guess, name in (
                ("measured_bytes", "predicted_bytes", "error_percent"),
                ("reserved_bytes", "predicted_reserved_bytes", "reserved_error_percent"),
            ):
                if truth in row and guess in row:
                    row[name] = 100 * (row[guess] / row[truth] - 1)
            rows.append(row)
            print(TABLE.row(cells(row)), flush=True)
    return rows


def measured_apart(job: Job) -> dict[str, Any]:
    """:func:`measure` in a process of its own; ``error`` if it failed."""
    found = harness.apart([__file__, "--measure"], asdict(job), CASE_SECONDS)
    outcome = found.pop("outcome")
    if outcome == "ok":
        return found
    return {"error": found.get("message", f"took longer than {CASE_SECONDS} s")}


def measure(job: Job) -> dict[str, Any]:
    """The step of ``job`` for real, in this process; peak bytes of the last of three steps."""
    import torch

    micro_batches = building.random_micro_batches(job, 2 if job.accumulates else 1)
    seconds = 0.0
    if job.target.device_type == "cpu":
        with harness.traced_allocations() as traced:
            training = building.build_training(job, micro_batches)
            for _ in range(3):
                seconds = harness.timed(training.step)
        return {"measured_bytes": traced.peak_bytes, "seconds": seconds}
    training = building.build_training(job, micro_batches)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        seconds = harness.timed(training.step)
    return {
        "measured_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": seconds / len(micro_batches),
        "skipped": training.was_skipped,
    }


TABLE = harness.Table(
    ("case", "measured MiB", "predicted MiB", "error", "error of reserved", "seconds to predict"), "lrrrrr"
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "error_percent" not in row:
        return [row["case"], "", "", row.get("error", ""), "", ""]
    return [
        row["case"],
        f"{row['measured_bytes'] / harness.MIB:,.1f}",
        f"{row['predicted_bytes'] / harness.MIB:,.1f}",
        f"{row['error_percent']:+.4f} %",
        f"{row['reserved_error_percent']:+.2f} %" if "reserved_error_percent" in row else "",
        f"{row['prediction_seconds']:.1f}",
    ]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    gpus = ", ".join(gpu["name"] for gpu in found["hardware"]["gpus"])
    place = gpus if found["device"] == "cuda" else harness.cpu_of(found)
    summary = "No case could be compared."
    if found["compared"]:
        summary = (
            f"{found['compared']} of {found['cases']} cases compared. Error of the peak: median "
            f"{found['median_error_percent']:.4f} %, worst {found['worst_error_percent']:.4f} %."
        )
    head = [
        f"# Predicted against measured memory: {found['device']}",
        "",
        f"{harness.machine_line(found, place)}. Written by `scripts/benchmarks/memory_accuracy.py`.",
        "",
        summary,
        "",
    ]
    return "\n".join([*head, *TABLE.lines(map(cells, found["rows"])), ""])


def main() -> int:
    """Status 1 if a case could not be compared."""
    building.use_expandable_segments()
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(building.job_from(json.load(sys.stdin)))))
        return 0
    found = harness.report(Options, __doc__, measured, page, name="memory_accuracy")
    return 0 if found["compared"] == found["cases"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
