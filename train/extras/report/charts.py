"""The curves of a run as inline SVG in the colours of the page's light or dark theme.

Matplotlib writes fixed colours; each of those used here stands for a CSS variable of the page and is replaced by it.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from train.figures import count, gib, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Points = list[tuple[int, float]]
Curve = tuple[Points, dict[str, Any]]  # and how it looks: arguments of ``Axes.plot``

INK, MUTED, _LINE, FIRST, SECOND, WARN = "#1b1f24", "#656d76", "#d8dee4", "#0b62d6", "#c2570c", "#c21f30"
_THEME = {INK: "ink", MUTED: "muted", _LINE: "line", FIRST: "first", SECOND: "second", WARN: "warn"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "path.simplify_threshold": 0.5,  # pixels: a curve of 200,000 points takes 60 KB, and its spikes stay
    "text.color": INK,
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _LINE),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("ytick.major.size", "ytick.minor.size"), 0),
}
_LIMIT: dict[str, Any] = {"color": SECOND, "linestyle": "--", "linewidth": 1.2}
_SPLITS = ({"color": SECOND, "marker": "o"}, {"color": INK, "marker": "D"}, {"color": MUTED, "marker": "s"})
_FIRST, _SECOND = {"color": FIRST, "marker": "o"}, {"color": SECOND, "marker": "s"}
_KINDS = ((FIRST, 1.0), (FIRST, 0.6), (FIRST, 0.3), (SECOND, 1.0), (SECOND, 0.5), (MUTED, 0.5))

_BITS_CAPTION = "Held-out text, whatever the tokenizer; lower is better. Grey: what other ways of coding it need."


class Chart(NamedTuple):
    """A drawn curve: its heading, one sentence on what it shows, and the SVG."""

    title: str
    caption: str
    svg: str


def charts(metrics: Sequence[Row], summary: Mapping[str, Any]) -> list[Chart]:
    """The charts for which ``metrics`` hold at least one point; ``summary`` gives limits and reference values."""
    training = [row for row in metrics if row["kind"] == "train"]
    held_out: dict[str, list[Row]] = {}
    for row in metrics:
        if row["kind"] == "evaluation":
            held_out.setdefault(row["split"], []).append(row)

    def trained(name: str, label: str | None = None) -> Curve:
        return points(training, name), {"color": FIRST, "label": label}

    def by_split(name: str) -> list[Curve]:
        looks = zip(held_out.items(), itertools.cycle(_SPLITS))
        return [(points(rows, name), {**look, "label": split}) for (split, rows), look in looks]

    accuracy, macro_f1 = (points(held_out.get("validation", []), name) for name in ("accuracy", "macro_f1"))
    scores = [(accuracy, {**_FIRST, "label": "accuracy"}), (macro_f1, {**_SECOND, "label": "macro F1"})]
    peaks = [(step, size / 2**30) for step, size in points(training, "peak_allocated_bytes")]
    memory, limit = [(peaks, {"color": FIRST, "label": "measured"})], _predicted(summary)
    norms = _gradient_norm(training, metrics, summary.get("max_grad_norm"))
    references = partial(_reference_lines, _numbers(summary.get("references")))
    draw = partial(_over_steps, max((row["step"] for row in metrics), default=0))
    losses, speed = [trained("loss", "train"), *by_split("loss")], [trained("tokens_per_second")]
    drawn = [
        draw("Loss", "Nats per target. A gap that widens between train and validation is overfitting.", losses),
        draw("Bits per byte", _BITS_CAPTION, by_split("bits_per_byte"), references),
        draw("Accuracy", "Share of the targets predicted right, held out.", scores, lambda a: a.set_ylim(0, 1.02)),
        draw("Gradient norm", "Before clipping, logarithmic.", *norms),
        draw("Noise scale", "Of the gradient, in examples.", [trained("gradient_noise_scale_examples")], from_zero),
        draw("Learning rate", "As the schedule set it.", [trained("learning_rate")], from_zero),
        draw("Tokens per second", "All devices together, padding not counted.", speed, from_zero),
        draw("Peak memory", "GiB; the most that one device had allocated at once.", memory, from_zero, limit),
    ]
    return [*filter(None, drawn), *_memory_bars(summary)]


def points(rows: Sequence[Row], name: str) -> Points:
    """(step, value) of the rows that have a value, by step; of two rows for one step the later counts."""
    found = {row["step"]: float(row[name]) for row in rows if isinstance(row.get(name), int | float)}
    return sorted(found.items())


def _gradient_norm(training: Sequence[Row], metrics: Sequence[Row], limit: float | None) -> tuple[Any, ...]:
    """Its curve, axes and limit; crosses mark the steps that were skipped because their gradient was not finite."""
    norms = [(step, value) for step, value in points(training, "grad_norm") if value > 0]
    skipped = {row["step"] for row in training if row.get("grad_norm", 0) is None}
    skipped |= {row["step"] for row in metrics if row["kind"] == "skipped"}
    line = None if limit is None else (limit, f"clipped to {limit:g}")

    def finish(axes: Axes) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        if skipped:
            label, foot = f"not finite, skipped ({len(skipped)})", axes.get_xaxis_transform()
            axes.plot(sorted(skipped), [0.05] * len(skipped), "x", transform=foot, color=WARN, label=label)
        values = [value for _, value in norms] + ([] if limit is None else [limit])
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 2, max(values) * 2)
        decades = max(values) / min(values) >= 100
        axes.yaxis.set_major_locator(LogLocator(10, (1,) if decades else (1, 2, 5), numticks=8))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())

    return [(norms, {"color": FIRST, "label": "gradient norm"})], finish, line


def _numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    return {name: value for name, value in (values or {}).items() if isinstance(value, int | float)}


def _memory_bars(summary: Mapping[str, Any]) -> list[Chart]:
    """What the peak consisted of, and the peak of each phase; nothing if that was not measured."""
    kinds, phases = _numbers(summary.get("bytes_by_kind")), _numbers(summary.get("peak_bytes_by_phase"))
    limit = _predicted(summary)
    rows = {**({"at the peak": sum(kinds.values())} if kinds else {}), **phases}
    if not rows:
        return []

    def draw(axes: Axes) -> None:
        start = 0.0
        for (name, size), (colour, alpha) in zip(kinds.items(), itertools.cycle(_KINDS)):
            if size:  # a kind keeps its colour where another is missing
                look: dict[str, Any] = {"color": colour, "alpha": alpha, "label": f"{name} {gib(size)}"}
                axes.barh(0, size / 2**30, left=start, height=0.7, **look)
                start += size / 2**30
        for place, (name, size) in enumerate(rows.items()):
            if name in phases:
                axes.barh(place, size / 2**30, height=0.45, color=FIRST, alpha=0.6)
        if limit is not None:
            axes.axvline(limit[0], label=limit[1], **_LIMIT)
        axes.set_yticks(range(len(rows)), [f"{name}, {gib(size)}" for name, size in rows.items()])
        axes.invert_yaxis()
        axes.yaxis.grid(False)
        axes.set_xlim(0, 1.04 * axes.dataLim.x1)
        axes.set_xlabel("GiB")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")

    title = "Memory by kind and phase"
    caption = "What the peak of the run consisted of, and the most that each phase of a step had allocated."
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in {**kinds, **phases}.items() if size)
    return [Chart(title, caption, svg(title, f"{title}: {sizes}.", draw, columns=2))]


def _over_steps(
    last_step: int,
    title: str,
    caption: str,
    curves: Sequence[Curve],
    finish: Callable[[Axes], object] = lambda axes: None,
    limit: tuple[float, str] | None = None,
) -> Chart | None:
    """A chart of ``curves`` with points; ``finish`` sets its y axis, ``limit`` is a dashed line's height and label."""
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return None
    steps = [step for found, _ in curves for step, _ in found]
    label = f"{title} from step {min(steps):,} to {max(steps):,}; {number(curves[0][0][-1][1])} at the end."

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.grid(False)
        for found, look in curves:
            marker = "o" if len(found) == 1 else ""  # one point makes no line
            axes.plot(*zip(*found, strict=True), **{"marker": marker, "markersize": 4.5, **look})
        if limit is not None:
            axes.axhline(limit[0], label=limit[1], **_LIMIT)
        finish(axes)
        axes.set_xlabel("step")
        axes.set_xlim(0, 1.02 * max(1, last_step))

    return Chart(title, caption, svg(title, label, draw))


