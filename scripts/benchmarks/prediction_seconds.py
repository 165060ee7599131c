"""How long a prediction takes, by size of the model, length and batch: medians of three, libraries loaded.

python scripts/benchmarks/prediction_seconds.py --write
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import harness
from scripts.benchmarks.accuracy_cases import LARGE, job

LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
SHAPES = {"llama-125m": LARGE["llama-125m"], "llama-1b": LARGE["llama-1b"], "llama-8b": LLAMA_8B}
BATCHES = ((1024, 1), (1024, 8), (131072, 1))
VOCABULARIES = {"llama-125m": 50304, "llama-1b": 128256, "llama-8b": 128256}


@dataclass(frozen=True)
class Options(harness.Options):
    """Times predictions."""

    only: str = ""
    """Only models whose name contains this."""


def measured(options: Options) -> dict[str, Any]:
    """A row for each model, checkpointing and batch."""
    from train.memory.devices import find_device
    from train.memory.predict import Predictor
    from train.memory.question import target_of

    rows: list[dict[str, Any]] = []
    with Predictor() as predictor:
        for name, checkpointing, (length, size) in (
            (name, way, batch) for name in SHAPES for way in ("none", "full") for batch in BATCHES
        ):
            if options.only not in name:
                continue
            settings = {"mixed_precision": "bf16", "gradient_checkpointing": checkpointing}
            case = job(dict(SHAPES[name]), "causal_lm", length, size, **settings)
            case = replace(case, target=target_of(find_device("h200")), vocab_size=VOCABULARIES[name])
            if not rows:
                first = harness.timed(lambda case=case: predictor.predict(case))
                print(f"first answer, loading the libraries included: {first:.1f} s")
            found = predictor.predict(case)
            seconds = [harness.timed(lambda case=case: predictor.predict(case)) for _ in range(3)]
            row = {
                "model": name,
                "checkpointing": checkpointing,
                "batch": f"{size} × {length:,}",
                "peak_bytes": found.peak_bytes,
                "seconds": statistics.median(seconds),
            }
            rows.append(row)
            print(TABLE.row(cells(row)), flush=True)
    return {"rows": rows}


TABLE = harness.Table(("model", "checkpointing", "micro-batch", "predicted peak GiB", "seconds"), "lllrr")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    peak, seconds = row["peak_bytes"] / harness.GIB, row["seconds"]
    return [row["model"], row["checkpointing"], row["batch"], f"{peak:,.2f}", f"{seconds:.1f}"]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    head = [
        "# Seconds to predict a training step for an H200",
        "",
        f"{harness.machine_line(found, f'{harness.cpu_of(found)}, no GPU')}. bf16, loss auto, medians of three, "
        "libraries loaded. Written by `scripts/benchmarks/prediction_seconds.py`.",
        "",
    ]
    return "\n".join([*head, *TABLE.lines(map(cells, found["rows"])), ""])


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="prediction_seconds", by_device=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
