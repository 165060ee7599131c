"""Steps that are replayed one after the other, and the page of what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, takes_minutes

from scripts.benchmarks import step_orders
from train.memory.allocator import replay

MIB = 2**20
PAGE = ROOT / "docs" / "results" / "step_orders.json"


def traced(weight: int, state: int, activations: int) -> dict[str, Any]:
    """A step that keeps one weight (64 MiB) and one state (128 MiB), with storages of these numbers."""
    gradient, hidden = 900, 901
    trace = [
        (weight, 64 * MIB),
        *[(gradient, 64 * MIB), (state, 128 * MIB), (gradient, -64 * MIB)],
        *[(hidden, activations * MIB), (gradient, 64 * MIB), (hidden, -activations * MIB)],
        (gradient, -64 * MIB),
        *[(hidden, MIB), (hidden, -MIB)],  # an evaluation
        *[(state, -128 * MIB), (weight, -64 * MIB)],
    ]
    marks = [("optimizer", 1), ("idle", 4), ("forward", 4), ("backward", 5), ("optimizer", 7), ("evaluation", 8)]
    return {"trace": trace, "marks": marks}


def test_the_first_step_makes_the_state_in_its_update() -> None:
    short, long = step_orders.step_of(traced(7, 8, 32)), step_orders.step_of(traced(70, 80, 512))
    for steps in ([long], [short, long], [long, short, long]):
        allocator = replay(step_orders.in_order(steps), True)
        assert allocator.allocated_bytes == (64 + 128) * MIB  # weights and state, once
    alone, after = (
        step_orders.least_bytes(step_orders.in_order(steps), peak * MIB)
        for steps, peak in (([long], 64 + 512 + 64), ([short, long], 64 + 128 + 512 + 64))
    )
    assert 64 + 512 + 64 <= alone / MIB <= 64 + 512 + 64 + 40  # the first step has no state yet
    assert 64 + 128 + 512 + 64 <= after / MIB <= 64 + 128 + 512 + 64 + 40


def test_the_page_is_that_of_its_figures() -> None:
    found = json.loads(PAGE.read_text(encoding="utf-8"))
    assert PAGE.with_suffix(".md").read_text(encoding="utf-8") == step_orders.page(found)
    for row in found["rows"]:
        assert all(each["order"][-1] == row["length"] and len(each["order"]) == 6 for each in row["orders"])


@pytest.mark.slow
@takes_minutes
def test_a_planned_step_fits_after_others(tmp_path: Path) -> None:
    found = step_orders.measured(step_orders.Options(models=("0.5b",), rungs=1, orders=2, output_dir=tmp_path))
    [row] = found["rows"]
    assert step_orders.fitting(row) == 2 and abs(row["most_more_percent"]) < 2
