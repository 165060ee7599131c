"""How long training stands still for a checkpoint that is written beside it, and for one that is waited for.

    python scripts/benchmarks/saving.py             # about 4 minutes on two idle cores

Runs of ``train/main.py``, one after the other in turns, the same steps in each; the state is weights and AdamW's two
moments in fp32. A stall is from the end of a step to the beginning of the next one, as ``summary.json`` has it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[0] != str(ROOT):  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

from transformers import HfArgumentParser  # noqa: E402

from train.outputs_log import hardware, read_metrics, versions  # noqa: E402

WAYS = {"beside training": True, "waited for": False}


@dataclass(frozen=True)
class Options:
    """Measures the stall of training by checkpoints."""

    hidden_size: int = 768
    layers: int = 6
    length: int = 128
    steps: int = 12
    save_every_steps: int = 4
    rounds: int = 3
    output_dir: Path = Path("docs/results")
    """saving-DEVICE.json and .md are written here."""


def main() -> int:
    [options] = HfArgumentParser(Options).parse_args_into_dataclasses()  # pyright: ignore[reportArgumentType]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                runs[way].append(run(options, WAYS[way], Path(scratch) / f"{number}-{way.replace(' ', '-')}"))
                print(f"round {number + 1} of {options.rounds}, {way}: {runs[way][-1]}", flush=True)
    found = {
        "runs": runs,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "hardware": hardware(),
        "versions": versions(),
    }
    text, name = page(found), "saving-cuda" if found["hardware"]["gpus"] else "saving-cpu"
    print(text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (options.output_dir / f"{name}.md").write_text(text, encoding="utf-8")
    return 0


def run(options: Options, beside: bool, output: Path) -> dict[str, Any]:
    """One run; its stalls, steps and the size of its checkpoints."""
    recipe = output.with_suffix(".yaml")
    shape = {
        "model_type": "llama",
        "hidden_size": options.hidden_size,
        "intermediate_size": 4 * options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden_size // 64,
    }
    values = {
        "task": "causal_lm",
        "dataset": "stdlib",
        "tokenizer": "bytes",
        "max_train_samples": 200,
        "max_eval_samples": 2,
        "max_length": options.length,
        "model_config": shape,
        "max_steps": options.steps,
        "global_batch_size": 4,
        "log_every_steps": 1,
        "save_every_steps": options.save_every_steps,
        "save_total_limit": 1,
        "save_in_background": beside,
        "predict_memory": False,
        "output_dir": str(output),
    }
    recipe.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, str(ROOT / "train" / "main.py"), "--config", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    [checkpoint] = (output / "checkpoints").iterdir()
    seconds = {
        row["step"]: row["seconds_per_step"] for row in read_metrics(output / "metrics.jsonl") if row["kind"] == "train"
    }
    after = [s for step, s in seconds.items() if step % options.save_every_steps == 1 and step > 1]
    others = [s for step, s in seconds.items() if step > 1 and step % options.save_every_steps != 1]
    return {
        "longest_stall_seconds": summary["longest_save_stall_seconds"],
        "step_after_a_save_seconds": statistics.median(after),
        "other_steps_seconds": statistics.median(others),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.iterdir()),
    }


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    runs, options = found["runs"], found["options"]
    size = runs["waited for"][0]["checkpoint_bytes"]
    lines = [
        "# What a checkpoint costs training",
        "",
        f"A Llama {options['hidden_size']} wide of {options['layers']} layers, fp32 with AdamW: checkpoints of "
        f"{size / 2**20:,.0f} MiB, one every {options['save_every_steps']} steps; medians of {options['rounds']} runs.",
        "",
        "| checkpoint | longest stall, s | a step, s | the step after a save, s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for way, of_way in runs.items():
        names = ("longest_stall_seconds", "other_steps_seconds", "step_after_a_save_seconds")
        middle = " | ".join(f"{statistics.median(run[name] for run in of_way):.2f}" for name in names)
        lines.append(f"| {way} | {middle} |")
    machine, installed = found["hardware"], ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    cards = "".join(f"{gpu['name']}, " for gpu in machine["gpus"])
    where = f"{cards}{machine['cpu']}, {machine['cpu_cores']} cores; {installed}"
    return "\n".join([*lines, "", f"{where}. Written by `scripts/benchmarks/saving.py`.", ""])


if __name__ == "__main__":
    sys.exit(main())
