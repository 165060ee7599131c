"""How long a prediction takes, by size of the model, length and batch: medians of three, libraries loaded.

python scripts/benchmarks/prediction_seconds.py --output docs/results/prediction_seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from memory_accuracy import LARGE, job  # noqa: E402

from train.memory.devices import find_device  # noqa: E402
from train.memory.predict import Predictor  # noqa: E402
from train.memory.question import target_of  # noqa: E402

SHAPES = {"llama-125m": LARGE["llama-125m"], "llama-1b": LARGE["llama-1b"]} | {
    "llama-8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                 "num_attention_heads": 32, "num_key_value_heads": 8}
}  # fmt: skip
BATCHES = ((1024, 1), (1024, 8), (131072, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with Predictor() as predictor:
        for name, fields in SHAPES.items():
            LARGE[name] = fields
            for checkpointing in ("none", "full"):
                for length, size in BATCHES:
                    case = job(
                        name, "causal_lm", length, size, mixed_precision="bf16", gradient_checkpointing=checkpointing
                    )
                    case = replace(case, target=target_of(find_device("h200")))
                    if name == "llama-8b":
                        case = replace(case, vocab_size=128256)
                    found = predictor.predict(case)
                    if not rows:
                        print(f"first answer, libraries and all: {time.perf_counter() - began:.1f} s")
                    seconds = []
                    for _ in range(3):
                        started = time.perf_counter()
                        found = predictor.predict(case)
                        seconds.append(time.perf_counter() - started)
                    rows.append(
                        {
                            "model": name,
                            "checkpointing": checkpointing,
                            "batch": f"{size} × {length:,}",
                            "peak_bytes": found.peak_bytes,
                            "seconds": statistics.median(seconds),
                        }
                    )
                    print(line(rows[-1]), flush=True)
    if options.output:
        write(options.output, rows)
    return 0


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    peak = row["peak_bytes"] / 2**30
    return f"| {row['model']} | {row['checkpointing']} | {row['batch']} | {peak:,.2f} | {row['seconds']:.1f} |"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON and a table."""
    from train.outputs_log import hardware, versions

    machine = {"hardware": hardware(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    used = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    head = [
        "# Seconds to predict a training step for an H200",
        "",
        f"{machine['hardware']['cpu']}, {machine['hardware']['cpu_cores']} cores, no GPU; {used}. bf16, loss auto, "
        "medians of three, libraries loaded. Written by `scripts/benchmarks/prediction_seconds.py`.",
        "",
        "| model | checkpointing | micro-batch | predicted peak GiB | seconds |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    path.with_suffix(".md").write_text("\n".join([*head, *map(line, rows)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
