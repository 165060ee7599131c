"""What is left of padding by each way to form batches, and what shorter pieces at first do to a run.

    python scripts/benchmarks/sequence_length.py             # about 8 minutes on two idle cores
    python scripts/benchmarks/sequence_length.py --steps 0   # only the counts

Counts: the standard library's text as bytes, in examples of up to 32,768 tokens, 64 examples a step. Runs: the
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[0] != str(ROOT):  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

LENGTH, PER_STEP, BUDGET = 32_768, 64, 131_072


@dataclass(frozen=True)
class Options:
    """Counts padding, and trains with and without sequence-length warm-up."""

    steps: int = 100
    """Of each run; 0: none."""
    output_dir: Path = Path("docs/results")
    """sequence_length-cpu.md and .json are written here."""


def padding_rows() -> list[dict[str, Any]]:
    """Micro-batches of an epoch, the most tokens of one and the share of padding, by each way to form them."""
    import numpy as np

    from train.batching import epoch_order, micro_batches, micro_batches_by_tokens
    from train.config import Config, from_values, to_values
    from train.data import prepare_data
    from train.extras.long_sequences.packing import best_fit
    from train.records import column
    from train.tasks import build_task

    values = {"dataset": "stdlib", "tokenizer": "bytes", "max_length": LENGTH, "model": "none"}
    config = from_values({**to_values(Config()), **values})
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_data(config, build_task(config.data), Path(folder), saves=False)
    lengths: np.ndarray = column(prepared.examples.train, "length")  # pyright: ignore[reportArgumentType]
    order = epoch_order(len(lengths), seed=42, epoch=0)
    steps = [order[first : first + PER_STEP].tolist() for first in range(0, len(order), PER_STEP)]

    def counted(way: str, batches: list[list[int]]) -> dict[str, Any]:
        sizes = [int(max(lengths[ids])) * len(ids) for ids in batches if ids]
        padding = 1 - float(lengths.sum()) / sum(sizes)
        return {"way": way, "micro_batches": len(sizes), "most_tokens": max(sizes), "padding": padding}

    plain = [order[first : first + 8].tolist() for first in range(0, len(order), 8)]
    rows = [counted("8 examples in the order of the data", plain)]
    for size in (4, 8):
        batches = [part for ids in steps for (part,) in micro_batches(ids, lengths[ids].tolist(), size, 1)]
        rows.append(counted(f"`--micro_batch_size {size}`, grouped by length within a step", batches))
    batches = [part for ids in steps for (part,) in micro_batches_by_tokens(ids, lengths[ids].tolist(), BUDGET, 1)]
    rows.append(counted(f"`--max_tokens_per_micro_batch {BUDGET}`", batches))
    packed = best_fit(lengths, LENGTH)
    empty = 1 - float(lengths.sum()) / (len(packed) * LENGTH)
    rows.append(
        {"way": "`--packing True`, a row each", "micro_batches": len(packed), "most_tokens": LENGTH, "padding": empty}
    )
    return rows


def warmup_rows(steps: int) -> list[dict[str, Any]]:
    """Seconds of the steps of the warm-up and of those after it, and the result, with it and without."""
    warm = steps * 3 // 5
    rows = []
    for name, flags in (("2,048 tokens from the first step", []), ("64 to 1,024 tokens first", [str(warm)])):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--config", str(ROOT / "recipes" / "quickstart.yaml"), "--output_dir", folder, "--max_steps"]
            words += [str(steps), "--max_train_samples", "400", "--log_every_steps", "1", "--predict_memory", "False"]
            words += ["--sequence_length_warmup_steps", *flags] if flags else []
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [sys.executable, str(ROOT / "train" / "main.py"), *words],
                check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
            result = json.loads((Path(folder) / "summary.json").read_text())
        seconds = [line["seconds_per_step"] for line in lines if line["kind"] == "train"]
        rows.append(
            {
                "run": name,
                "seconds_per_step_of_warmup": statistics.mean(seconds[:warm]),
                "seconds_per_step_after": statistics.mean(seconds[warm:]),
                "bits_per_byte": result["result"]["validation"]["bits_per_byte"],
                "tokens": result["tokens"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Counts and trains, prints and writes the results."""
    import tyro

    options = tyro.cli(Options, prog="sequence_length.py", description=__doc__)
    from train.outputs_log import hardware, versions

    padding = padding_rows()
    lines = [
        "# Fuller rows, and shorter pieces first",
        "",
        f"The standard library's text as bytes, examples of up to {LENGTH:,} tokens, {PER_STEP} examples a step; "
        "counted, not timed:",
        "",
        "| | micro-batches of an epoch | most tokens of one | padding |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {r['way']} | {r['micro_batches']:,} | {r['most_tokens']:,} | {r['padding']:.1%} |" for r in padding),
    ]
    print("\n".join(lines), flush=True)
    runs = warmup_rows(options.steps) if options.steps else []
    if runs:
        warm = options.steps * 3 // 5
        lines += [
            "",
            f"The quickstart's model and 400 documents, {options.steps} steps, {warm} of them with "
            f"`--sequence_length_warmup_steps {warm}`; one run after the other, {runs[0]['tokens']:,} tokens each:",
            "",
            f"| | seconds per step, 1 to {warm} | the others | validation, bits per byte |",
            "| --- | ---: | ---: | ---: |",
            *(
                f"| {r['run']} | {r['seconds_per_step_of_warmup']:.2f} | {r['seconds_per_step_after']:.2f} | "
                f"{r['bits_per_byte']:.3f} |"
                for r in runs
            ),
        ]
    machine, installed = hardware(), versions()
    lines += [
        "",
        f"{machine['cpu']}, {machine['cpu_cores']} cores; "
        f"{', '.join(f'{name} {version}' for name, version in installed.items())}; "
        f"{datetime.now(timezone.utc).date().isoformat()}. Written by `scripts/benchmarks/sequence_length.py`.",
        "",
    ]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    report = {"hardware": machine, "versions": installed, "padding": padding, "warmup": runs}
    (options.output_dir / "sequence_length-cpu.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    (options.output_dir / "sequence_length-cpu.md").write_text("\n".join(lines), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
