"""Are the gradients healthy, would fp16 hold them, and where should they be clipped?

    python scripts/study.py gradient_health --config recipes/quickstart.yaml --output_dir runs/health --max_steps 60

Trains with ``--gradient_health True`` and shows, layer by layer, gradient norms and activations, what fp16
would flush to zero or overflow with and without a loss scale, the distribution of gradient norms, and what each
clipping threshold would have clipped. Other flags are those of ``train/main.py``. Runs are kept, and the same command
continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building
from scripts.benchmarks.study.charts import COLOURS, drawn_svg
from scripts.benchmarks.study.curves import write
from scripts.benchmarks.study.trials import DONE, REFUSED, Trial, conducted, outcomes_of, parser_of
from train.config import read_recipe
from train.extras.gradients.problems import Problem, problems_in
from train.extras.report.charts import FIRST, MUTED, SECOND, WARN, Chart
from train.figures import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NORMS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)  # thresholds that people use
FIRST_SHARE = 0.1  # of the steps: their norms are larger, so advice leaves them out
RARE = 0.05  # of the steps: clipping that leaves all but these alone meets outliers only
FLUSHED, OVERFLOWED = -25, 16  # fp16 makes zero of what is below 2^-25, and infinity of what is 2^16 or above
USUAL_SCALE = 65536.0  # torch's first loss scale
SHOWN_LAYERS, VALUES = 5, 8  # lines of a chart, rows of a table
BARS, WIDE = 20, 20.0  # of the histogram of norms; a logarithmic axis from this ratio on


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = parser_of("gradient_health", __doc__, seeds=(1,))
    parser.add_argument("--every", type=int, default=5, metavar="N", help="steps that are measured (default: 5)")
    return conducted("Gradient health", parser, arguments, trials_of, pages)


def trials_of(own: argparse.Namespace, words: Sequence[str]) -> list[Trial]:
    """One run for each seed; the log has the norm of every step."""
    flags = ("--gradient_health=True", f"--gradient_health_every_steps={own.every}", "--log_every_steps=1")
    building.parsed_config([*words, *flags])  # what cannot run at all is an error, not a result
    return [Trial("run", seed, flags) for seed in own.seeds]


def read(folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """What the runs of ``seeds`` recorded, however they ended: rows of the first, norms of all, and the threshold."""
    runs = [run for seed in sorted(seeds) for run in folder.glob(f"run-*/seed-{seed}/run")]
    logs = [read_metrics(run / "metrics.jsonl") for run in runs]
    norms = [[row["grad_norm"] for row in log if row["kind"] == "train"] for log in logs]
    settings = read_recipe(runs[0] / "config.yaml") if runs and (runs[0] / "config.yaml").exists() else {}
    return {
        "rows": [row for row in logs[0] if row["kind"] == "health"] if logs else [],
        "norms": norms,  # of each step, by seed; null where it was not finite
        "max_grad_norm": settings.get("max_grad_norm"),
        "max_grad_value": settings.get("max_grad_value"),
    }


# ---- what the figures say --------------------------------------------------------------------------------------------


def first_seen(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, Problem]]:
    """Each problem with the step at which it is first seen."""
    found: dict[str, tuple[int, Problem]] = {}
    for number, row in enumerate(rows):
        for problem in problems_in(rows[: number + 1]):
            found.setdefault(problem.name, (row["step"], problem))
    return list(found.values())


def late(found: Mapping[str, Any]) -> list[float]:
    """The finite norms of all steps but the first ones."""
    return [norm for norms in found["norms"] for norm in norms[int(len(norms) * FIRST_SHARE) :] if norm is not None]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at most ``1 - share`` of all are above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def rounded_up(value: float) -> float:
    """The smallest number of three digits that is not below ``value``."""
    unit = 10.0 ** (2 - math.floor(math.log10(value))) if value > 0 else 1.0
    return math.ceil(value * unit - 1e-9) / unit


def share_above(values: Sequence[float], bound: float) -> float:
    """How many of ``values`` are above ``bound``."""
    return sum(value > bound for value in values) / max(1, len(values))


def elements(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The mean share of all gradient elements by exponent: of e those from 2^e to 2^(e+1)."""
    rows = [row for row in rows if row["grad_norm"] is not None]  # else infinity and NaN would count as sizes
    exponents = sorted({int(e) for row in rows for e in row["exponents"]})
    return {e: statistics.fmean(row["exponents"].get(str(e), 0.0) for row in rows) for e in exponents}


def outside(shares: Mapping[int, float], scale_exponent: int) -> tuple[float, float]:
    """Of the elements that are not zero, those that fp16 flushes and overflows at a loss scale of 2^``exponent``."""
    whole = sum(shares.values()) or 1.0
    flushed = sum(share for e, share in shares.items() if e + scale_exponent < FLUSHED)
    return flushed / whole, sum(share for e, share in shares.items() if e + scale_exponent >= OVERFLOWED) / whole


