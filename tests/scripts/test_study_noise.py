"""Steps predicted from a gradient noise scale: by given figures, and beside what was measured."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support import write_recipe

from scripts.benchmarks.study import batch_size, noise, trials
from scripts.benchmarks.study.noise import Law
from scripts.benchmarks.study.trials import DONE, Outcome
from train.config import parse
from train.extras.gradients.noise import MEMORY
from train.records import UsageError

TARGET = 2.0


def outcome(variant: str, steps: float, seed: int = 1, scales: list[list[float]] | None = None) -> Outcome:
    """A run whose loss falls by 1 with each doubling of its steps and is at the target after ``steps``."""
    evaluations = [[steps * 2.0**power, 1.0, 1.0, TARGET - power] for power in (-2.5, -1.5, -0.5, 0.5)]
    own: dict[str, Any] = {"metrics": {"loss": 1.5}, "metric_name": "loss", "peak_bytes": 2**20}
    return Outcome(variant, seed, DONE, evaluations=evaluations, noise_scales=scales or [], **own)


def test_steps_lie_between_evaluations_on_a_logarithmic_scale() -> None:
    assert noise.steps_until(outcome("4", 100), TARGET) == pytest.approx(100)
    assert noise.steps_until(outcome("4", 100), TARGET + 0.25) == pytest.approx(100 * 2**-0.25)
    assert noise.steps_until(outcome("4", 100), 1.0) is None
    assert noise.steps_until(outcome("4", 100), 9.0) == pytest.approx(100 * 2**-2.5)  # the first evaluation


def test_a_constant_noise_scale_is_that_of_the_law() -> None:
    law = noise.law_of(outcome("8", 120, scales=[[50, 16.0], [100, 16.0], [150, 16.0]]), 8, TARGET)
    assert (
        law is not None and law.noise_scale == pytest.approx(16) and law.steps_min == pytest.approx(120 / (1 + 16 / 8))
    )
    steps = [law.steps(size) for size in (2, 8, 16, 64)]
    assert steps == pytest.approx([40 * (1 + 16 / size) for size in (2, 8, 16, 64)]) and steps[1] == pytest.approx(120)


def test_a_noise_scale_that_grows_is_summed_over_the_steps_without_the_lag_of_its_moving_mean() -> None:
    """A scale of s ÷ 10 at step s: the integrals are known."""
    mean = weight = 0.0
    scales = []
    for step in range(1, 201):
        mean, weight = MEMORY * mean + (1 - MEMORY) * step / 10, MEMORY * weight + (1 - MEMORY)
        scales += [[step, mean / weight]] if step % 5 == 0 else []
    law = noise.law_of(outcome("8", 120, scales=scales), 8, TARGET)
    steps_min = 80 * math.log(1 + 120 / 80)
    assert law is not None and law.steps_min == pytest.approx(steps_min, rel=0.01)
    assert law.examples_min == pytest.approx(8 * (120 - steps_min), rel=0.01)
    assert law.steps(8) == pytest.approx(120)


def test_without_a_noise_scale_or_the_target_there_is_no_law() -> None:
    assert noise.law_of(outcome("8", 120), 8, TARGET) is None
    assert noise.law_of(outcome("8", 120, scales=[[60, 8.0]]), 8, 0.5) is None
    early = noise.law_of(outcome("8", 120, scales=[[60, 8.0]]), 8, TARGET)  # the only one known stands for all
    assert early is not None and early.noise_scale == pytest.approx(8)


def test_noise_scales_are_read_from_the_log() -> None:
    rows = [
        {"kind": "train", "step": n, "gradient_noise_scale_examples": scale} for n, scale in enumerate((None, 0.0, 3.5))
    ]
    assert trials.noise_scales([*rows, {"kind": "evaluation", "step": 3}, {"kind": "train", "step": 4}]) == [
        [1, 0.0],
        [2, 3.5],
    ]


def test_predictions_stand_beside_the_fastest_learning_rate() -> None:
    law = Law(8, steps_min=50, examples_min=400)
    rates = {
        8: {"8": [outcome("8", 100), outcome("8", 104, seed=2)]},
        2: {"2, unscaled": [outcome("2, unscaled", 300)], "2, √": [outcome("2, √", 200)]},
        32: {"32, unscaled": [outcome("32, unscaled", 50), Outcome("32, unscaled", 2, "diverged")]},
    }
    small, own, large = noise.predictions(law, rates, TARGET)
    assert (small.size, small.predicted, small.variant) == (2, 250, "2, √")
    assert small.measured == pytest.approx(200) and small.error == pytest.approx(0.25)
    assert own.measured == pytest.approx(102) and own.error == pytest.approx(100 / 102 - 1)
    assert (large.measured, large.error, large.variant) == (None, None, None)


def results(*outcomes: Outcome) -> dict[str, Any]:
    return {"flags": {"target_loss": TARGET, "noise_from": 8}, "outcomes": [asdict(o) for o in outcomes]}


@pytest.mark.parametrize(
    ("steps", "verdict"), [(230, "9 % at most (batch 2): within"), (180, "39 % at most (batch 2): NOT within")]
)
def test_the_page_says_how_far_off_it_is(steps: float, verdict: str) -> None:
    own = outcome("8", 100, scales=[[100, 8.0]])
    found = results(outcome("2, unscaled", steps), own, outcome("8, unscaled, micro-batch 4", 7))
    titles, first, second, third = batch_size.rows(found)
    assert titles[8:11] == ["predicted steps until 2.0", "measured", "error"]
    assert first[8:11] == ["250", str(steps), f"{100 * (250 / steps - 1):+.0f} %"]
    assert second[8:11] == ["100", "100", "+0 %"] and third[8:11] == ["", "", ""]
    said = batch_size.sentences(found)
    assert said[-3].startswith("Gradient noise scale of the runs in batches of 8, until a loss of 2.0: 8 examples.")
    assert verdict in said[-2] and said[-2].endswith("the aim of 15 %.")
    assert said[-1] == "Batch 8 ran in smaller micro-batches: its peak and speed are not those of the others."


def test_the_law_is_that_of_the_fastest_rate_of_its_batch() -> None:
    rates = {"8, unscaled": 100, "8, √": 200, "8, linear": 300}
    law, made = batch_size.predicted(results(*(outcome(n, s, scales=[[s, 8.0]]) for n, s in rates.items()))) or (0, [])
    assert law and [(p.variant, p.error) for p in made] == [("8, unscaled", pytest.approx(0))]


def test_a_seed_that_never_came_there_leaves_nothing_to_predict_from() -> None:
    late = replace(outcome("8", 100, scales=[[100, 8.0]]), seed=2, evaluations=[[100, 1, 1.0, TARGET + 1]])
    found = results(outcome("8", 100, scales=[[100, 8.0]]), late)
    assert batch_size.predicted(found) is None
    assert batch_size.sentences(found)[-1].startswith("Nothing is predicted: not every run of the batch")


def test_a_study_without_the_flag_predicts_nothing() -> None:
    found = {**results(outcome("8", 100, scales=[[100, 8.0]])), "flags": {"target_loss": TARGET}}
    assert batch_size.predicted(found) is None and batch_size.rows(found)[0][8:11] == [""] * 3


def test_the_page_draws_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(batch_size, "write", lambda *arguments: drawn.extend(arguments[-1]))
    batch_size.pages(tmp_path, results(outcome("2, unscaled", 230), outcome("8", 100, scales=[[100, 8.0]])))
    assert [chart.title for chart in drawn] == ["Loss over tokens", "Steps over batch size"]
    assert "predicted from 8" in drawn[1].svg and "measured" in drawn[1].svg


def test_only_the_runs_of_one_batch_estimate_the_noise(tmp_path: Path) -> None:
    words = ["--config", str(write_recipe(tmp_path)), "--max_steps", "12"]
    own = Namespace(sizes=[2, 8], scalings=["none"], micro_batch_sizes=[], seeds=[1], noise_from=2, target_loss=TARGET)
    two, eight = (parse([*words, *trial.flags]) for trial in batch_size.trials_of(own, words))
    assert two.get("gradient_noise_scale") and not eight.get("gradient_noise_scale")
    assert two.optimization.micro_batch_size == 1 and eight.optimization.micro_batch_size == 2
    for wrong in ({"noise_from": 4}, {"target_loss": None}, {"sizes": [1, 8], "noise_from": 1}):
        with pytest.raises(UsageError, match="--noise_from: "):
            batch_size.trials_of(Namespace(**{**vars(own), **wrong}), words)
