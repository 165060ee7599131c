"""The curves of a run as inline SVG, whose colours follow the page's light or dark theme.

Matplotlib writes fixed colours; each of those used here stands for a CSS variable of the page and is replaced by it.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from train.wording import count, gib, number, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Points = list[tuple[int, float]]

INK, MUTED, _LINE, FIRST, SECOND, WARN = "#1b1f24", "#656d76", "#d8dee4", "#0b62d6", "#c2570c", "#c21f30"
_THEME = {INK: "ink", MUTED: "muted", _LINE: "line", FIRST: "first", SECOND: "second", WARN: "warn"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.solid_joinstyle": "round",
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
_MAX_POINTS = 1200


@dataclass(frozen=True)
class Chart:
    """A drawn curve: its heading, one sentence on what it shows, and the SVG."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class _Drawing:
    """What a chart will show, before matplotlib is needed."""

    title: str
    caption: str
    series: list[Points]
    draw: Callable[[Axes], None]


def charts(metrics: Sequence[Row], summary: Mapping[str, Any]) -> list[Chart]:
    """The charts for which ``metrics`` hold at least one point; ``summary`` gives limits and reference values."""
    training = [row for row in metrics if row.get("kind") == "train"]
    evaluations: dict[str, list[Row]] = {}
    for row in metrics:
        if row.get("kind") == "evaluation":
            evaluations.setdefault(str(row.get("split", "validation")), []).append(row)
    last_step = max((row["step"] for row in metrics), default=0)
    drawings = [
        _loss(training, evaluations),
        _bits_per_byte(evaluations, summary.get("references") or {}),
        _scores(evaluations),
        _grad_norm(training, _skipped_steps(metrics), summary.get("max_grad_norm")),
        _learning_rate(training),
        _tokens_per_second(training),
        _peak_memory(training, summary.get("predicted_peak_bytes")),
    ]
    curves = [_chart(drawing, last_step) for drawing in drawings if any(drawing.series)]
    return [*curves, *_memory_bars(summary)]


def points(rows: Sequence[Row], name: str) -> Points:
    """(step, value) of the rows that have a value, by step; of two rows for one step the later counts."""
    found = {row["step"]: float(row[name]) for row in rows if isinstance(row.get(name), int | float)}
    return sorted(found.items())


