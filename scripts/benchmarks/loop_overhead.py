"""What the template's loop costs beyond the arithmetic: its step against bare PyTorch's and transformers' Trainer's.

    python scripts/benchmarks/loop_overhead.py --write       # both workloads, 7 minutes on two idle cores
    python scripts/benchmarks/loop_overhead.py --workload long --length 4096 --rounds 5

``variants.py`` has the three steps. All use the same activation checkpointing, and must end at the same loss. The three
are started together and take turns of a few steps, in random order; ratios are taken between turns of the same round.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness
from scripts.benchmarks.harness import spread
from scripts.benchmarks.variants import TOLERANCE, VARIANTS, Measurement, Processes, Workload

IMPORTED = ("torch", "transformers", "accelerate", "datasets", "evaluate")
CPU_WORKLOADS = (
    Workload("short", 64, 2, 128, 1, 1, "none", steps=500, warmup_steps=20, rounds=10),
    Workload("long", 192, 2, 1024, 1, 2, "full", steps=20, warmup_steps=2, rounds=5, turn_steps=2),
)
GPU_WORKLOADS = (
    Workload("short", 64, 2, 128, 1, 1, "none", steps=200, warmup_steps=20, rounds=5),
    Workload("long", 1024, 16, 8192, 1, 4, "full", steps=20, warmup_steps=3, rounds=5, turn_steps=2),
)


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares one training step of the template, bare PyTorch and transformers' Trainer."""

    workload: Literal["short", "long", "both"] = "both"
    """short: steps of a few milliseconds, nearly all of it overhead; long: steps of some hundred milliseconds."""
    hidden_size: int | None = None
    """A multiple of 64. This and the next flags change the shape of the chosen workloads."""
    layers: int | None = None
    length: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    gradient_checkpointing: Literal["none", "full", "selective"] | None = None
    steps: int | None = None
    """Measured steps of each variant and start; a multiple of the steps of a turn."""
    warmup_steps: int | None = None
    rounds: int | None = None
    """How often all three are started."""
    turn_steps: int | None = None
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: bf16 where the accelerator has it, else fp16; fp32 on a CPU."""
    cpu_threads: int | None = None
    """Of every variant, on a CPU; default: one per core. 1 is steadier on a machine with other work."""
    seed: int = 42


def measured(options: Options) -> dict[str, Any]:
    """All workloads, and the time to start."""
    device = building.training_device()
    precision = building.usable_precision(options.mixed_precision, device)
    loads = chosen_workloads(options, device.type, precision)
    processes = Processes(on_cpu=device.type == "cpu")
    return {
        "help_seconds": seconds_of_help(),
        "import_seconds": seconds_of_imports(),
        "memory_source": f"{'CUDA' if device.type == 'cuda' else 'CPU'} allocator, over 2 steps",
        "results": [compare(load, processes) for load in loads],
    }


def chosen_workloads(options: Options, device_type: str, precision: str) -> list[Workload]:
    """The workloads of this device with the flags over them.

    Raises:
        SystemExit: a flag has a value that cannot work.
    """
    given = {name: value for name, value in asdict(options).items() if value is not None}
    fields = set(Options.__annotations__) & set(Workload.__dataclass_fields__) - {"mixed_precision"}
    changes: dict[str, Any] = {name: value for name, value in given.items() if name in fields}
    too_small = [name for name, value in changes.items() if isinstance(value, int) and value < 1 and name != "seed"]
    if too_small or (options.hidden_size or 64) % 64:
        raise SystemExit("All numbers must be positive, and hidden_size a multiple of 64.")
    known = GPU_WORKLOADS if device_type == "cuda" else CPU_WORKLOADS
    asked = [load for load in known if options.workload in ("both", load.name)]
    loads = [replace(load, mixed_precision=precision, **changes) for load in asked]
    if uneven := [load.name for load in loads if load.steps % load.turn_steps]:
        raise SystemExit(f"steps must be a multiple of turn_steps ({', '.join(uneven)}).")
    return loads


def compare(load: Workload, processes: Processes) -> dict[str, Any]:
    """All rounds of ``load``, and the figures that follow from them."""
    print(f"\n{load.name}: {load}", flush=True)

    order, rounds, step_ms = Random(load.seed), list[dict[str, Measurement]](), list[dict[str, float]]()
    for number in range(1, load.rounds + 1):
        rounds.append(found := processes.measure_in_turns(load, order))
        turns = zip(*(found[name].turns for name in VARIANTS), strict=True)
        step_ms += [{name: round(s * 1e3, 4) for name, s in zip(VARIANTS, turn, strict=True)} for turn in turns]
        times = ", ".join(f"{name} {found[name].seconds_per_step * 1e3:.2f} ms" for name in VARIANTS)
        print(f"  start {number} of {load.rounds}: {times}", flush=True)
    losses = {name: [found[name].loss_after for found in rounds] for name in VARIANTS}
    differences = [abs(a / b - 1) for own in losses.values() for a, b in zip(own, losses["bare"], strict=True)]
    return {
        "workload": asdict(load),
        "step_ms": {name: spread([found[name] for found in step_ms]) for name in VARIANTS},
        "ratios": {
            f"{a}/{b}": spread(harness.ratios(step_ms, a, b))
            for a, b in (("template", "bare"), ("trainer", "bare"), ("template", "trainer"))
        },
        "peak_bytes": {name: processes.peak_bytes(name, load, rounds[0][name]) for name in VARIANTS},
        "loss_before": rounds[0]["bare"].loss_before,
        "loss_after": {name: statistics.median(values) for name, values in losses.items()},
        "largest_loss_difference": max(differences),
        "equal_work": max(differences) <= TOLERANCE[load.mixed_precision],
        "rounds": step_ms,
    }


def seconds_of_help(times: int = 5) -> float:
    """Median wall time of ``train/main.py --help``."""
    command = [sys.executable, str(harness.ROOT / "train" / "main.py"), "--help"]
    run = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    return statistics.median(harness.timed(run) for _ in range(times))


def seconds_of_imports(times: int = 3) -> dict[str, float]:
    """Median seconds that each library takes to import after those before it; only installed ones."""
    code = (
        "import importlib, json, sys, time\n"
        "seconds = {}\n"
        f"for name in {IMPORTED!r}:\n"
        "    started = time.perf_counter()\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    seconds[name] = time.perf_counter() - started\n"
        "print(json.dumps(seconds))\n"
    )
    runs = []
    for _ in range(times):
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def table(found: dict[str, Any]) -> list[str]:
    """The figures as a Markdown table."""
    rows = []
    for result in found["results"]:
        for name in VARIANTS:
            peak = result["peak_bytes"][name]
            rows.append(
                [
                    result["workload"]["name"],
                    name,
                    f"{result['step_ms'][name]['median']:.2f}",
                    shown_ratio(result["ratios"].get(f"{name}/bare")),
                    shown_ratio(result["ratios"].get(f"template/{name}")),
                    f"{peak / harness.MIB:.1f}" if peak else "",
                ]
            )
    memory = f"peak memory, MiB ({found['memory_source']})"
    titles = ("workload", "variant", "step, ms", "against bare", "template against it", memory)
    return harness.Table(titles, "llrrrr").lines(rows)


def shown_ratio(ratio: dict[str, float] | None) -> str:
    """Median and quartiles of a ratio in a table's cell."""
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['quartile_1']:.3f} to {ratio['quartile_3']:.3f})"


