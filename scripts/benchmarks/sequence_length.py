"""How much padding each way to form batches leaves, and how shorter sequences at the start change a run.

    python scripts/benchmarks/sequence_length.py --write             # about 8 minutes on two idle cores
    python scripts/benchmarks/sequence_length.py --steps 0           # padding only

Padding: the standard library's text as bytes, in examples of up to 32,768 tokens, 64 examples a step. Runs: the
quickstart's model and text through ``train/main.py``, one after the other, the same tokens in each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

LENGTH, PER_STEP, BUDGET = 32_768, 64, 131_072


@dataclass(frozen=True)
class Options(harness.Options):
    """Counts padding, and trains with and without sequence-length warm-up."""

    steps: int = 100
    """Of each run; 0: no runs."""


def measured(options: Options) -> dict[str, Any]:
    """Padding, and the runs if asked for."""
    return {
        "steps": options.steps,
        "padding": padding_rows(),
        "warmup": warmup_rows(options.steps) if options.steps else [],
    }


def padding_rows() -> list[dict[str, Any]]:
    """Micro-batches of an epoch, the most tokens of one and the share of padding, by each way to form them."""
    values = {"dataset": "stdlib", "tokenizer": "bytes", "max_length": LENGTH, "model": "none"}
    with tempfile.TemporaryDirectory() as folder:
        lengths = building.example_lengths(building.config_of(values), Path(folder))
    order = building.example_order(len(lengths), seed=42)
    steps = [order[first : first + PER_STEP].tolist() for first in range(0, len(order), PER_STEP)]

    def counted(way: str, batches: list[list[int]]) -> dict[str, Any]:
        sizes = [int(max(lengths[ids])) * len(ids) for ids in batches if ids]
        padding = 1 - float(lengths.sum()) / sum(sizes)
        return {"way": way, "micro_batches": len(sizes), "most_tokens": max(sizes), "padding": padding}

    plain = [order[first : first + 8].tolist() for first in range(0, len(order), 8)]
    rows = [counted("8 examples in the order of the data", plain)]
    for size in (4, 8):
        batches = [part for ids in steps for part in building.by_count(ids, lengths, size)]
        rows.append(counted(f"`--micro_batch_size {size}`, grouped by length within a step", batches))
    batches = [part for ids in steps for part in building.by_tokens(ids, lengths, BUDGET)]
    rows.append(counted(f"`--max_tokens_per_micro_batch {BUDGET}`", batches))
    packed = building.packed_rows(lengths, LENGTH)
    empty = 1 - float(lengths.sum()) / (packed * LENGTH)
    packing = {"way": "`--packing True`, a row each", "micro_batches": packed, "most_tokens": LENGTH, "padding": empty}
    return [*rows, packing]


def warmup_rows(steps: int) -> list[dict[str, Any]]:
    """Seconds of the steps of the warm-up and of those after it, and the result, with warm-up and without."""
    warm = steps * 3 // 5
    rows = []
    for name, flags in (
        ("2,048 tokens from the first step", []),
        ("64 to 1,024 tokens first", ["--sequence_length_warmup_steps", str(warm)]),
    ):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--config", str(harness.ROOT / "recipes" / "quickstart.yaml"), "--output_dir", folder]
            words += ["--max_steps", str(steps), "--max_train_samples", "400", "--log_every_steps", "1"]
            words += ["--predict_memory", "False", *flags]
            subprocess.run(
                [sys.executable, str(harness.ROOT / "train" / "main.py"), *words],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(harness.ROOT)},
            )
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            result = json.loads((Path(folder) / "summary.json").read_text())
        seconds = [line["seconds_per_step"] for line in lines if line["kind"] == "train"]
        row = {
            "run": name,
            "seconds_per_step_of_warmup": statistics.mean(seconds[:warm]),
            "seconds_per_step_after": statistics.mean(seconds[warm:]),
            "bits_per_byte": result["result"]["validation"]["bits_per_byte"],
            "tokens": result["tokens"],
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def page(found: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    ways = harness.Table(("", "micro-batches of an epoch", "most tokens of one", "padding"), "lrrr")
    counted = [
        (row["way"], f"{row['micro_batches']:,}", f"{row['most_tokens']:,}", f"{row['padding']:.1%}")
        for row in found["padding"]
    ]
    lines = [
        "# Fuller rows, and shorter pieces first",
        "",
        f"The standard library's text as bytes, examples of up to {LENGTH:,} tokens, {PER_STEP} examples a step; "
        "counted, not timed:",
        "",
        *ways.lines(counted),
        "",
        *warmup_lines(found["warmup"], found.get("steps", Options.steps)),
        f"{harness.machine_line(found)}. Written by `scripts/benchmarks/sequence_length.py`.",
        "",
    ]
    return "\n".join(lines)


def warmup_lines(rows: list[dict[str, Any]], steps: int) -> list[str]:
    """The second table; nothing without runs."""
    if not rows:
        return []
    warm = steps * 3 // 5
    table = harness.Table(("", f"seconds per step, 1 to {warm}", "the others", "validation, bits per byte"), "lrrr")
    cells = [
        (
            row["run"],
            f"{row['seconds_per_step_of_warmup']:.2f}",
            f"{row['seconds_per_step_after']:.2f}",
            f"{row['bits_per_byte']:.3f}",
        )
        for row in rows
    ]
    return [
        f"The quickstart's model and 400 documents, {steps} steps, {warm} of them with "
        f"`--sequence_length_warmup_steps {warm}`; one run after the other, {rows[0]['tokens']:,} tokens each:",
        "",
        *table.lines(cells),
        "",
    ]


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="sequence_length")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
