"""Which global batch? The same number of examples in batches of several sizes, the learning rate left, √ and linear.

    python scripts/study.py batch_size --config recipes/quickstart.yaml --output_dir runs/batches --sizes 1 2 4 8 16 \\
        --max_steps 224

The recipe's own global batch and learning rate are the reference. A batch twice as large makes half the steps; warm-up
keeps its share of them. --micro_batch_sizes shows the largest batch as different micro-batch × accumulation: one curve,
and another peak. --noise_from 4 --target_loss 2 predicts the steps of every batch from the gradient noise scale of the
runs in batches of 4. Runs are kept, and the same command continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building
from scripts.benchmarks.study import noise
from scripts.benchmarks.study.charts import COLOURS, drawn_svg
from scripts.benchmarks.study.curves import write
from scripts.benchmarks.study.trials import (
    DONE,
    EVALUATIONS,
    Outcome,
    Trial,
    conducted,
    interval,
    outcomes_of,
    parser_of,
    reached,
)
from train.extras.report.charts import Chart
from train.figures import count, duration, gib
from train.records import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from train.config import Config

SCALINGS = {"none": "unscaled", "sqrt": "√", "linear": "linear"}  # of the learning rate
EXPONENTS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of the batch, by which the rate is multiplied
CLOSE_EVALUATIONS = 40  # where steps until a loss are compared


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = parser_of("batch_size", __doc__)
    parser.add_argument("--sizes", nargs="+", type=int, required=True, metavar="N", help="global batches, in examples")
    parser.add_argument("--scalings", nargs="+", choices=SCALINGS, default=list(SCALINGS), help="(default: all three)")
    parser.add_argument(
        "--micro_batch_sizes", nargs="*", type=int, default=[], metavar="N", help="of the largest batch"
    )
    parser.add_argument("--target_loss", type=float, metavar="LOSS", help="also: steps, tokens and time until it")
    parser.add_argument("--noise_from", type=int, metavar="N", help="predict the steps until it from this batch")
    return conducted("Batch size", parser, arguments, trials_of, pages)


def trials_of(own: argparse.Namespace, words: Sequence[str]) -> list[Trial]:
    """Every size, scaling and seed; the reference batch needs no scaling.

    Raises:
        UsageError: the recipe counts epochs, a size does not divide its examples, or nothing can be predicted.
    """
    if own.noise_from is not None and (own.noise_from not in own.sizes or own.noise_from < 2 or not own.target_loss):
        raise UsageError(f"--noise_from: {own.noise_from} needs --target_loss, and is one of --sizes, at least 2.")
    config = building.parsed_config(words)
    reference, steps = building.global_batch_of(config), config.optimization.max_steps
    if steps is None:
        raise UsageError("batch_size: give --max_steps, the steps of the recipe's own batch.")
    cells: dict[str, tuple[str, ...]] = {}
    for size in own.sizes:
        for scaling in own.scalings:
            if size != reference or scaling == own.scalings[0]:
                name = str(size) if size == reference or len(own.scalings) == 1 else f"{size}, {SCALINGS[scaling]}"
                cells[name] = flags_of(config, size, reference * steps, scaling, own.noise_from)
    largest = max(own.sizes)
    for micro in own.micro_batch_sizes:
        flags = flags_of(config, largest, reference * steps, own.scalings[0])
        cells[f"{largest}, {SCALINGS[own.scalings[0]]}, micro-batch {micro}"] = (*flags, f"--micro_batch_size={micro}")
    return [Trial(name, seed, flags) for seed in own.seeds for name, flags in cells.items()]


def flags_of(config: Config, size: int, examples: int, scaling: str, noise_from: int | None = None) -> tuple[str, ...]:
    """What a run of ``examples`` in batches of ``size`` sets; that of ``noise_from`` has micro-batches of a quarter."""
    optim = config.optimization
    if size < 1 or examples % size:
        raise UsageError(f"--sizes: {size} does not divide the {examples:,} examples of a run.")
    steps, own = examples // size, building.global_batch_of(config)
    warmup = [f"--warmup_steps={optim.warmup_steps * own // size}"] if optim.warmup_steps is not None else []
    times = (size / own) ** EXPONENTS[scaling]
    micro = min(size, optim.micro_batch_size) if optim.micro_batch_size != "auto" else 1
    micro = min(micro, max(1, size // 4)) if size == noise_from else micro
    evaluations = EVALUATIONS if noise_from is None else CLOSE_EVALUATIONS
    return (
        *warmup,  # a ratio stays one
        *(["--gradient_noise_scale"] if size == noise_from else []),
        f"--global_batch_size={size}",
        f"--micro_batch_size={micro}",
        f"--max_steps={steps}",
        f"--learning_rate={optim.learning_rate * times}",
        f"--eval_every_steps={max(1, steps // evaluations)}",
        f"--log_every_steps={max(1, steps // max(evaluations, 3 * EVALUATIONS))}",
    )


def by_variant(found: dict[str, Any]) -> dict[str, list[Outcome]]:
    """All outcomes of each variant."""
    outcomes = outcomes_of(found)
    return {name: [o for o in outcomes if o.variant == name] for name in dict.fromkeys(o.variant for o in outcomes)}


def predicted(found: dict[str, Any]) -> tuple[noise.Law, list[noise.Prediction]] | None:
    """Steps until the target by the gradient noise scale, if that was asked for and is known."""
    target, size = found["flags"]["target_loss"], found["flags"].get("noise_from")
    rates: dict[int, dict[str, list[Outcome]]] = {}
    for name, outcomes in by_variant(found).items():
        if "micro-batch" not in name:
            rates.setdefault(int(name.partition(",")[0]), {})[name] = outcomes
    laws = [noise.mean_law(outcomes, size, target) for outcomes in rates.get(size, {}).values()]
    # Of several learning rates the fastest, as in what the law is compared with.
    law = min(filter(None, laws), key=lambda law: law.steps(size), default=None)
    return (law, noise.predictions(law, rates, target)) if law else None


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row a variant, and before them the titles."""
    target, law = found["flags"]["target_loss"], predicted(found)
    steps_of = {p.variant: p for p in law[1]} if law else {}
    by_noise = [f"predicted steps until {target}", "measured", "error"] if law else [""] * 3
    until = [f"{what} until {target}" if target is not None else "" for what in ("steps", "tokens", "time")]
    made = [["global batch", "steps", "loss at the end", "peak", "tokens/s", *until, *by_noise, ""]]
    for name, outcomes in by_variant(found).items():
        done = [outcome for outcome in outcomes if outcome.status == DONE]
        note = "; ".join(dict.fromkeys(f"{o.status}: {o.reason}" for o in outcomes if o.status != DONE))
        if not done:
            made.append([name, *[""] * 10, note])
            continue
        loss, steps = interval([outcome.loss or 0.0 for outcome in done]), int(done[0].evaluations[-1][0])
        half = f" ± {loss.high - loss.mean:.2g}" if loss.count > 1 else ""
        peak, speed = (
            statistics.median(getattr(o, key) or 0 for o in done) for key in ("peak_bytes", "tokens_per_second")
        )
        times = [reached(outcome, target) for outcome in done] if target is not None else []
        texts = ["", "", ""]
        if times and None not in times:
            medians = [statistics.median(time[i] for time in times if time is not None) for i in (0, 1)]
            texts = [f"{steps * medians[0] / done[0].evaluations[-1][1]:.0f}", count(medians[0]), duration(medians[1])]
        elif times:
            texts = ["not reached"] * 3
        texts += noise.texts(steps_of.get(name))
        made.append([name, str(steps), f"{loss.mean:.4g}{half}", gib(peak), count(speed), *texts, note])
    return made


