"""Which learning rate? A range test: the same start, a constant rate each, and what the loss became.

    python scripts/study.py learning_rate --config recipes/quickstart.yaml --output_dir runs/rates --max_steps 60

Each rate trains from the same weights on the same batches, one run for each seed. Warm-up and decay of the recipe stay
as they are unless flags say otherwise. Runs are kept, and the same command continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building
from scripts.benchmarks.study.charts import drawn_svg
from scripts.benchmarks.study.curves import write
from scripts.benchmarks.study.trials import DIVERGED, DONE, Outcome, Trial, conducted, interval, parser_of
from train.extras.report.charts import FIRST, MUTED, Chart
from train.records import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = parser_of("learning_rate", __doc__)
    parser.add_argument("--lowest", type=float, default=1e-5, metavar="RATE", help="(default: 1e-5)")
    parser.add_argument("--highest", type=float, default=1e-1, metavar="RATE", help="(default: 0.1)")
    parser.add_argument("--per_decade", type=int, default=2, metavar="N", help="rates in a factor of 10 (default: 2)")
    return conducted("Learning rate", parser, arguments, trials_of, pages)


def trials_of(own: argparse.Namespace, words: Sequence[str]) -> list[Trial]:
    """Every rate with every seed."""
    building.parsed_config(words)  # what cannot run at all is an error, not a result
    rates = [f"{rate:.3g}" for rate in rates_of(own.lowest, own.highest, own.per_decade)]
    return [Trial(rate, seed, (f"--learning_rate={rate}",)) for seed in own.seeds for rate in rates]


def rates_of(lowest: float, highest: float, per_decade: int) -> list[float]:
    """Rates from ``lowest`` to ``highest`` at equal ratios.

    Raises:
        UsageError: they are no such range.
    """
    if not 0 < lowest < highest < math.inf or per_decade < 1:
        raise UsageError(f"--lowest {lowest:g} --highest {highest:g} --per_decade {per_decade}: not a range of rates.")
    number = math.floor(math.log10(highest / lowest) * per_decade + 1e-9)
    return [lowest * 10 ** (i / per_decade) for i in range(number + 1)]


def losses_of(found: dict[str, Any]) -> dict[float, list[float]]:
    """The losses at the end by rate, of all seeds; none for a rate that diverged with one of them."""
    losses: dict[float, list[float]] = {}
    for values in found["outcomes"]:
        outcome = Outcome(**values)
        own = losses.setdefault(float(outcome.variant), [])
        own.append(outcome.loss if outcome.status == DONE and outcome.loss is not None else math.inf)
    return {rate: own if all(map(math.isfinite, own)) else [] for rate, own in losses.items()}


def suggestion(found: dict[str, Any]) -> list[str]:
    """The rate to start from, and how sure that is."""
    losses, every = {rate: own for rate, own in losses_of(found).items() if own}, sorted(losses_of(found))
    if not losses:
        has_diverged = any(values["status"] == DIVERGED for values in found["outcomes"])
        return [
            "No rate trained to the end" + (": give a lower --lowest." if has_diverged else ": the table says why.")
        ]
    means = {rate: statistics.fmean(own) for rate, own in losses.items()}
    best = min(means, key=lambda rate: means[rate])
    said = [f"Start from {best:.3g}: its loss at the end is the lowest, {means[best]:.4g}."]
    if best in (every[0], every[-1]):
        end, more = ("lowest", "lower") if best == every[0] else ("highest", "higher")
        said.append(f"It is the {end} rate tried, so the best may be {more}.")
    pairs = {rate: [a - b for a, b in zip(own, losses[best], strict=True)] for rate, own in losses.items()}
    alike = [f"{rate:.3g}" for rate in sorted(losses) if rate != best and not interval(pairs[rate]).is_shown]
    if len(losses[best]) < 2:
        said.append("One seed cannot tell small differences from chance.")
    elif alike:
        said.append(f"By these seeds no difference is shown to {', '.join(alike)}.")
    if diverged := [f"{rate:.3g}" for rate in every if rate not in losses]:
        said.append(f"{', '.join(diverged)} did not train to the end.")
    return [*said, "The best rate for few steps is often too high for many: a longer run may want a few times less."]


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row a rate, and before them the titles."""
    made = [["learning rate", "loss at the end", ""]]
    for rate, losses in sorted(losses_of(found).items()):
        others = [Outcome(**o) for o in found["outcomes"] if float(o["variant"]) == rate and o["status"] != DONE]
        note = "; ".join(dict.fromkeys(f"{o.status}: {o.reason}" for o in others))
        mean = interval(losses) if losses else None
        half = f" ± {mean.high - mean.mean:.2g}" if mean and mean.count > 1 else ""
        made.append([f"{rate:.3g}", f"{mean.mean:.4g}{half}" if mean else "", note])
    return made


def pages(folder: Path, found: dict[str, Any]) -> None:
    """Writes the results."""
    known = [(rate, losses) for rate, losses in sorted(losses_of(found).items()) if losses]

    def draw(axes: Axes) -> None:
        for rate, losses in known:
            axes.plot([rate] * len(losses), losses, "o", color=MUTED, markersize=4)
        means = [statistics.fmean(losses) for _, losses in known]
        axes.plot([rate for rate, _ in known], means, color=FIRST, marker="D", label="mean")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")

    caption = "Validation loss at the end. Dots: seeds; line: their mean. A rate that diverged has none."
    chart = Chart("Loss by learning rate", caption, drawn_svg("rates", caption, draw))
    write(folder, found, suggestion(found), rows(found), [chart] if known else [])
