"""What does each technique bring, alone and together? Real runs of a recipe, with and without each, over several seeds.

    python scripts/study.py ablation --config recipes/quickstart.yaml --output_dir runs/ablation --seeds 1 2 3 \\
        --toggle checkpointing:gradient_checkpointing=full --toggle loss:loss=chunked

A toggle is a name and the flags it sets, joined by commas: NAME:FLAG=VALUE[,FLAG=VALUE]. Other flags of train/main.py
override the recipe in every run. Differences are taken seed by seed; one whose 95 % interval includes zero is said to
be none. Runs are kept as they come, and the same command continues where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks import building
from scripts.benchmarks.study.curves import variants_chart, write
from scripts.benchmarks.study.trials import (
    DONE,
    EVALUATIONS,
    Interval,
    Trial,
    conducted,
    interval,
    outcomes_of,
    paired,
    parser_of,
    reached,
)
from train.config import parse
from train.extras.selection import SMALLER_IS_BETTER
from train.figures import count, duration, gib, several
from train.records import UsageError

BASELINE = "baseline"


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = parser_of("ablation", __doc__, "--toggle NAME:FLAG=VALUE ... ")
    parser.add_argument("--toggle", action="append", required=True, metavar="NAME:FLAG=VALUE[,FLAG=VALUE]")
    designs = "each alone and all together (default); all together and each left out; all combinations"
    parser.add_argument("--design", choices=("each", "left_out", "all"), default="each", help=designs)
    parser.add_argument("--target_loss", type=float, metavar="LOSS", help="also: time of training until that loss")
    return conducted("Ablation", parser, arguments, trials_of, pages)


def trials_of(own: argparse.Namespace, words: Sequence[str]) -> list[Trial]:
    """Every variant with every seed; all variants with the first seed come first."""
    toggles = dict(map(toggle_of, own.toggle))
    if len(toggles) < len(own.toggle):
        raise UsageError("--toggle: two toggles have the same name.")
    config = parse(list(words))
    for name, flags_of_it in toggles.items():
        try:
            building.parsed_config([*words, *flags_of_it])
        except UsageError as error:  # flags that do not go together are a result; a misspelt flag is an error
            if re.match("unknown |.* is not valid: ", str(error)):
                raise UsageError(f"--toggle {name}: {error}") from None
    common: tuple[str, ...] = ()
    steps, every = config.optimization.max_steps, config.output.eval_every_steps
    asked = any(word.startswith("--eval_every_steps") for word in words)
    if own.target_loss is not None and steps and not asked and steps < EVALUATIONS * (every or steps):
        common = (f"--eval_every_steps={max(1, steps // EVALUATIONS)}",)  # else the loss is seen at the end alone
    variants = variants_of(list(toggles), own.design).items()
    flags = {name: (*common, *(flag for part in parts for flag in toggles[part])) for name, parts in variants}
    return [Trial(name, seed, flags[name]) for seed in own.seeds for name in flags]


def pages(folder: Path, found: dict[str, Any]) -> None:
    """Writes the results."""
    done = [outcome for outcome in outcomes_of(found) if outcome.status == DONE]
    charts = [variants_chart(done, done[0].metric_name)] if done else []
    write(folder, found, sentences(found), rows(found), charts)


def toggle_of(text: str) -> tuple[str, list[str]]:
    """Name and flags of a toggle.

    Raises:
        UsageError: it is not written NAME:FLAG=VALUE[,FLAG=VALUE].
    """
    name, colon, rest = text.partition(":")
    flags = [part.strip() for part in rest.split(",")]
    if not (name and colon) or not all(flag and equals for flag, equals, _ in (part.partition("=") for part in flags)):
        raise UsageError(f"--toggle {text!r}: write NAME:FLAG=VALUE[,FLAG=VALUE], as loss:loss=chunked.")
    return name, [f"--{flag.lstrip('-')}" for flag in flags]


def variants_of(names: Sequence[str], design: str) -> dict[str, tuple[str, ...]]:
    """The toggles of each variant that ``design`` asks for, by the variant's name; the baseline has none."""
    whole = tuple(names)
    if design == "all":
        sets = [parts for size in range(len(whole) + 1) for parts in itertools.combinations(whole, size)]
    elif design == "each":
        sets = [(), *((name,) for name in whole), whole]
    else:
        sets = [(), whole, *(tuple(n for n in whole if n != name) for name in whole)]
    return {" + ".join(parts) or BASELINE: parts for parts in dict.fromkeys(sets)}


