"""The charts of a study's page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scripts.benchmarks.study.cells import Cell, Reach, Sweep
from scripts.benchmarks.study.findings import small_share
from train.extras.report.charts import FIRST, INK, MUTED, SECOND, WARN, Chart, from_zero, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (INK, FIRST, SECOND, WARN, MUTED)
_MARKERS = "osD^v"


def frontier_chart(reaches: Sequence[Reach], techniques: Sequence[str], budget: str) -> Chart:
    """The largest micro-batch over the length."""

    def draw(axes: Axes) -> None:
        for number, technique in enumerate(techniques):
            own = sorted((r for r in reaches if r.technique == technique), key=lambda r: r.length)
            own = [reach for reach in own if reach.micro_batch_size]
            colour, marker = _look(number)
            sizes = [reach.micro_batch_size for reach in own]
            axes.plot([r.length for r in own], sizes, color=colour, label=technique, marker=marker, markersize=6)
            for reach in own:
                if not reach.measured:  # hollow
                    place = [reach.length], [reach.micro_batch_size]
                    axes.plot(*place, color=colour, marker=marker, markersize=6, markerfacecolor="white")
        axes.set_ylabel("micro-batch size")
        _powers_of_two(axes, "y", [r.micro_batch_size for r in reaches if r.micro_batch_size])
        _powers_of_two(axes, "x", [r.length for r in reaches])
        axes.set_xlabel("sequence length, tokens")

    title = f"Largest micro-batch within {budget}"
    caption = (
        "Of tensors at the peak of a step. Filled: measured; hollow, and ~ in the table: predicted, with gradients "
        "accumulated over several micro-batches. ≥: more may fit. A line ends where not even one sequence fits."
    )
    return Chart(title, caption, drawn_svg(title, caption, draw, size=(9.6, 3.4)))


def charts(sweep: Sweep) -> list[Chart]:
    """Speed, and the prediction against the measurement if both are known."""
    compared = any(cell.error is not None for cell in sweep.measured)
    speed = [_speed_chart(sweep)] if sweep.measured else []
    return [*speed, _accuracy_chart(sweep)] if compared else speed


def _speed_chart(sweep: Sweep) -> Chart:
    def draw(axes: Axes) -> None:
        for number, technique in enumerate(sweep.techniques):
            best: dict[int, float] = {}
            for cell in sweep.measured:
                if cell.technique == technique:
                    best[cell.length] = max(best.get(cell.length, 0.0), cell.tokens_per_second or 0.0)
            colour, marker = _look(number)
            lengths = sorted(best)
            axes.plot(lengths, [best[length] for length in lengths], color=colour, marker=marker, label=technique)
        _powers_of_two(axes, "x", [cell.length for cell in sweep.measured])
        from_zero(axes)
        axes.set_xlabel("sequence length, tokens")

    title = "Tokens per second"
    caption = "With the micro-batch size that was fastest at each length."
    return Chart(title, caption, drawn_svg(title, caption, draw))


def _accuracy_chart(sweep: Sweep) -> Chart:
    compared = [cell for cell in sweep.measured if cell.error is not None]

    def draw(axes: Axes) -> None:
        ends = [f((c.peak_bytes or 0) / 2**30 for c in compared) for f in (min, max)]
        axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
        for number, technique in enumerate(sweep.techniques):
            own = [cell for cell in compared if cell.technique == technique]
            colour, marker = _look(number)
            measured, predicted = ([(s or 0) / 2**30 for s in sizes] for sizes in _both_sizes(own))
            axes.plot(measured, predicted, color=colour, marker=marker, markersize=5, linestyle="none", label=technique)
        axes.set_xlabel("measured, GiB")
        axes.set_ylabel("predicted, GiB")

    title = "Predicted against measured peak"
    errors = [abs(cell.error or 0) for cell in compared]
    caption = (
        f"Dashed: equal. {len(errors)} cells, the prediction off by {small_share(statistics.median(errors))} at the "
        f"median, {small_share(max(errors))} at most."
    )
    return Chart(title, caption, drawn_svg(title, caption, draw))


def _both_sizes(cells: Sequence[Cell]) -> tuple[list[int | None], list[int | None]]:
    return [cell.peak_bytes for cell in cells], [cell.predicted_bytes for cell in cells]


def _look(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]


def _powers_of_two(axes: Axes, which: str, values: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each power of two around ``values``."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    low, high = min(values, default=1), max(values, default=1)
    exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    axis.set_major_locator(FixedLocator([2**exponent for exponent in exponents]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low / 1.15, high * 1.15)


def drawn_svg(title: str, label: str, draw: Callable[[Axes], None], size: tuple[float, float] = (6.2, 3.6)) -> str:
    def draw_whole(axes: Axes) -> None:
        draw(axes)
        if axes.get_xscale() == "log":  # whose own labels are formulas, which an SVG shows as their source
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")

    return svg(title, f"{title}. {label}", draw_whole, 2 if size[0] < 8 else 4, size)
