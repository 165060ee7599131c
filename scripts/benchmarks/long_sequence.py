"""One long sequence and a large vocabulary: the template's rungs against transformers' Trainer with its own
gradient checkpointing, in peak memory and time.

    python scripts/benchmarks/long_sequence.py             # 8,192 tokens, 32,768 entries; 15 minutes on two cores
    python scripts/benchmarks/long_sequence.py --rounds 3 --length 4096

Same weights, tokens, steps, optimizer and precision for all, in processes of their own, one after the other in random
order within a round; ratios are taken within a round, and that all end at the same loss is checked. Peak memory is
traced from the allocator in runs of their own.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.path[0] != str(ROOT):  # run as a script: the template is the package beside scripts/
    sys.path.insert(0, str(ROOT))

from scripts.benchmarks.loop_overhead import (  # noqa: E402
    TOLERANCE,
    Measurement,
    Processes,
    Workload,
    chosen_precision,
    spread,
)

RUNGS: dict[str, dict[str, Any]] = {
    "full checkpointing": {"gradient_checkpointing": "full", "loss": "full"},
    "+ chunked loss": {"gradient_checkpointing": "full", "loss": "auto"},
    "+ selective": {"gradient_checkpointing": "selective", "loss": "auto"},
}
"""Settings of the template, by name."""
LOSS_DIFFERENCE = "largest_loss_difference"


@dataclass(frozen=True)
class Options:
    """Compares the template's rungs with Trainer on one long sequence."""

    length: int = 8192
    vocab_size: int = 32768
    hidden_size: int = 256
    """A multiple of 64."""
    layers: int = 4
    steps: int = 2
    """Measured steps of each variant and round, after one to warm up."""
    rounds: int = 5
    cpu_threads: int | None = None
    output_dir: Path = Path("docs/results")
    """long_sequence-DEVICE.json and .md are written here."""


def loads_of(options: Options, precision: str) -> dict[str, tuple[str, Workload]]:
    """What to run and how, by the name of the row."""
    base = Workload(
        "long sequence",
        options.hidden_size,
        options.layers,
        options.length,
        micro_batch_size=1,
        accumulation=1,
        gradient_checkpointing="none",
        steps=options.steps,
        warmup_steps=1,
        rounds=options.rounds,
        mixed_precision=precision,
        cpu_threads=options.cpu_threads,
        vocab_size=options.vocab_size,
    )
    rungs = {name: ("template", replace(base, settings=tuple(values.items()))) for name, values in RUNGS.items()}
    return {"Trainer": ("trainer", replace(base, trainer_checkpoints=True)), **rungs}


def compare(loads: dict[str, tuple[str, Workload]], processes: Processes) -> dict[str, dict[str, Any]]:
    """Time and memory of each row; ratios are to Trainer's in the same round."""
    rounds_count = next(iter(loads.values()))[1].rounds
    order = random.Random(0)
    rounds: list[dict[str, Measurement]] = []
    for number in range(rounds_count):
        rounds.append({name: processes.measure(*loads[name]) for name in order.sample(list(loads), len(loads))})
        times = ", ".join(f"{name} {rounds[-1][name].seconds_per_step:.2f} s" for name in loads)
        print(f"  round {number + 1} of {rounds_count}: {times}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name, (variant, load) in loads.items():
        two_steps = replace(load, warmup_steps=1, steps=1)
        peak = rounds[0][name].peak_bytes or processes.measure(variant, two_steps, trace_memory=True).peak_bytes
        found[name] = {
            "settings": dict(load.settings) or {"gradient_checkpointing": True},
            "seconds_per_step": spread([r[name].seconds_per_step for r in rounds]),
            "time_ratio": spread([r[name].seconds_per_step / r["Trainer"].seconds_per_step for r in rounds]),
            "peak_bytes": peak,
            "loss_after": statistics.median(r[name].loss_after for r in rounds),
            LOSS_DIFFERENCE: max(abs(r[name].loss_after / r["Trainer"].loss_after - 1) for r in rounds),
        }
        print(f"  {name}: peak {(peak or 0) / 2**20:.0f} MiB", flush=True)
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """The figures as a markdown table."""
    lines = [
        "| what | peak memory, MiB | ÷ Trainer | step, s | ÷ Trainer (middle half of the rounds) | loss after |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    reference = found["Trainer"]["peak_bytes"]
    for name, row in found.items():
        time = row["time_ratio"]
        shown = "transformers' Trainer, gradient_checkpointing" if name == "Trainer" else f"template, {name}"
        lines.append(
            f"| {shown} | {row['peak_bytes'] / 2**20:,.0f} | {row['peak_bytes'] / reference:.2f} | "
            f"{row['seconds_per_step']['median']:.2f} | {time['median']:.2f} "
            f"({time['quartile_1']:.2f} to {time['quartile_3']:.2f}) | {row['loss_after']:.5f} |"
        )
    return lines


def main() -> int:
    """Measures, prints and writes the results; status 1 where the variants did not do equal work."""
    import tyro

    options = tyro.cli(Options, prog="long_sequence.py", description=__doc__)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    from train.outputs_log import hardware, versions  # torch reads the environment when it is imported
    from train.runtime import target_device

    device = target_device()
    precision = chosen_precision("auto", device)
    loads = loads_of(options, precision)
    load = loads["Trainer"][1]
    print(f"{load}, vocabulary {load.vocab_size:,}", flush=True)
    found = compare(loads, Processes(on_cpu=device.type == "cpu"))
    equal = all(row[LOSS_DIFFERENCE] <= TOLERANCE[precision] for row in found.values())
    machine, installed = hardware(), versions()
    report = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "workload": asdict(load),
        "hardware": machine,
        "versions": installed,
        "equal_work": equal,
        "results": found,
    }
    place = machine["gpus"][0]["name"] if machine["gpus"] else f"{machine['cpu']}, {machine['cpu_cores']} cores"
    text = "\n".join(
        [
            "# One long sequence, a large vocabulary",
            "",
            *table(found),
            "",
            f"- A Llama of {load}; vocabulary {load.vocab_size:,}; {load.rounds} rounds of {load.steps} "
            "steps after one.",
            f"- Losses after the same steps {'agree' if equal else 'DO NOT AGREE: the times cannot be compared'}.",
            f"- {place}; {', '.join(f'{name} {version}' for name, version in installed.items())}; {report['date']}.",
            "",
        ]
    )
    print("\n" + text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    name = "cpu" if device.type == "cpu" else place.lower().replace(" ", "-")
    (options.output_dir / f"long_sequence-{name}.json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    (options.output_dir / f"long_sequence-{name}.md").write_text(text, "utf-8")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