def sentences(found: dict[str, Any]) -> list[str]:
    """What the figures say."""
    every = by_variant(found)
    done = {name: own for name, own in every.items() if all(outcome.status == DONE for outcome in own)}
    losses = {name: statistics.fmean(o.loss or 0.0 for o in own) for name, own in done.items()}
    if not losses:
        return ["No batch trained to the end with every seed."]
    best = min(losses, key=lambda name: losses[name])
    pairs = {name: _paired(done[name], done[best]) for name in losses if name != best}
    alike = [name for name, values in pairs.items() if len(values) > 1 and not interval(values).is_shown]
    said = [f"After the same tokens the loss is lowest with a batch of {best}: {losses[best]:.4g}."]
    said += [f"No difference is shown to {'; '.join(alike)}."] if alike else []
    said += (
        [f"Not compared, because some runs did not end: {'; '.join(cut)}."] if (cut := [*every.keys() - done]) else []
    )
    seeds = len({outcome.seed for own in done.values() for outcome in own})
    few = "One seed cannot tell small differences from chance."
    said.append(few if seeds < 2 else f"{seeds} seeds; differences are taken seed by seed, with 95 % intervals.")
    law = predicted(found)
    if law:
        said += noise.sentences(*law, found["flags"]["target_loss"])
        said.append(
            f"Batch {law[0].size} ran in smaller micro-batches: its peak and speed are not those of the others."
        )
    elif found["flags"].get("noise_from"):
        said.append("Nothing is predicted: not every run of the batch to predict from came to the target loss.")
    return said


def _paired(own: Sequence[Outcome], other: Sequence[Outcome]) -> list[float]:
    base = {outcome.seed: outcome.loss or 0.0 for outcome in other}
    return [(outcome.loss or 0.0) - base[outcome.seed] for outcome in own if outcome.seed in base]


def pages(folder: Path, found: dict[str, Any]) -> None:
    """Writes the results."""
    done = {name: [o for o in own if o.status == DONE and o.evaluations] for name, own in by_variant(found).items()}
    known = {name: own[0] for name, own in done.items() if own}

    def draw(axes: Axes) -> None:
        for number, (name, outcome) in enumerate(known.items()):
            _, tokens, _, losses = zip(*outcome.evaluations, strict=True)
            style = ("-", "--", ":")[number // len(COLOURS) % 3]
            axes.plot(tokens, losses, style, color=COLOURS[number % len(COLOURS)], label=name, linewidth=1.4)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(lambda value, _: count(value) if value > 0 else "0")

    caption = "Validation loss of the first seed over the tokens seen."
    charts = [Chart("Loss over tokens", caption, drawn_svg("tokens", caption, draw))] if known else []
    charts += [noise.chart(*law, found["flags"]["target_loss"])] if (law := predicted(found)) else []
    write(folder, found, sentences(found), rows(found), charts)
