"""What ``--gradient_health`` and ``--gradient_noise_scale`` cost: steps with and without, in paired rounds.

    python scripts/benchmarks/gradient_overhead.py --write     # two workloads each, ten minutes on two cores

A cost of 1 % drowns in the noise of a shared machine. So for gradient health a round compares runs in which every step
is measured with runs in which none is, and divides what a measured step takes more by the default interval. The noise
scale is estimated in every step, here from the fewest micro-batches that it needs: two.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness
from scripts.benchmarks.harness import spread
from scripts.benchmarks.variants import Measurement, Processes, Workload
from train.extras.gradients import Options as Health

WORKLOADS = (
    Workload("short", 64, 2, 128, 1, 1, "none", steps=100, warmup_steps=20, rounds=7),
    Workload("long", 192, 4, 1024, 2, 1, "none", steps=10, warmup_steps=2, rounds=7),
)
EVERY = Health().gradient_health_every_steps
FLAGS = {
    "gradient_health": (("gradient_health", True), ("gradient_health_every_steps", 1)),
    "gradient_noise_scale": (("gradient_noise_scale", True),),
}


@dataclass(frozen=True)
class Options(harness.Options):
    """Compares training steps with and without what looks at the gradient."""

    rounds: int | None = None
    """Of each workload."""
    cpu_threads: int | None = 1
    """1 is steadier on a machine with other work."""


def measured(options: Options) -> dict[str, Any]:
    """All workloads."""
    device = building.training_device()
    processes = Processes(on_cpu=device.type == "cpu")
    own = {"cpu_threads": options.cpu_threads, "mixed_precision": building.usable_precision("auto", device)}
    loads = [replace(load, rounds=options.rounds or load.rounds, **own) for load in WORKLOADS]
    halved = [replace(load, accumulation=2, steps=max(load.steps // 2, 10)) for load in loads]
    of_flags = {"gradient_health": loads, "gradient_noise_scale": halved}
    return {"results": [compare(flag, load, processes) for flag, own in of_flags.items() for load in own]}


def compare(flag: str, load: Workload, processes: Processes) -> dict[str, Any]:
    """All rounds of ``load`` with and without ``flag``."""
    loads = {"off": load, "measured": replace(load, settings=FLAGS[flag])}

    def announce(number: int, found: dict[str, Measurement]) -> None:
        times = ", ".join(f"{name} {one.seconds_per_step * 1e3:.2f} ms" for name, one in found.items())
        print(f"{flag}, {load.name}, round {number} of {load.rounds}: {times}", flush=True)

    measures = {name: partial(processes.measure, "template", one) for name, one in loads.items()}
    rounds = harness.paired_rounds(measures, load.rounds, announce)
    step_ms = [{name: one.seconds_per_step * 1e3 for name, one in found.items()} for found in rounds]
    return {
        "flag": flag,
        "workload": asdict(load),
        "step_ms": {name: spread([found[name] for found in step_ms]) for name in loads},
        "ratio": spread(harness.ratios(step_ms, "measured", "off")),
        "equal_work": all(found["off"].loss_after == found["measured"].loss_after for found in rounds),
        "rounds": step_ms,
    }


def page(found: dict[str, Any]) -> str:
    """The figures in Markdown."""
    rows = []
    for result in found["results"]:
        ratio, step_ms = result["ratio"], result["step_ms"]
        spread_text = f"{ratio['median']:.2f} ({ratio['quartile_1']:.2f} to {ratio['quartile_3']:.2f})"
        times = [f"{step_ms[name]['median']:.1f}" for name in ("off", "measured")]
        share = f"{100 * (ratio['median'] - 1) / (EVERY if result['flag'] == 'gradient_health' else 1):.2f} %"
        rows.append([f"`--{result['flag']}`", str(Workload(**result["workload"])), *times, spread_text, share])
    titles = ("flag", "workload", "step, ms", "measured step, ms", "measured against not", "cost")
    return "\n".join(
        [
            "# What gradient health and the noise scale cost",
            "",
            *harness.Table(titles, "llrrrr").lines(rows),
            "",
            f"- Gradient health measures one of {EVERY} steps, by which its cost is divided, and steps 1, 2, 4, 8, 16 "
            "and 32 of a run of any length. The noise scale is estimated in every step.",
            f"- Equal losses in all rounds: {all(result['equal_work'] for result in found['results'])}.",
            f"- {harness.machine_line(found)}.",
            "",
        ]
    )


def main() -> int:
    """Status 1 if measuring changed what was learned."""
    found = harness.report(Options, __doc__, measured, page, name="gradient_overhead")
    return 0 if all(result["equal_work"] for result in found["results"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
