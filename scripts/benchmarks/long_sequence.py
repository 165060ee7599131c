"""One long sequence and a large vocabulary: the template's techniques against transformers' Trainer with its own
gradient checkpointing, and TRL's SFTTrainer where trl is installed, in peak memory and time.

    python scripts/benchmarks/long_sequence.py --write     # 8,192 tokens, 32,768 entries; 15 minutes on two cores
    python scripts/benchmarks/long_sequence.py --rounds 3 --length 4096

Weights, tokens, steps, optimizer and precision are the same for all; each runs in a process of its own, in random order
within a round. Ratios are taken within a round, and all must end at the same loss. Peak memory is traced from the
allocator in separate runs.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness
from scripts.benchmarks.harness import spread
from scripts.benchmarks.variants import TOLERANCE, Measurement, Processes, Workload
from train.figures import several

RUNGS: dict[str, dict[str, Any]] = {
    "full checkpointing": {"gradient_checkpointing": "full", "loss": "full"},
    "+ chunked loss": {"gradient_checkpointing": "full", "loss": "auto"},
    "+ selective": {"gradient_checkpointing": "selective", "loss": "auto"},
}
"""Flags of the template, by name."""
TRAINER, TRL = "Trainer", "SFTTrainer"
OWNERS = {TRAINER: "transformers'", TRL: "TRL's"}
LOSS_DIFFERENCE = "largest_loss_difference"


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares the template with Trainer on one long sequence."""

    length: int = 8192
    vocab_size: int = 32768
    hidden_size: int = 256
    """A multiple of 64."""
    layers: int = 4
    steps: int = 2
    """Measured steps of each variant and round, after one to warm up."""
    rounds: int = 5
    cpu_threads: int | None = None


def loads_of(options: Options, precision: str, with_liger: bool = False) -> dict[str, tuple[str, Workload]]:
    """(variant, workload) by the name of the row.

    Args:
        with_liger: also Trainer with Liger's kernels, which need a card, and compiled layers.
    """
    base = Workload(
        "long sequence",
        options.hidden_size,
        options.layers,
        options.length,
        micro_batch_size=1,
        accumulation=1,
        gradient_checkpointing="none",
        steps=options.steps,
        turn_steps=options.steps,
        warmup_steps=1,
        rounds=options.rounds,
        mixed_precision=precision,
        cpu_threads=options.cpu_threads,
        vocab_size=options.vocab_size,
    )
    trainer = replace(base, trainer_checkpoints=True)
    rows = {TRAINER: ("trainer", trainer)}
    if with_liger:
        rows[f"{TRAINER}, Liger"] = ("trainer", replace(trainer, trainer_liger=True))
    if find_spec("trl") is not None:
        rows[f"{TRL} {version('trl')}"] = ("trl", trainer)
    settings = RUNGS | ({"+ compiled": RUNGS["+ selective"] | {"compile": True}} if with_liger else {})
    rungs = {name: ("template", replace(base, settings=tuple(values.items()))) for name, values in settings.items()}
    return rows | {name.replace("chunked", "Liger's" if with_liger else "chunked"): row for name, row in rungs.items()}


def measured(options: Options) -> dict[str, Any]:
    """Time and memory of each row."""
    device = building.training_device()
    precision = building.usable_precision("auto", device)
    loads = loads_of(options, precision, device.type == "cuda" and find_spec("liger_kernel") is not None)
    load = loads[TRAINER][1]
    print(f"{load}, vocabulary {load.vocab_size:,}", flush=True)
    found = compare(loads, Processes(on_cpu=device.type == "cpu"), options.rounds)
    equal = all(row[LOSS_DIFFERENCE] <= TOLERANCE[precision] for row in found.values())
    return {"workload": asdict(load), "equal_work": equal, "results": found}


def compare(loads: dict[str, tuple[str, Workload]], processes: Processes, rounds: int) -> dict[str, dict[str, Any]]:
    """Time and memory of each row; ratios are to Trainer's in the same round."""

    def announce(number: int, results: dict[str, Measurement]) -> None:
        times = ", ".join(f"{name} {results[name].seconds_per_step:.2f} s" for name in loads)
        print(f"  round {number} of {rounds}: {times}", flush=True)

    measures = {name: partial(processes.measure, *load) for name, load in loads.items()}
    results = harness.paired_rounds(measures, rounds, announce)
    seconds = [{name: one[name].seconds_per_step for name in loads} for one in results]
    losses = [{name: one[name].loss_after for name in loads} for one in results]
    found: dict[str, dict[str, Any]] = {}
    for name, (variant, load) in loads.items():
        peak = processes.peak_bytes(variant, load, results[0][name])
        found[name] = {
            "settings": dict(load.settings) or {"gradient_checkpointing": True},
            "seconds_per_step": spread([one[name] for one in seconds]),
            "time_ratio": spread(harness.ratios(seconds, name, TRAINER)),
            "peak_bytes": peak,
            "loss_after": statistics.median(one[name] for one in losses),
            LOSS_DIFFERENCE: max(abs(ratio - 1) for ratio in harness.ratios(losses, name, TRAINER)),
        }
        print(f"  {name}: peak {(peak or 0) / harness.MIB:.0f} MiB", flush=True)
    return found


TABLE = harness.Table(
    (
        "what",
        "peak memory, MiB",
        "÷ Trainer",
        "step, s",
        "÷ Trainer (middle half of the rounds)",
        "loss after",
    ),
    "lrrrrr",
)


def cells(name: str, row: dict[str, Any], reference_bytes: int, rounds: int) -> list[str]:
    """A row of the table; few rounds have no quartiles."""
    time, owner = row["time_ratio"], [whose for trainer, whose in OWNERS.items() if name.startswith(trainer)]
    return [
        f"{owner[0]} {name}, gradient_checkpointing" if owner else f"template, {name}",
        f"{row['peak_bytes'] / harness.MIB:,.0f}",
        f"{row['peak_bytes'] / reference_bytes:.2f}",
        f"{row['seconds_per_step']['median']:.2f}",
        f"{time['median']:.2f}" + (f" ({time['quartile_1']:.2f} to {time['quartile_3']:.2f})" if rounds > 2 else ""),
        f"{row['loss_after']:.5f}",
    ]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown, with the workload and the check of the losses."""
    results, workload = found["results"], found["workload"]
    load = Workload(**workload | {"settings": tuple(workload["settings"])})
    reference = results[TRAINER]["peak_bytes"]
    agreement = "agree" if found["equal_work"] else "DO NOT AGREE: the times cannot be compared"
    lines = [
        "# One long sequence, a large vocabulary",
        "",
        *TABLE.lines(cells(name, row, reference, load.rounds) for name, row in results.items()),
        "",
        f"- A Llama of {str(load).replace('checkpointing none', 'checkpointed')}; vocabulary {load.vocab_size:,}; "
        f"{several(load.rounds, 'round')} of {load.steps} steps after one.",
        f"- Losses after the same steps {agreement}.",
        f"- {harness.machine_line(found)}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Status 1 if the variants did not do equal work."""
    found = harness.report(Options, __doc__, measured, page, name="long_sequence")
    return 0 if found["equal_work"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
