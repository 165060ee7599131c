"""Predicted against measured memory of the same training steps, each measured in a process of its own.

    python scripts/benchmarks/memory_accuracy.py --write                       # on a CPU, about 8 minutes
    python scripts/benchmarks/memory_accuracy.py --only eval_batch_size --write --output_dir FOLDER    # some of them
    python scripts/benchmarks/memory_accuracy.py --device cuda --write         # on a card; or scripts/gpu_check.sh

On a CPU memory is measured by torch's own allocator events (``torch.profiler``), on a card by
``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``. The prediction is made from the same
:class:`train.memory.predict.Job` by a process that has no real tensors. On a card the cases are sized to its memory.
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
from train.memory.devices import Device, find_device, this_device
from train.records import EXIT_DONE, EXIT_ERROR, UserError

if TYPE_CHECKING:
    from train.memory.predict import Job, Prediction

CASE_SECONDS = 240
"""After which the measurement of a case is ended."""
NO_TIME = "left out: no time"
SCALE_STEPS = 20
"""Most steps in which fp16 may find its scale."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares predicted with measured memory."""

    device: Literal["cpu", "cuda"] = "cpu"
    only: str = ""
    """Only cases whose title contains this."""
    budget_seconds: float = 3600
    """Start no case after this time; with --write the same command continues later (status 85: something is left)."""


