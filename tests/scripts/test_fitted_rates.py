"""The fit of the shares that kernels reach: it finds those by which steps were made."""

from __future__ import annotations

import pytest

from scripts.benchmarks.fitted_rates import Step, best_shares, distance, estimated

OPERATORS = {
    "products": [(False, 2.0, 0.1, 1)],
    "attention": [(True, 1.0, 0.1, 2)],
    "traffic": [(False, 0.0, 0.5, 3)],
    "launches": [(False, 0.0, 1e-9, 1000)],
}


def test_an_operator_takes_its_arithmetic_its_traffic_or_a_launch_whichever_is_longest() -> None:
    taken = [estimated(Step(name, 0.0, True, each), (0.5, 0.25, 0.1, 1e-5)) for name, each in OPERATORS.items()]
    assert taken == pytest.approx([4.0, 8.0, 15.0, 0.01])


def test_the_shares_by_which_steps_were_made_are_found() -> None:
    made_by = (0.6, 0.35, 0.75, 1.2e-5)
    steps = [
        Step(name, estimated(Step(name, 0.0, True, each), made_by), True, each) for name, each in OPERATORS.items()
    ]
    found = best_shares(steps, (0.7, 0.5, 0.65, 1e-5))
    assert found == pytest.approx(made_by) and distance(steps, found) == pytest.approx(0.0)
