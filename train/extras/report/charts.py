"""The curves of a run as inline SVG, drawn by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from train.figures import gib, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Points = list[tuple[int, float]]
Curve = tuple[Points, dict[str, Any]]  # and how it looks: arguments of ``Axes.plot``

INK, MUTED, FIRST, SECOND, WARN = "#1b1f24", "#656d76", "#0b62d6", "#c2570c", "#c21f30"
_SPLITS: dict[str, Any] = {"validation": {"color": SECOND, "marker": "o"}, "test": {"color": INK, "marker": "D"}}


class Chart(NamedTuple):
    """A drawn curve: its heading, one sentence on what it shows, and the SVG."""

    title: str
    caption: str
    svg: str


def charts(metrics: Sequence[Row], summary: Mapping[str, Any]) -> list[Chart]:
    """The charts for which ``metrics`` hold at least one point; ``summary`` gives the limits that they show."""
    training = [row for row in metrics if row["kind"] == "train"]
    held_out = {split: [row for row in metrics if row.get("split") == split] for split in _SPLITS}

    def trained(name: str, label: str | None = None) -> list[Curve]:
        return [(points(training, name), {"color": FIRST, "label": label})]

    def by_split(name: str) -> list[Curve]:
        return [(points(held_out[split], name), {**look, "label": split}) for split, look in _SPLITS.items()]

    norms = [(step, value) for step, value in points(training, "grad_norm") if value > 0]
    skipped = {row["step"] for row in metrics if row["kind"] == "skipped"}
    crosses = {"color": WARN, "marker": "x", "linestyle": "", "label": f"not finite, skipped ({len(skipped)})"}
    at_foot = [(step, min(value for _, value in norms)) for step in sorted(skipped)] if norms else []
    gradients = [(norms, {"color": FIRST, "label": "gradient norm"}), (at_foot, crosses | {"markevery": 1})]
    peaks = [(step, size / 2**30) for step, size in points(training, "peak_allocated_bytes")]
    memory = peaks, {"color": FIRST, "label": "measured"}
    clipping = (norm, f"clipped to {norm:g}") if (norm := summary.get("max_grad_norm")) else None
    predicted = (size / 2**30, f"predicted {gib(size)}") if (size := summary.get("predicted_peak_bytes")) else None
    health = [(row["step"], [*filter(None, row["norms"])]) for row in metrics if row["kind"] == "health"]
    by_layer: list[Curve] = [
        ([(step, max(norms)) for step, norms in health if norms], {"color": FIRST, "label": "the largest"}),
        ([(step, min(norms)) for step, norms in health if norms], {"color": SECOND, "label": "the smallest"}),
    ]
    losses, speed = trained("loss", "train") + by_split("loss"), trained("tokens_per_second")
    drawn = [
        _chart("Loss", "Nats per target. A gap that widens is overfitting.", losses),
        _chart("Bits per byte", "Held-out text, whatever the tokenizer; lower is better.", by_split("bits_per_byte")),
        _chart("Accuracy", "Share of the targets predicted right, held out.", by_split("accuracy"), from_zero),
        _chart("Gradient norm", "Before clipping, logarithmic.", gradients, _logarithmic, clipping),
        _chart("Gradient norms by layer", "Far apart, the gradient vanishes on its way.", by_layer, _logarithmic),
        _chart("Noise scale", "Of the gradient, in examples.", trained("gradient_noise_scale_examples"), from_zero),
        _chart("Learning rate", "As the schedule set it.", trained("learning_rate"), from_zero),
        _chart("Tokens per second", "All devices together, padding not counted.", speed, from_zero),
        _chart("Peak memory", "GiB; the most that one device had allocated at once.", [memory], from_zero, predicted),
    ]
    return list(filter(None, drawn))


def points(rows: Sequence[Row], name: str) -> Points:
    """(step, value) of the rows that have a value, by step; of two rows for one step the later counts."""
    return sorted({row["step"]: float(row[name]) for row in rows if isinstance(row.get(name), int | float)}.items())


def _chart(
    title: str,
    caption: str,
    curves: Sequence[Curve],
    finish: Callable[[Axes], object] = lambda axes: None,
    limit: tuple[float, str] | None = None,
) -> Chart | None:
    """A chart of ``curves`` with points; ``finish`` sets its y axis, ``limit`` is a dashed line's height and label."""
    if not (curves := [curve for curve in curves if curve[0]]):
        return None
    steps = [step for found, _ in curves for step, _ in found]
    ends = ", ".join(f"{look.get('label', '')} {number(found[-1][1])}".strip() for found, look in curves)
    label = f"{title} from step {min(steps):,} to {max(steps):,}; at the end {ends}."

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        for found, look in curves:
            marker = "o" if len(found) == 1 else ""  # one point makes no line; of many, some have marks
            how: Any = {"marker": marker, "markersize": 4.5, "markevery": -(-len(found) // 60), **look}
            axes.plot(*zip(*found, strict=True), **how)
        if limit is not None:
            axes.axhline(limit[0], label=limit[1], color=SECOND, linestyle="--", linewidth=1.2)
        finish(axes)
        axes.xaxis.grid(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("step")
        axes.set_xlim(left=0)

    return Chart(title, caption, svg(title, label, draw))


def from_zero(axes: Axes) -> None:
    """A y axis from zero to a little above the highest value."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    axes.yaxis.set_major_formatter("{x:,g}")


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylim(axes.dataLim.y0 / 2, axes.dataLim.y1 * 2)
    axes.yaxis.set_major_locator(LogLocator(10, (1, 3)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def svg(title: str, label: str, draw: Callable[[Axes], None], columns: int = 4, size: Any = (6.2, 3.1)) -> str:
    """The ``<svg>`` of a chart of ``size`` inches, its legend in ``columns``, with a ``label`` for screen readers."""
    try:
        from matplotlib import figure, rc_context
    except ImportError:  # as on a machine with a card that has little more than torch
        return f"<p>{escape(label)} Not drawn: matplotlib is not installed.</p>"
    with rc_context({"svg.hashsalt": title}, Path(__file__).with_suffix(".mplstyle")):
        canvas = figure.Figure(figsize=size, layout="constrained")
        axes = canvas.subplots()
        draw(axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)
        text, no_metadata = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    prefix = re.sub(r"\W+", "-", title.lower())
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text.getvalue())
    head, tail = drawn[drawn.index("<svg") :].strip().split(">", 1)
    head = re.sub(r' (width|height|version|xmlns|xmlns:xlink)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label)}">{tail}'