def thinned(series: Points, most: int = _MAX_POINTS) -> Points:
    """At most about ``most`` points, the lowest and the highest of each stretch, so that no spike is lost."""
    if len(series) <= most:
        return series
    size = -(-2 * len(series) // most)
    kept = []
    for start in range(0, len(series), size):
        stretch = series[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def _loss(training: Sequence[Row], evaluations: Mapping[str, Sequence[Row]]) -> _Drawing:
    train_points = points(training, "loss")
    by_split = {split: points(rows, "loss") for split, rows in evaluations.items()}

    def draw(axes: Axes) -> None:
        _curve(axes, train_points, FIRST, "train")
        _split_curves(axes, by_split)

    caption = "Nats per target. A gap that widens between train and validation is overfitting."
    return _Drawing("Loss", caption, [train_points, *by_split.values()], draw)


def _bits_per_byte(evaluations: Mapping[str, Sequence[Row]], references: Mapping[str, float]) -> _Drawing:
    by_split = {split: points(rows, "bits_per_byte") for split, rows in evaluations.items()}
    references = {name: value for name, value in references.items() if isinstance(value, int | float)}

    def draw(axes: Axes) -> None:
        _split_curves(axes, by_split)
        _reference_lines(axes, references)

    caption = "Held-out text, whatever the tokenizer; lower is better."
    if references:
        caption += " Dashed: what other ways of coding the same text need."
    return _Drawing("Bits per byte", caption, list(by_split.values()), draw)


def _scores(evaluations: Mapping[str, Sequence[Row]]) -> _Drawing:
    rows = evaluations.get("validation", [])
    series = {name: points(rows, name) for name in ("accuracy", "macro_f1")}

    def draw(axes: Axes) -> None:
        for (name, values), colour, marker in zip(series.items(), (FIRST, SECOND), "os", strict=True):
            _curve(axes, values, colour, words(name), marker)
        axes.set_ylim(0, 1.02)

    return _Drawing("Accuracy", "Share of the targets predicted right, held out.", list(series.values()), draw)


def _grad_norm(training: Sequence[Row], skipped: Sequence[int], max_grad_norm: float | None) -> _Drawing:
    norms = [(step, value) for step, value in points(training, "grad_norm") if value > 0]

    def draw(axes: Axes) -> None:
        _curve(axes, norms, FIRST, "gradient norm")
        values = [value for _, value in norms]
        if max_grad_norm is not None:
            axes.axhline(
                max_grad_norm, color=SECOND, linestyle="--", linewidth=1.2, label=f"clipped to {max_grad_norm:g}"
            )
            values.append(max_grad_norm)
        if skipped:
            at_foot = [0.05] * len(skipped)
            axes.plot(
                skipped,
                at_foot,
                transform=axes.get_xaxis_transform(),
                color=WARN,
                linestyle="none",
                marker="x",
                label=f"not finite, skipped ({len(skipped)})",
            )
        _log_scale(axes, values)

    return _Drawing("Gradient norm", "Before clipping, logarithmic.", [norms], draw)


def _skipped_steps(metrics: Sequence[Row]) -> list[int]:
    """Steps whose gradient was not finite: rows of the kind "skipped", and training rows without a norm."""
    return sorted(
        {
            row["step"]
            for row in metrics
            if row.get("kind") == "skipped" or (row.get("kind") == "train" and row.get("grad_norm", 0) is None)
        }
    )


def _learning_rate(training: Sequence[Row]) -> _Drawing:
    series = points(training, "learning_rate")

    def draw(axes: Axes) -> None:
        _curve(axes, series, FIRST)
        _from_zero(axes, series)
        axes.yaxis.set_major_formatter(lambda value, _: _scientific(value))

    return _Drawing("Learning rate", "As the schedule set it.", [series], draw)


def _tokens_per_second(training: Sequence[Row]) -> _Drawing:
    series = points(training, "tokens_per_second")

    def draw(axes: Axes) -> None:
        _curve(axes, series, FIRST)
        _from_zero(axes, series)
        axes.yaxis.set_major_formatter(lambda value, _: short_count(value))

    return _Drawing("Tokens per second", "All devices together, padding not counted.", [series], draw)


def _peak_memory(training: Sequence[Row], predicted_bytes: float | None) -> _Drawing:
    series = [(step, size / 2**30) for step, size in points(training, "peak_allocated_bytes")]

    def draw(axes: Axes) -> None:
        _curve(axes, series, FIRST, "measured")
        if predicted_bytes:
            label = f"predicted {gib(predicted_bytes)}"
            axes.axhline(predicted_bytes / 2**30, color=SECOND, linestyle="--", linewidth=1.2, label=label)
        _from_zero(axes, [*series, (0, (predicted_bytes or 0) / 2**30)])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return _Drawing("Peak memory", "GiB; the most that one device had allocated at once.", [series], draw)


_KIND_LOOKS = ((FIRST, 1.0), (FIRST, 0.6), (FIRST, 0.3), (SECOND, 1.0), (SECOND, 0.5), (MUTED, 0.5))


def _memory_bars(summary: Mapping[str, Any]) -> list[Chart]:
    """What the peak consisted of, and the peak of each phase; nothing where that was not measured."""
    kinds, phases = (
        {name: size for name, size in (summary.get(key) or {}).items() if isinstance(size, int | float)}
        for key in ("bytes_by_kind", "peak_bytes_by_phase")
    )
    if not kinds and not phases:
        return []
    predicted_bytes = summary.get("predicted_peak_bytes")

    def draw(axes: Axes) -> None:
        start = 0.0
        for (name, size), (colour, alpha) in zip(kinds.items(), itertools.cycle(_KIND_LOOKS)):
            width = size / 2**30
            if size:  # a kind keeps its colour where another is missing
                axes.barh(0, width, left=start, height=0.7, color=colour, alpha=alpha, label=f"{name} {gib(size)}")
            start += width
        rows = {**({"at the peak": sum(kinds.values())} if kinds else {}), **phases}
        for row, (name, size) in enumerate(rows.items()):
            if name in phases:
                axes.barh(row, size / 2**30, height=0.45, color=FIRST, alpha=0.6)
            axes.annotate(
                gib(size),
                (1, row),
                xycoords=axes.get_yaxis_transform(),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=MUTED,
                annotation_clip=False,
            )
        if predicted_bytes:
            label = f"predicted {gib(predicted_bytes)}"
            axes.axvline(predicted_bytes / 2**30, color=SECOND, linestyle="--", linewidth=1.2, label=label)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.yaxis.grid(False)
        axes.set_xlim(0, 1.04 * max(*rows.values(), predicted_bytes or 0) / 2**30)
        axes.set_xlabel("GiB")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")

    title = "Memory by kind and phase"
    caption = "What the peak of the run consisted of, and the most that each phase of a step had allocated."
    said = ", ".join(f"{name} {gib(size)}" for name, size in {**kinds, **phases}.items() if size)
    return [Chart(title, caption, _svg(title, f"{title}: {said}.", draw, legend_columns=2))]


def _chart(drawing: _Drawing, last_step: int) -> Chart:
    steps = [step for series in drawing.series for step, _ in series]
    end = next(series[-1][1] for series in drawing.series if series)
    label = f"{drawing.title} from step {min(steps):,} to {max(steps):,}; {number(end)} at the end."

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.grid(False)
        drawing.draw(axes)
        axes.set_xlabel("step")
        axes.set_xlim(0, 1.02 * max(1, last_step))

    return Chart(drawing.title, drawing.caption, _svg(drawing.title, label, draw))


def _curve(axes: Axes, series: Points, colour: str, label: str | None = None, marker: str = "") -> None:
    if series:
        steps, values = zip(*thinned(series), strict=True)
        alone = "o" if len(series) == 1 else ""
        axes.plot(steps, values, color=colour, label=label, marker=marker or alone, markersize=4.5)


def _from_zero(axes: Axes, series: Points) -> None:
    axes.set_ylim(0, 1.08 * max(value for _, value in series) or 1)


def _split_curves(axes: Axes, by_split: Mapping[str, Points]) -> None:
    looks = [(SECOND, "o"), (INK, "D"), (MUTED, "s")]
    for index, (split, series) in enumerate(by_split.items()):
        colour, marker = looks[index % len(looks)]
        _curve(axes, series, colour, split, marker)


def _reference_lines(axes: Axes, references: Mapping[str, float]) -> None:
    """Dashed lines with their names to the right of the plot, moved apart where they would touch."""
    for value in references.values():
        axes.axhline(value, color=MUTED, linestyle=(0, (4, 3)), linewidth=1)
    low, high = axes.get_ylim()
    below = float("-inf")
    for name, value in sorted(references.items(), key=lambda item: item[1]):
        text = textwrap.fill(f"{name} {value:.4g}", 18)
        height = (0.02 + 0.07 * (text.count("\n") + 1)) * (high - low)
        below = max(value, below + height)
        axes.annotate(
            text,
            (1, below),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=MUTED,
            fontsize=9,
            annotation_clip=False,
        )


def _log_scale(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.set_ylim(min(values) / 2, max(values) * 2)
    decades = max(values) / min(values) >= 100
    axes.yaxis.set_major_locator(LogLocator(10, (1,) if decades else (1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def short_count(value: float) -> str:
    """5k rather than 5.00k."""
    text = count(value)
    return re.sub(r"\.?0+(?=[kMBT])", "", text) if "." in text else text


def _scientific(value: float) -> str:
    """3e-4 rather than 0.0003 or 3e-04."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _svg(title: str, label: str, draw: Callable[[Axes], None], legend_columns: int = 4) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.2, 3.1), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=legend_columns, frameon=False, borderaxespad=0.2)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return for_page(text.getvalue(), title, label)


def for_page(svg: str, title: str, label: str) -> str:
    """The ``<svg>`` element alone: as wide as its place, ids of its own, the theme's colours, a spoken label."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", title.lower())
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var(--{variable}, {colour})")
    head, tail = body.split(">", 1)
    head = re.sub(r' (width|height|version|xmlns|xmlns:xlink)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label)}">{tail}'