def _predicted(summary: Mapping[str, Any]) -> tuple[float, str] | None:
    size = summary.get("predicted_peak_bytes")
    return (size / 2**30, f"predicted {gib(size)}") if size else None


def from_zero(axes: Axes) -> None:
    """A y axis from zero to a little above the highest value."""
    axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    zeros = re.compile(r"\.0+(?=[kMBT])|(?<=\.\d)0(?=[kMBT])")  # 5k rather than 5.00k
    axes.yaxis.set_major_formatter(lambda value, _: zeros.sub("", count(value)))


def _reference_lines(references: Mapping[str, float], axes: Axes) -> None:
    looks = zip(references.items(), itertools.cycle([(0, (4, 3)), (0, (1, 2))]))
    for (name, value), style in looks:
        axes.axhline(value, color=MUTED, linestyle=style, linewidth=1, label=f"{name} {value:.4g}")


def svg(title: str, label: str, draw: Callable[[Axes], None], columns: int = 4, size: Any = (6.2, 3.1)) -> str:
    """A chart of ``size`` inches for a page, its legend in ``columns``; ``label`` is read aloud."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return for_page(text.getvalue(), title, label)


def for_page(svg: str, title: str, label: str) -> str:
    """The ``<svg>`` element alone: as wide as its place, ids of its own, the theme's colours, a spoken label."""
    body = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :].strip(), flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", title.lower())
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var(--{variable}, {colour})")
    head, tail = body.split(">", 1)
    head = re.sub(r' (width|height|version|xmlns|xmlns:xlink)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label)}">{tail}'
