"""Whether the 2 % of a card that a plan leaves free suffice after steps of other lengths, which leave holes.

    python scripts/benchmarks/step_orders.py --write     # about 8 minutes on two cores; no card

A plan says what a step needs after the optimizer's state was made in empty memory. In a run other steps came before,
and the allocator's free blocks lie where they left them. Here the traces of predicted steps are replayed one after the
other on the model of the allocator (``train/memory/allocator.py``): a first step, in whose update the state is made,
others of random lengths, and last the longest that a plan says fits. The least memory with which all of them work is
compared with the planned one, as a share of the card.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness, rungs
from train.memory.devices import find_device

if TYPE_CHECKING:
    from train.memory.predict import Job

Trace = list[tuple[int, int]]
"""(key of an allocation, ± bytes), see ``train.memory.allocator.replay``."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the longest length."""
SHORT = 1024


@dataclass(frozen=True)
class Options(harness.Options):
    """Replays steps in other orders than a plan."""

    device: str = "h200"
    cap_gib: float = 24
    """Of the smaller card that this one is held to."""
    models: tuple[str, ...] = ("0.5b", "1b")
    rungs: int = 4
    """The first of the ladder, so many."""
    orders: int = 10
    """Random ones of each rung."""
    steps: int = 5
    """Before the longest."""
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """The trace of one predicted step, in parts; keys of what lasts are the same in all."""

    weights: Trace
    state: Trace
    before_update: Trace
    update: Trace


