"""Steps to a target loss at other batch sizes, predicted from the gradient noise scale of one run (arXiv 1812.06162).

With a noise scale of N examples, a step of B examples brings 1 ÷ (1 + N ÷ B) of what a step without noise would. N
grows while a model learns, so that is summed over the steps of the run (appendix D): ``steps_min`` is what it would
have needed without noise, ``examples_min`` in the smallest batches, and S(B) = steps_min + examples_min ÷ B.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scripts.benchmarks.study.charts import drawn_svg
from scripts.benchmarks.study.trials import Outcome
from train.extras.report.charts import FIRST, SECOND, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AIM = 0.15  # relative error of predicted steps
PARTS = 2000  # into which a run is divided, to sum over it


@dataclass(frozen=True)
class Law:
    """S(B) = steps_min + examples_min ÷ B, from runs of one batch size."""

    size: int
    steps_min: float
    examples_min: float

    def steps(self, size: float) -> float:
        """Until the target, in batches of ``size`` examples."""
        return self.steps_min + self.examples_min / size

    @property
    def noise_scale(self) -> float:
        """Of the whole run until the target, in examples: at this batch size half of the steps are due to noise."""
        return self.examples_min / self.steps_min


def steps_until(outcome: Outcome, target_loss: float) -> float | None:
    """Steps to ``target_loss``, between two evaluations by a loss that falls with the logarithm of the steps."""
    before: tuple[float, float] | None = None
    for step, _, _, loss in outcome.evaluations:
        if loss <= target_loss:
            if before is None or not before[0]:
                return step
            share = (before[1] - target_loss) / (before[1] - loss)
            return before[0] * (step / before[0]) ** share
        before = step, loss
    return None


def law_of(outcome: Outcome, size: int, target_loss: float) -> Law | None:
    """From a run in batches of ``size``; None if it never came to ``target_loss`` or knows no noise scale."""
    end = steps_until(outcome, target_loss)
    if end is None or not outcome.noise_scales:
        return None
    steps, logged = zip(*outcome.noise_scales, strict=True)
    middles = (np.arange(PARTS) + 0.5) * end / PARTS
    scales = np.interp(middles, [step - mean_age(step) for step in steps], logged)
    shares = end / PARTS / (1 + scales / size)
    return Law(size, float(shares.sum()), float((scales * shares).sum()))


def mean_age(step: float) -> float:
    """By how many steps the figure logged at ``step`` lags behind: the mean age of what its moving mean remembers."""
    from train.extras.gradients.noise import MEMORY  # here: without the extra the study's other tables remain

    left = MEMORY**step
    return MEMORY / (1 - MEMORY) - step * left / (1 - left)


def mean_law(outcomes: Sequence[Outcome], size: int, target_loss: float) -> Law | None:
    """The mean over the seeds of one variant; None unless all of them came to ``target_loss``."""
    laws = [law for outcome in outcomes if (law := law_of(outcome, size, target_loss)) is not None]
    if not laws or len(laws) < len(outcomes):
        return None
    means = (statistics.fmean(getattr(law, name) for law in laws) for name in ("steps_min", "examples_min"))
    return Law(size, *means)


@dataclass(frozen=True)
class Prediction:
    """Steps until the target in batches of one size."""

    size: int
    predicted: float
    measured: float | None
    """By the learning rate that took fewest, at the median over seeds; None: none came there with every seed."""
    variant: str | None
    """Which has that learning rate."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.measured is None else self.predicted / self.measured - 1


def predictions(law: Law, rates: Mapping[int, Mapping[str, Sequence[Outcome]]], target_loss: float) -> list[Prediction]:
    """For each batch size of ``rates``, which has the outcomes of all seeds for each variant of that size."""
    made = []
    for size in sorted(rates):
        measured: dict[str, float] = {}
        for variant, outcomes in rates[size].items():
            times = [steps_until(outcome, target_loss) for outcome in outcomes]
            if known := [time for time in times if time is not None and len(outcomes) == sum(map(bool, times))]:
                measured[variant] = statistics.median(known)
        best = min(measured, key=lambda variant: measured[variant], default=None)
        made.append(Prediction(size, law.steps(size), measured.get(best or ""), best))
    return made


def texts(prediction: Prediction | None) -> list[str]:
    """Predicted and measured steps and the error, for a table."""
    if prediction is None or prediction.measured is None or prediction.error is None:
        return ["", "", ""]
    return [f"{prediction.predicted:.0f}", f"{prediction.measured:.0f}", f"{100 * prediction.error:+.0f} %"]


def sentences(law: Law, made: Sequence[Prediction], target_loss: float) -> list[str]:
    """What the noise scale says, and how far to trust it."""
    said = [
        f"Gradient noise scale of the runs in batches of {law.size}, until a loss of {target_loss}: "
        f"{law.noise_scale:.3g} examples. It predicts at least {law.steps_min:.0f} steps and {law.examples_min:.0f} "
        "examples, and at a batch of the noise scale twice as many of both."
    ]
    errors = [(abs(p.error), p.size) for p in made if p.error is not None and p.size != law.size]
    if errors:
        worst, size = max(errors)
        verdict = "within" if worst <= AIM else "NOT within"
        said.append(
            f"Predicted steps are off by {100 * statistics.median(e for e, _ in errors):.0f} % at the median of "
            f"{len(errors)} other batches, by {100 * worst:.0f} % at most (batch {size}): {verdict} the aim of "
            f"{100 * AIM:.0f} %."
        )
    return said


def chart(law: Law, made: Sequence[Prediction], target_loss: float) -> Chart:
    """Steps over batch size, predicted as a line and measured as dots."""

    def draw(axes: Axes) -> None:
        first, last = (math.log2(made[i].size) for i in (0, -1))
        sizes = [2 ** (first + (last - first) * i / 50) for i in range(51)]
        axes.plot(sizes, [law.steps(size) for size in sizes], color=FIRST, label=f"predicted from {law.size}")
        axes.plot([p.size for p in made], [p.measured or math.nan for p in made], "o", color=SECOND, label="measured")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xticks([p.size for p in made])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("global batch, examples")

    caption = f"Steps until a loss of {target_loss}: predicted by the gradient noise scale of batches of {law.size}."
    return Chart("Steps over batch size", caption, drawn_svg("noise", caption, draw))
