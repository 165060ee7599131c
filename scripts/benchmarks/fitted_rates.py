"""The shares of published rates that real kernels reach, fitted to the steps that were timed on a card.

    python scripts/benchmarks/fitted_rates.py          # some minutes, on any machine; prints, changes nothing

Reads docs/results/memory_accuracy-nvidia-h200.json. Each of its steps is predicted once, operator by operator; a grid
over the shares then finds those with which estimates of the steps in half precision are closest to what was measured
(least squares of the logarithms). ``train/memory/card_kernels.py`` has those in use.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness

PRODUCTS, ATTENTION, BANDWIDTH = ([n / 20 for n in range(low, 21)] for low in (8, 6, 8))
LAUNCH_SECONDS = [n * 1e-6 for n in (5, 8, 10, 12, 15, 20)]


class Step(NamedTuple):
    """A step that was timed, and the ideal seconds of its operators: (of attention, computing, moving, repeats)."""

    case: str
    seconds: float
    is_half: bool  # of the others only the estimate is shown
    operators: list[tuple[bool, float, float, int]]


def timed_steps() -> list[Step]:
    """The steps of the file, predicted in this process."""
    from scripts.benchmarks.accuracy_cases import large_cases, title
    from train.memory import card_kernels as kernels
    from train.memory import trial
    from train.memory.devices import find_device

    rows = json.loads((harness.RESULTS / "memory_accuracy-nvidia-h200.json").read_text(encoding="utf-8"))["rows"]
    timed = {row["case"]: row["seconds"] for row in rows if row.get("seconds")}
    operators: list[tuple[bool, float, float, int]] = []

    def add(self: kernels.Costs, flops: float, traffic: float, dtype: Any, repeats: int, reached: float) -> None:
        rate = self.flops_per_second.get(dtype) or max(self.flops_per_second.values())
        is_attention = reached != kernels.REACHED_FLOPS
        computing = flops / rate * (kernels.REACHED_ATTENTION_FLOPS / reached if is_attention else 1)
        operators.append((is_attention, computing, traffic / self.bytes_per_second, repeats))

    steps = list[Step]()
    with patch.object(kernels.Costs, "add", add):
        for case in large_cases(find_device("h200")):
            if title(case) in timed:
                operators = []
                trial.predict(case)
                is_half = case.values["mixed_precision"] != "no" or case.values.get("dtype") == "bfloat16"
                steps.append(Step(title(case), timed[title(case)], is_half, operators))
    return steps


def estimated(step: Step, shares: Sequence[float]) -> float:
    """Seconds of ``step`` with shares for products, attention and traffic, and the seconds of a launch."""
    products, attention, bandwidth, launch = shares
    return sum(
        repeats * max(launch, computing / (attention if is_attention else products), moving / bandwidth)
        for is_attention, computing, moving, repeats in step.operators
    )


def distance(steps: Sequence[Step], shares: Sequence[float]) -> float:
    """Mean square of the logarithm of measured by estimated."""
    return statistics.fmean(math.log(step.seconds / estimated(step, shares)) ** 2 for step in steps)


def best_shares(steps: Sequence[Step], start: Sequence[float]) -> Sequence[float]:
    """Those of the grid with the least distance: one pair after the other, around the best so far."""
    best, grids = start, (PRODUCTS, ATTENTION, BANDWIDTH, LAUNCH_SECONDS)
    for places in ((0, 1), (2, 3), (0, 2)) * 3:
        tried = product(*(grid if place in places else [best[place]] for place, grid in enumerate(grids)))
        best = min(tried, key=lambda shares: distance(steps, shares))
    return best


def main() -> int:
    """Prints the ratios with the shares in use and with the best of the grid."""
    building.use_expandable_segments()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from train.memory import card_kernels as kernels

    steps = timed_steps()
    fitted = [step for step in steps if step.is_half]
    in_use = (kernels.REACHED_FLOPS, kernels.REACHED_ATTENTION_FLOPS, kernels.REACHED_BANDWIDTH, kernels.LAUNCH_SECONDS)
    best = best_shares(fitted, in_use)
    table = harness.Table(("step", "measured, s", "÷ estimated, in use", "÷ estimated, best"), "lrrr")
    rows = [
        (step.case, f"{step.seconds:.3f}", *(f"{step.seconds / estimated(step, each):.2f}" for each in (in_use, best)))
        for step in steps
    ]
    print("\n".join(table.lines(rows)))
    for name, shares in (("in use", in_use), ("best", best)):
        off = 100 * math.sqrt(distance(fitted, shares))
        print(f"{name}: {', '.join(f'{share:g}' for share in shares)}; off by {off:.0f} % in the mean")
    sys.stdout.flush()
    os._exit(0)  # the interpreter's shutdown must not call the functions that were put into C++ tables


if __name__ == "__main__":
    raise SystemExit(main())