def traced(job: Job) -> dict[str, Any]:
    """What the predicted step of ``job`` allocates and frees, and where in the trace its phases begin."""
    from train.memory import trial

    made: list[Any] = []

    class Recording(trial.FakeTracker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.marks: list[tuple[str, int]] = []
            made.append(self)

        def mark(self, phase: str) -> None:
            self.marks.append((phase, len(self.trace)))
            super().mark(phase)

    with patch.object(trial, "FakeTracker", Recording):
        prediction = trial.predict(job)
    least, peak = prediction.least_reserved_bytes, prediction.peak_bytes
    return {"trace": made[0].trace, "marks": made[0].marks, "least_bytes": least, "peak_bytes": peak}


def step_of(found: dict[str, Any]) -> Step:
    """The parts of :func:`traced`."""
    trace: Trace = [(key, num_bytes) for key, num_bytes in found["trace"]]
    [made, *_, updated] = [place for phase, place in found["marks"] if phase == "optimizer"]
    ends = dict(found["marks"])
    idle = ends["idle"]
    live: dict[int, int] = {}
    for key, num_bytes in trace[:idle]:
        if num_bytes < 0:
            live.pop(key, None)
        else:
            live[key] = num_bytes
    weights = [key for key, _ in trace[:made]]
    state = [key for key in live if key not in set(weights)]
    # A storage has a number of its own in each prediction: what lasts is named by its place.
    names = {key: f"lasts {number}" for number, key in enumerate([*weights, *state])}

    def named(part: Trace) -> Any:
        return [(names.get(key, key), num_bytes) for key, num_bytes in part]

    kept = [(key, live[key]) for key in state]
    after = ends["evaluation"]
    return Step(named(trace[:made]), named(kept), named(trace[idle:updated]), named(trace[updated:after]))


def in_order(steps: Sequence[Step]) -> Trace:
    """The steps one after the other; the first makes the optimizer's state in its update."""
    first, *others = steps
    begun = first.weights + first.before_update + first.state + first.update
    return begun + [entry for step in others for entry in (*step.before_update, *step.update)]


def least_bytes(trace: Trace, peak_bytes: int) -> int:
    """The least memory with which the allocator gets through ``trace``."""
    from train.memory.allocator import least_reserved_bytes, replay

    return least_reserved_bytes(trace, peak_bytes - 1, replay(trace, True).reserved_bytes)


def measured_rung(options: Options, rung: rungs.Rung, length: int) -> dict[str, Any]:
    """How much more than planned the step of ``length`` tokens needs in random orders."""
    from train.memory.question import target_of

    card = building.held_to(find_device(options.device), options.cap_gib)
    lengths = sorted({SHORT, *(rungs.multiple(share * length) for share in SHARES)})
    steps: dict[int, Step] = {}
    planned: dict[str, Any] = {}
    for each in lengths:  # the longest last
        question = rungs.question_of(rung, card, each)
        job = replace(question.job(question.asked), target=target_of(card))
        planned = harness.apart([__file__, "--trace"], asdict(job), 300)
        if planned["outcome"] != "ok":
            raise SystemExit(f"{rung.key} of {each:,} tokens is not predicted: {planned.get('message', 'no time')}")
        steps[each] = step_of(planned)
    random, found = Random(options.seed), []
    for _ in range(options.orders):
        order = [*random.choices(lengths, k=options.steps), lengths[-1]]
        needed = least_bytes(in_order([steps[each] for each in order]), planned["peak_bytes"])
        found.append({"order": order, "least_bytes": needed})
    more = [100 * (each["least_bytes"] - planned["least_bytes"]) / card.total_bytes for each in found]
    return {
        "model": rung.model,
        "rung": rung.name,
        "length": lengths[-1],
        "planned_bytes": planned["least_bytes"],
        "room_bytes": card.total_bytes - card.context_bytes,
        "orders": found,
        "median_more_percent": statistics.median(more),
        "most_more_percent": max(more),
    }


def measured(options: Options) -> dict[str, Any]:
    """A row for each rung, at the longest length of the committed plan."""
    card = building.held_to(find_device(options.device), options.cap_gib)
    path = options.output_dir / f"ladder-predicted-{harness.slug(card.name)}.json"
    path = path if path.exists() else harness.RESULTS / path.name
    ladder = json.loads(path.read_text(encoding="utf-8"))["rows"]
    longest = {(row["model"], row["rung"]): row["length"] for row in ladder if row.get("length")}
    rows = []
    for rung in (rung for model in options.models for rung in rungs.rungs_of(model)[: options.rungs]):
        rows.append(measured_rung(options, rung, longest[rung.model, rung.name]))
        print(TABLE.row(cells(rows[-1])), flush=True)
    return {"device": card.name, "steps": options.steps, "rows": rows}


TABLE = harness.Table(
    ("model", "rung, with those above it", "tokens", "orders", "needs more, median", "most", "fit, of the orders"),
    "llrrrrr",
)


def fitting(row: dict[str, Any]) -> int:
    """In how many orders the whole card suffices."""
    return sum(each["least_bytes"] <= row["room_bytes"] for each in row["orders"])


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    more = [f"{row[name]:+.2f} %" for name in ("median_more_percent", "most_more_percent")]
    orders = len(row["orders"])
    return [rungs.NAMES[row["model"]], row["rung"], f"{row['length']:,}", f"{orders}", *more, f"{fitting(row)}"]


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows = found["rows"]
    orders, fit = sum(len(row["orders"]) for row in rows), sum(map(fitting, rows))
    lines = [
        f"# Steps in other orders: {found['device']}",
        "",
        f"Replayed on a model of PyTorch's allocator, not measured: {found['steps']} steps of random lengths, in the "
        "first of which the optimizer's state is made, then the longest that a plan says fits. Shares of the card.",
        "",
        *TABLE.lines(map(cells, rows)),
        "",
        f"- In {fit} of {orders} orders the card suffices; at most {max(row['most_more_percent'] for row in rows):.2f} "
        "% more is needed than planned.",
        f"- {harness.machine_line(found, '')}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Replays, or traces one step for another process."""
    building.use_expandable_segments()
    if sys.argv[1:] == ["--trace"]:
        print(json.dumps(traced(building.job_from(json.load(sys.stdin)))), flush=True)
        os._exit(0)  # torch cannot end in an orderly way where a card was made believe
    harness.report(Options, __doc__, measured, page, name="step_orders", by_device=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