def sentences(found: dict[str, Any]) -> list[str]:
    """What the figures say."""
    outcomes = outcomes_of(found)
    done = [outcome for outcome in outcomes if outcome.status == DONE]
    said = list[str]()
    if not any(outcome.variant == BASELINE for outcome in done):
        said.append(f"The {BASELINE} did not train to the end with any seed, so no variant is compared with it.")
    for variant in dict.fromkeys(o.variant for o in outcomes if o.variant != BASELINE):
        own, base = ({o.seed: o for o in done if o.variant == name} for name in (variant, BASELINE))
        seeds = sorted(own.keys() & base.keys())
        if not seeds:
            continue
        tried = len({outcome.seed for outcome in outcomes if outcome.variant == variant})
        some = f" Only {len(seeds)} of {tried} seeds trained to the end with both." if len(seeds) < tried else ""
        memory = statistics.median((own[s].peak_bytes or 0) / (base[s].peak_bytes or 1) for s in seeds)
        speeds = [(own[s].tokens_per_second or 0) / (base[s].tokens_per_second or 1) for s in seeds]
        spread = f" ({min(speeds):.2f} to {max(speeds):.2f} by seed)" if len(seeds) > 1 else ""
        name, direction = done[0].metric_name, done[0].greater_is_better
        both = paired(done, variant, BASELINE, name)
        difference = difference_text(interval(both), name, direction) if both else "not known of both with any seed"
        said.append(
            f"{variant}: {memory:.2f} × the memory and {statistics.median(speeds):.2f} × the tokens per second{spread} "
            f"of the {BASELINE}; "
            f"{name.replace('_', ' ')}: {difference}.{some}"
        )
    seeds = len({outcome.seed for outcome in outcomes})
    few = " A few seeds on one model say little: small differences stay hidden." if seeds < 10 else ""
    return [
        *said,
        f"Metrics are compared seed by seed over {several(seeds, 'seed')}. A difference counts as shown if its "
        f"95 % interval (Student's t) leaves zero out: of twenty variants that change nothing, one does.{few}",
    ]


def difference_text(difference: Interval, name: str, greater_is_better: bool | None = None) -> str:
    """A difference in words: better or worse where it is shown, none where it is not.

    ``greater_is_better`` is None where the metric's name tells it.
    """
    if difference.count < 2:
        return f"{difference.mean:+.4g}, of which one seed cannot tell the cause"
    if difference.low == difference.high == 0:
        return "equal with every seed"
    span = f"95 % interval {difference.low:+.3g} to {difference.high:+.3g}"
    if not difference.is_shown:
        return f"no difference shown ({span})"
    falls = any(part in name for part in SMALLER_IS_BETTER) if greater_is_better is None else not greater_is_better
    is_better = (difference.mean < 0) == falls
    return f"{'better' if is_better else 'worse'} by {abs(difference.mean):.3g} ({span})"


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row a variant, and before them the titles."""
    outcomes, target = outcomes_of(found), found["flags"]["target_loss"]
    name = next((outcome.metric_name for outcome in outcomes if outcome.status == DONE), "metric")
    metric, until = name.replace("_", " "), f"until loss {target}"
    made = [["variant", "runs", metric, "difference", "loss", "peak", "tokens/s", until if target else "", ""]]
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.variant == variant]
        done = [outcome for outcome in own if outcome.status == DONE]
        others = dict.fromkeys(f"{o.status}: {o.reason}" for o in own if o.status != DONE)
        note = "; ".join(others) if others else ""
        if not done:
            made.append([variant, *[""] * 7, note])
            continue
        difference = paired(outcomes, variant, BASELINE, name)
        values = [o.metrics[name] for o in done if name in o.metrics]
        value = interval(values) if values else None
        half = f" ± {value.high - value.mean:.2g}" if value and value.count > 1 else ""
        mean = f"{value.mean:.4g}{half}" if value else ""  # another task, or not a number
        against = "" if variant == BASELINE or not difference else _short(interval(difference))
        seen = [outcome for outcome in done if len(outcome.evaluations) > 1]
        times = [reached(outcome, target) for outcome in seen] if target is not None else []
        known = [time for time in times if time is not None]
        until = f"{duration(statistics.median(time[1] for time in known))}" if known else ""
        if len(known) < len(times):
            until = f"{until} ({len(times) - len(known)} of {len(times)} not reached)".strip()
        if target is not None and not seen:
            until = "evaluated at the end alone"
        loss = interval([outcome.loss or 0.0 for outcome in done]).mean
        peak, speed = ([getattr(o, key) or 0 for o in done] for key in ("peak_bytes", "tokens_per_second"))
        middle = gib(statistics.median(peak)), count(statistics.median(speed))
        made.append([variant, str(len(done)), mean, against, f"{loss:.4g}", *middle, until, note])
    return made


def _short(difference: Interval) -> str:
    return f"{difference.mean:+.3g}" if difference.is_shown else "none shown"