def sentences(found: dict[str, Any]) -> list[str]:
    """What the figures say."""
    rows, norms = found["rows"], late(found)
    ended = [
        f"Seed {o.seed}: {o.status}: {(o.reason or '').removesuffix('.')}."
        for o in outcomes_of(found)
        if o.status != DONE
    ]
    if not rows or not norms:
        return [*ended, "No step was measured: look at errors.txt of the run."]
    seen = [f"From step {step} on: {problem}" for step, problem in first_seen(rows)]
    said = [*ended, *(seen or [f"No problem in {len(rows)} measured steps up to step {rows[-1]['step']}."])]
    said += clipping_advice(norms, found["max_grad_norm"])
    shares = elements(rows)
    if not shares:
        return said
    without, usual = outside(shares, 0), outside(shares, 16)
    most = OVERFLOWED - 1 - max(shares)
    said.append(
        f"In fp16 without a loss scale {percent(without[0])} of the gradient's elements would become zero and "
        f"{percent(without[1])} would overflow; with a scale of {USUAL_SCALE:,.0f} {percent(usual[0])} and "
        f"{percent(usual[1])}. The largest scale without overflow is 2^{most}."
    )
    return said


def clipping_advice(norms: Sequence[float], bound: float | None) -> list[str]:
    """What the present threshold does, and which one outliers alone would reach."""
    middle, high, highest = statistics.median(norms), quantile(norms, 1 - RARE), max(norms)
    said = [
        f"After the first steps the norm of the gradient is {middle:.3g} at the median, {high:.3g} at the 95th "
        f"percentile and {highest:.3g} at most."
    ]
    shown = rounded_up(high)
    advice = f"max_grad_norm: {shown:g} would clip {share_above(norms, shown):.1%} of these steps, the outliers."
    if bound is None:
        said.append(f"The norm is not clipped. {advice}" + (" There are some." if highest > 5 * middle else ""))
    elif (share := share_above(norms, bound)) > 0.5:
        said.append(
            f"max_grad_norm: {bound:g} clips {share:.0%} of the steps: it sets the length of nearly every step, as a "
            f"lower learning rate would. {advice}"
        )
    elif share > RARE:
        said.append(f"max_grad_norm: {bound:g} clips {share:.0%} of the steps, more than outliers. {advice}")
    elif highest > bound:
        said.append(f"max_grad_norm: {bound:g} clips {share:.1%} of the steps: outliers only, as it should.")
    else:
        said.append(f"max_grad_norm: {bound:g} clips none of these steps: it only guards against outliers.")
    return said


# ---- tables and charts -----------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share with two digits."""
    return f"{100 * share:.3g} %"


def norm_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What clipping to each norm would have clipped; the first row has the titles."""
    every = [norm for norms in found["norms"] for norm in norms if norm is not None]
    norms, bound = late(found), found["max_grad_norm"]
    special: dict[float, str] = {}
    for share in (0.5, 0.95, 0.99) if norms else ():
        place = quantile(norms, share)
        special[place] = "; ".join(filter(None, (special.get(place), f"{share:.0%} are not above")))
    made = [["norm", "steps clipped", "after the first tenth", "mean length that is left", ""]]
    thresholds: list[float] = sorted({*NORMS, *special, *([bound] if bound else [])})
    for threshold in thresholds if norms else []:
        left = statistics.fmean(min(1.0, threshold / norm) if norm else 1.0 for norm in norms)
        clipped = [percent(share_above(values, threshold)) for values in (every, norms)]
        note = "; ".join(filter(None, (special.get(threshold), "present" if threshold == bound else "")))
        made.append([f"{threshold:.3g}", *clipped, f"{left:.2f}", note])
    return made


def value_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """What clipping each element to ± each power of two would have clipped."""
    shares, value = elements(found["rows"]), found["max_grad_value"]
    made, top = [["value", "elements clipped", ""]], max(shares, default=0) + 1
    for exponent in range(top - 2 * VALUES + 2, top + 1, 2) if shares else []:
        above = sum(share for e, share in shares.items() if e >= exponent)
        note = "about the present one" if value and exponent <= math.log2(value) < exponent + 2 else ""
        made.append([f"{2.0**exponent:.3g}", percent(above), note])
    return made


def layer_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """By layer, medians over the measured steps, the largest activation, and mean shares in fp16."""
    in_fp16 = ("flushed", "overflowed", "flushed_scaled", "overflowed_scaled")
    made = [["layer", "norm", "activation", *(name.replace("_", ", ") for name in in_fp16), ""]]
    for place, layer in enumerate(rows[0]["layers"] if rows else []):

        def of(name: str, place: int = place) -> list[float]:
            return [row[name][place] for row in rows if row[name][place] is not None]

        norm = f"{statistics.median(of('norms')):.2g}" if of("norms") else "–"
        activation = f"{max(of('activations')):.3g}" if of("activations") else "–"
        made.append([layer, norm, activation, *(percent(statistics.fmean(of(name))) for name in in_fp16), ""])
    return made


def pages(folder: Path, found: dict[str, Any]) -> None:
    """Writes the results; ``found`` without the runs' rows is completed from their logs in ``folder``."""
    made = [outcome.seed for outcome in outcomes_of(found) if outcome.status != REFUSED]  # else the logs are of others
    found = {**read(folder, made), **found}
    tables = {
        "Layers": layer_rows(found["rows"]),
        "What each norm would have clipped": norm_rows(found),
        "What each value would have clipped": value_rows(found),
    }
    write(folder, found, sentences(found), tables, charts(found) if found["rows"] and late(found) else [])


