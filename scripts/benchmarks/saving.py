"""How long training stops for a checkpoint that is written in the background, and for one that it waits for.

    python scripts/benchmarks/saving.py --write     # about 4 minutes on two idle cores

Runs of ``train/main.py``, one after the other, with the same number of steps; the state is weights and AdamW's two
moments in fp32. A stall lasts from the end of a step to the beginning of the next one, as ``summary.json`` records it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import harness

WAYS = {"in the background": True, "waited for": False}
SHOWN = {"beside training": "in the background"}
"""What older results files call a way, and its name on the page."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Measures how long training stops for checkpoints."""

    hidden_size: int = 768
    """A multiple of 64."""
    layers: int = 6
    length: int = 128
    steps: int = 12
    save_every_steps: int = 4
    rounds: int = 3


def measured(options: Options) -> dict[str, Any]:
    """The runs of each way."""
    with tempfile.TemporaryDirectory() as scratch:
        ways = {way: partial(run, options, in_background, Path(scratch)) for way, in_background in WAYS.items()}
        rounds = harness.paired_rounds(ways, options.rounds, lambda number, found: print(number, found, flush=True))
    shape = {name: asdict(options)[name] for name in Options.__annotations__}
    return {"runs": {way: [found[way] for found in rounds] for way in WAYS}, "options": shape}


def run(options: Options, in_background: bool, scratch: Path) -> dict[str, Any]:
    """One run: its stalls, its steps and the size of a checkpoint."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    recipe, output = folder / "recipe.yaml", folder / "run"
    values = {
        "task": "causal_lm",
        "dataset": "stdlib",
        "tokenizer": "bytes",
        "max_train_samples": 200,
        "max_eval_samples": 2,
        "max_length": options.length,
        "model_config": {
            "model_type": "llama",
            "hidden_size": options.hidden_size,
            "intermediate_size": 4 * options.hidden_size,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden_size // 64,
        },
        "max_steps": options.steps,
        "global_batch_size": 4,
        "log_every_steps": 1,
        "save_every_steps": options.save_every_steps,
        "save_total_limit": 1,
        "save_in_background": in_background,
        "predict_memory": False,
        "output_dir": str(output),
    }
    recipe.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, str(harness.ROOT / "train" / "main.py"), "--config", str(recipe)]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    [checkpoint] = (output / "checkpoints").iterdir()
    return {
        "longest_stall_seconds": summary["longest_save_stall_seconds"],
        **step_seconds(output, options.save_every_steps),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
    }


def step_seconds(output: Path, save_every_steps: int) -> dict[str, float]:
    """Median seconds of the steps after a save, and of the others; the first step is left out."""
    from train.figures import read_metrics

    rows = [row for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train" and row["step"] > 1]
    after = [row["seconds_per_step"] for row in rows if row["step"] % save_every_steps == 1]
    others = [row["seconds_per_step"] for row in rows if row["step"] % save_every_steps != 1]
    return {"step_after_a_save_seconds": statistics.median(after), "other_steps_seconds": statistics.median(others)}


TABLE = harness.Table(("checkpoint", "longest stall, s", "a step, s", "the step after a save, s"), "lrrr")


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    runs, options = found["runs"], found["options"]
    size = runs["waited for"][0]["checkpoint_bytes"]
    names = ("longest_stall_seconds", "other_steps_seconds", "step_after_a_save_seconds")
    rows = [
        [SHOWN.get(way, way), *(f"{statistics.median(run[name] for run in of_way):.2f}" for name in names)]
        for way, of_way in runs.items()
    ]
    cards = "".join(f"{gpu['name']}, " for gpu in found["hardware"]["gpus"])
    lines = [
        "# What a checkpoint costs training",
        "",
        f"A Llama {options['hidden_size']} wide of {options['layers']} layers, fp32 with AdamW: checkpoints of "
        f"{size / harness.MIB:,.0f} MiB, one every {options['save_every_steps']} steps; medians of "
        f"{options['rounds']} runs.",
        "",
        *TABLE.lines(rows),
        "",
        f"{harness.machine_line(found, cards + harness.cpu_of(found))}. Written by `scripts/benchmarks/saving.py`.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="saving")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