class Figures:
    """The rows of all cases, and what they say together.

    Args:
        path: of a file that keeps them from call to call; rows of another machine or other versions are not taken from
            it. None: they are kept in memory only.
    """

    def __init__(self, options: Options, path: Path | None, about: dict[str, Any]) -> None:
        self._options, self._path, self._about = options, path, about
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if all(earlier.get(name) == about[name] for name in ("hardware", "versions")):
                self.rows = [row for row in earlier["rows"] if row.get("left_out") != NO_TIME]

    @property
    def known(self) -> set[str]:
        """Titles of the cases that are done."""
        return {row["case"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Prints ``row`` and keeps it, in the file at once."""
        self.rows.append(row)
        if row.get("left_out") != NO_TIME:
            print(TABLE.row(cells(row)), flush=True)
        if self._path is not None:
            harness.write_figures(self._path, self.found())

    def found(self) -> dict[str, Any]:
        """All that the page shows."""
        errors = [row["error_percent"] for row in self.rows if "error_percent" in row]
        reserved = [abs(row["reserved_error_percent"]) for row in self.rows if "reserved_error_percent" in row]
        return {
            **self._about,
            "device": self._options.device,
            "cases": len(self.rows),
            "compared": len(errors),
            "median_error_percent": statistics.median(map(abs, errors)) if errors else None,
            "worst_error_percent": max(map(abs, errors), default=None),
            "worst_underestimate_percent": -min(errors, default=0.0),
            "worst_reserved_error_percent": max(reserved, default=None),
            "rows": self.rows,
        }

    @property
    def exit_status(self) -> int:
        """85 where time was up before a case, else 1 where one failed that could have run, else 0."""
        status = harness.told(all(row.get("left_out") != NO_TIME for row in self.rows))
        return EXIT_ERROR if not status and any("error" in row for row in self.rows) else status


def jobs_of(options: Options) -> tuple[list[Job], Device]:
    """The cases of the device, and the device."""
    from scripts.benchmarks.accuracy_cases import large_cases, small_cases, title

    device = this_device() if options.device == "cuda" else find_device("cpu")
    jobs = small_cases() if options.device == "cpu" else large_cases(device)
    if options.device == "cuda":  # whose cuDNN may be older than the one that torch prefers
        target = replace(jobs[0].target, prefers_cudnn=building.this_target().prefers_cudnn)
        jobs = [replace(case, target=target) for case in jobs]
    return [case for case in jobs if options.only in title(case)], device


def compare(jobs: list[Job], device: Device, figures: Figures, budget_seconds: float) -> None:
    """Predicts and measures each of ``jobs`` that ``figures`` do not have yet.

    Errors are in percent of the measured, above zero if predicted too much. The next case is predicted while one is
    measured. A case that is predicted not to fit, or for which no time is left, is left out and not a failure.
    """
    from scripts.benchmarks.accuracy_cases import title
    from train.memory.predict import Predictor

    started = time.perf_counter()
    waiting = [case for case in jobs if title(case) not in figures.known]
    with Predictor() as predictor:
        for case in waiting[:1]:
            predictor.ask(case)
        for number, case in enumerate(waiting, 1):
            row: dict[str, Any] = {"case": title(case)}
            if time.perf_counter() - started > budget_seconds and number > 1:
                figures.add({**row, "left_out": NO_TIME})
                continue
            try:
                predicted: Prediction | UserError = predictor.answer()
            except UserError as error:
                predicted = error
            for following in waiting[number : number + 1]:
                predictor.ask(following)
            figures.add({**row, **compared(case, device, predicted)})


def compared(case: Job, device: Device, predicted: Prediction | UserError) -> dict[str, Any]:
    """The figures of one case."""
    if isinstance(predicted, UserError):
        return {"error": str(predicted)}
    row: dict[str, Any] = {
        "predicted_bytes": predicted.peak_bytes,
        "predicted_reserved_bytes": predicted.reserved_bytes,
        "phase": predicted.phase,
        "attention": list(predicted.attention_kernels),
        "predicted_seconds": predicted.seconds,
    }
    needed_bytes = predicted.least_reserved_bytes + device.context_bytes
    if case.target.device_type == "cuda" and needed_bytes > device.total_bytes:
        gib = needed_bytes / harness.GIB
        return {**row, "left_out": f"left out: predicted to need {gib:.1f} GiB, more than the card has"}
    row |= measured_apart(case)
    for truth, guess, name in (
        ("measured_bytes", "predicted_bytes", "error_percent"),
        ("reserved_bytes", "predicted_reserved_bytes", "reserved_error_percent"),
    ):
        if truth in row:
            row[name] = 100 * (row[guess] / row[truth] - 1)
    return row


def measured_apart(job: Job) -> dict[str, Any]:
    """:func:`measure` in a process of its own; ``error`` if it failed."""
    found = harness.apart([__file__, "--measure"], asdict(job), CASE_SECONDS)
    outcome = found.pop("outcome")
    if outcome == "ok":
        return found
    return {"error": found.get("message", f"took longer than {CASE_SECONDS} s")}


def measure(job: Job) -> dict[str, Any]:
    """The step of ``job`` for real, in this process; peak bytes of the last of three steps.

    On a CPU an evaluation follows, if ``job`` says of how many examples.
    """
    import torch

    from train.memory.predict import random_batch

    micro_batches = building.random_micro_batches(job, 2 if job.accumulates else 1)
    seconds, evaluated = 0.0, random_batch(job, job.eval_batch_size or 1)
    if job.target.device_type == "cpu":
        with harness.traced_allocations() as traced:
            training = building.build_training(job, micro_batches)
            for _ in range(3):
                seconds = harness.timed(training.step)
            if job.eval_batch_size:
                training.evaluate(evaluated)
        return {"measured_bytes": traced.peak_bytes, "seconds": seconds}
    training = building.build_training(job, micro_batches)
    for number in range(SCALE_STEPS):
        torch.cuda.reset_peak_memory_stats()
        seconds = harness.timed(training.step)
        if number >= 2 and not training.was_skipped:
            break
    return {
        "measured_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": seconds / len(micro_batches),
        "skipped": training.was_skipped,
    }


TABLE = harness.Table(("case", "measured MiB", "predicted MiB", "error", "error of reserved"), "lrrrr")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "error_percent" not in row:
        return [row["case"], "", "", row.get("error") or row.get("left_out", ""), ""]
    return [
        row["case"],
        f"{row['measured_bytes'] / harness.MIB:,.1f}",
        f"{row['predicted_bytes'] / harness.MIB:,.1f}",
        f"{row['error_percent']:+.4f} %",
        f"{row['reserved_error_percent']:+.2f} %" if "reserved_error_percent" in row else "",
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
    """Compares; see :attr:`Figures.exit_status`."""
    building.use_expandable_segments()
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure(building.job_from(json.load(sys.stdin)))))
        return 0
    options = harness.read_options(Options, __doc__)
    if harness.page_again(options, page) is not None:
        return EXIT_DONE
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device here. --device cpu compares on a CPU.", file=sys.stderr)
        return EXIT_ERROR
    about = harness.about()
    name = f"memory_accuracy-{harness.device_slug(about)}"
    jobs, device = jobs_of(options)
    figures = Figures(options, options.output_dir / f"{name}.json" if options.write else None, about)
    compare(jobs, device, figures, options.budget_seconds)
    harness.finish(options, figures.found(), page, name)
    return figures.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