def charts(found: Mapping[str, Any]) -> list[Chart]:
    """Norms by layer over steps, fp16 by layer, and the distributions of elements and of norms."""
    rows, layers = found["rows"], found["rows"][0]["layers"]
    places = sorted({round(i * (len(layers) - 1) / (SHOWN_LAYERS - 1)) for i in range(SHOWN_LAYERS)})

    def over_steps(axes: Axes) -> None:
        for number, place in enumerate(places):
            points = [(row["step"], row["norms"][place]) for row in rows if row["norms"][place]]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=layers[place], linewidth=1.4)
        logarithmic(axes)
        axes.set_xlabel("step")

    def over_layers(axes: Axes) -> None:
        for row, colour in ((rows[0], MUTED), (rows[len(rows) // 2], SECOND), (rows[-1], FIRST)):
            points = [(place, norm) for place, norm in enumerate(row["norms"]) if norm]
            label = f"step {row['step']}"
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, marker="o", markersize=3, label=label
            )
        logarithmic(axes)
        axes.set_xlabel("layer, from input to output")

    def in_fp16(axes: Axes) -> None:
        for name, label, colour in (
            ("flushed", "zero without scale", FIRST),
            ("flushed_scaled", "zero with scale", SECOND),
            ("overflowed", "overflow without scale", MUTED),
            ("overflowed_scaled", "overflow with scale", WARN),
        ):
            means = [100 * statistics.fmean(row[name][place] for row in rows) for place in range(len(layers))]
            axes.plot(range(len(layers)), means, color=colour, marker="o", markersize=3, label=label)
        axes.set_ylabel("% of elements")
        axes.set_xlabel("layer, from input to output")

    def by_exponent(axes: Axes) -> None:
        shares = elements(rows)
        axes.bar(list(shares), [100 * share for share in shares.values()], color=FIRST, width=0.9, label="elements")
        axes.axvline(FLUSHED - 0.5, color=WARN, linestyle="--", linewidth=1.2, label="fp16 flushes what is left of it")
        axes.axvline(OVERFLOWED - 0.5, color=SECOND, linestyle="--", linewidth=1.2, label="and overflows right of it")
        axes.set_xlabel("exponent of 2 of the element, without loss scale")
        axes.set_ylabel("% of elements")

    def by_norm(axes: Axes) -> None:
        norms = late(found)
        low, high = max(min(norms), 1e-9), max(norms)
        is_wide = high > WIDE * low
        edges = [low * (high / low) ** (i / BARS) for i in range(BARS + 1)] if is_wide else BARS
        axes.hist(norms, bins=edges, color=FIRST, label="steps")
        axes.set_xscale("log" if is_wide else "linear")
        if found["max_grad_norm"]:
            axes.axvline(found["max_grad_norm"], color=SECOND, linestyle="--", linewidth=1.2, label="max_grad_norm")
        axes.set_xlabel("norm of the gradient before clipping")
        axes.set_ylabel("steps")

    scale = rows[-1]["loss_scale"]
    said = f"the present loss scale ({scale:g} at the end)" if scale else f"a loss scale of {USUAL_SCALE:,.0f}"
    return [
        chart("Norm by step", "Gradient norm of some layers, before clipping and without loss scale.", over_steps),
        chart("Norm by layer", "Orders of magnitude between layers: it vanishes or explodes.", over_layers),
        chart("fp16 by layer", f"Elements that fp16 would flush or overflow, without and with {said}.", in_fp16),
        chart("Elements by size", "A loss scale of 2^k moves all elements k to the right.", by_exponent),
        chart("Norms of the gradient", "Of all steps but the first tenth.", by_norm),
    ]


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("gradient norm")


def chart(title: str, caption: str, draw: Callable[[Axes], None]) -> Chart:
    """A chart of the page."""
    return Chart(title, caption, drawn_svg(title.lower().replace(" ", "-"), caption, draw))
