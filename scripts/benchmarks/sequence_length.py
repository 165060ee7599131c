"""How much padding each way to form batches leaves.

    python scripts/benchmarks/sequence_length.py --write

The standard library's text as bytes, in examples of up to 32,768 tokens, 64 examples a step.
"""

from __future__ import annotations

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
    """Counts padding."""


def measured(options: Options) -> dict[str, Any]:
    """Padding of each way."""
    return {"padding": padding_rows()}


def padding_rows() -> list[dict[str, Any]]:
    """Micro-batches of an epoch, the most tokens of one and the share of padding, by each way to form them."""
    values = {"dataset": "stdlib", "tokenizer": "bytes", "max_length": LENGTH, "model_config": {"model_type": "llama"}}
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
    packing = {"way": "`--packing`, one row each", "micro_batches": packed, "most_tokens": LENGTH, "padding": empty}
    return [*rows, packing]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    ways = harness.Table(("", "micro-batches of an epoch", "most tokens of one", "padding"), "lrrr")
    counted = [
        (row["way"], f"{row['micro_batches']:,}", f"{row['most_tokens']:,}", f"{row['padding']:.1%}")
        for row in found["padding"]
    ]
    lines = [
        "# Fuller rows",
        "",
        f"The standard library's text as bytes, examples of up to {LENGTH:,} tokens, {PER_STEP} examples a step; "
        "counted, not timed:",
        "",
        *ways.lines(counted),
        "",
        f"{harness.machine_line(found)}. Written by `scripts/benchmarks/sequence_length.py`.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="sequence_length")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