def notes(found: dict[str, Any]) -> list[str]:
    """The lines below the table: the checks, the workloads, start-up, machine and versions."""
    lines = []
    for result in found["results"]:
        load = Workload(**result["workload"])
        verdict = "equal work" if result["equal_work"] else "NOT EQUAL WORK, the times cannot be compared"
        ends = ", ".join(f"{name} {loss:.5f}" for name, loss in result["loss_after"].items())
        lines += [
            f"- {load.name}: {load}; {len(result['rounds'])} turns of {load.turn_steps} steps each, in {load.rounds} "
            f"starts with {load.warmup_steps} steps to warm up.",
            f"- {load.name}: loss {result['loss_before']:.5f} before, after: {ends}; largest relative difference in a "
            f"round {result['largest_loss_difference']:.1e}: {verdict}.",
        ]
    imports = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["import_seconds"].items())
    machine = found["hardware"]
    gpus = f"{len(machine['gpus'])} × {machine['gpus'][0]['name']}, " if machine["gpus"] else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
    place = f"{gpus}{machine['cpu']}, {machine['cpu_cores']} cores, {memory}, {machine['platform']}"
    return [
        *lines,
        f"- `train/main.py --help`: {found['help_seconds']:.2f} s. Imports, one after the other, s: {imports}.",
        f"- {harness.machine_line(found, place)}.",
    ]


def page(found: dict[str, Any]) -> str:
    """Table and notes in Markdown."""
    return "\n".join(["# What the loop costs", "", *table(found), "", *notes(found), ""])


def main() -> int:
    """Status 1 if the variants did not do equal work."""
    found = harness.report(Options, __doc__, measured, page, name="loop_overhead")
    return 0 if all(result["equal_work"] for result in found["results"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
