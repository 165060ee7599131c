"""The ladder: the longest sequence that trains on one card, rung by rung.

    python scripts/benchmarks/ladder.py --device rtx-4090      # predicted, on any machine
    python scripts/benchmarks/ladder.py --write                # measured, on the card of this machine; run it again
                                                               # until nothing is left (status 85: something is)
    python scripts/benchmarks/ladder.py --cap_gib 24 --write   # measured as if the card had 24 GiB
    python scripts/benchmarks/ladder.py --model 0.5b --length 131072 --write  # each rung at one length

Each rung adds one technique to those before it. A predicted ladder in docs/results/ for a card of this size, else the
planner, says what should fit; on a card real steps (forward, backward, update), each in a process of its own, then try
that length and one 5 % longer, and further ones until one trained and the next ran out of memory.
With --write the results file keeps what was tried, and a later call continues from there. Without a card the ladder is
predicted, and labelled so.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness, ladder_search
from scripts.benchmarks.rungs import (
    MODELS,
    NAMES,
    Rung,
    committed_lengths,
    outcome_at,
    predicted_longest,
    question_of,
    rungs_of,
)
from train.memory.devices import Device, find_device, this_device
from train.memory.plan import Predictions
from train.memory.predict import Predictor
from train.records import UserError


@dataclass(frozen=True)
class Options(harness.Options):
    """Finds the longest sequence that trains, rung by rung."""

    model: Literal["0.5b", "1b", "8b", "all"] = "all"
    rungs: tuple[str, ...] = ()
    """Only those with these names; default: all."""
    device: str | None = None
    """A card to predict for, by name or size, such as rtx-4090 or 24GiB; default: measure on this machine's card; h200
    without one."""
    cap_gib: float | None = None
    """Hold the card to the memory of a smaller one, the driver's part included."""
    full_card: bool = False
    """Predict also what a full card trains, of which nothing is left free."""
    length: int | None = None
    """Search nothing: one step of each rung at this length."""
    budget_seconds: int = 420
    """No measurement begins that would end after this; with --write the same command continues later."""
    step_seconds: int = 200
    """A step that is predicted to take longer is not measured."""
    speed: bool = True
    """Also tokens per second and MFU at 4K and 32K tokens."""
    search: bool = True
    """Search for the longest sequences; --no_search: only speeds."""

    @property
    def models(self) -> list[str]:
        return list(MODELS) if self.model == "all" else [self.model]

    def takes(self, rung: Rung) -> bool:
        """Whether ``rung`` is asked for."""
        return not self.rungs or rung.name in self.rungs


def predicted_row(rung: Rung, device: Device, predictions: Predictions, near: int, full_card: bool) -> dict[str, Any]:
    """The predicted figures of one rung."""
    longest = predicted_longest(rung, device, predictions, near)
    row: dict[str, Any] = {"model": rung.model, "rung": rung.name, "settings": rung.settings, "length": longest}
    if full_card:
        row["full_length"] = predicted_longest(rung, device, predictions, longest or near, on_full_card=True)
    outcome = outcome_at(rung, device, longest or 1024, predictions)
    row |= {
        "needed_bytes": outcome.needed_bytes,
        "peak_bytes": outcome.prediction.peak_bytes,
        "host_bytes": outcome.host_bytes,
        "bytes_by_kind": outcome.prediction.bytes_by_kind,
    }
    if longest:
        row["tokens_per_second"] = 1 / outcome.seconds_per_token
    return row


def predicted_ladder(options: Options, device: Device) -> list[dict[str, Any]]:
    """A row for each rung, printed as it comes."""
    rows, committed = [], committed_lengths(device)
    for model in options.models:
        with Predictor() as predictor:
            predictions, near = Predictions(predictor), 8192
            ladder = rungs_of(model, with_qlora=device.total_bytes < ladder_search.SMALL_CARD_BYTES)
            for rung in (rung for rung in ladder if options.takes(rung)):
                near = committed.get((model, rung.name)) or near
                try:
                    rows.append(predicted_row(rung, device, predictions, near, options.full_card))
                    near = rows[-1]["length"] or near
                except UserError as error:
                    rows.append({"model": model, "rung": rung.name, "settings": rung.settings, "error": str(error)})
                print(TABLE.row(cells(rows[-1])), flush=True)
    return rows


TABLE = harness.Table(
    ("model", "rung, with those above it", "longest, tokens", "full card", "host memory, GiB", "tokens/s, estimated"),
    "llrrrr",
)
WITHOUT_FULL = harness.Table([*TABLE.titles[:3], *TABLE.titles[4:]], "llrrr")


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the predicted ladder."""
    name = [NAMES[row["model"]], row["rung"]]
    if "error" in row:
        return [*name, row["error"], "", "", ""]
    longest = f"{row['length']:,}" if row["length"] else f"none: {row['needed_bytes'] / harness.GIB:,.1f} GiB at 1,024"
    host = f"{row['host_bytes'] / harness.GIB:,.0f}" if row["host_bytes"] else ""
    full = f"{row['full_length']:,}" if row.get("full_length") else ""
    return [*name, longest, full, host, f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else ""]


def page(found: dict[str, Any]) -> str:
    """The ladder in Markdown, measured or predicted."""
    if "tries" in found:
        lines = [f"# The ladder, measured on {found['device']}", "", *ladder_search.tables(found["tries"]), ""]
        return "\n".join([*lines, f"{harness.machine_line(found, harness.cpu_of(found))}.", ""])
    device = find_device(found["device"])
    if "cap_gib" in found:
        device = building.held_to(device, found["cap_gib"])
    room = question_of(rungs_of("1b")[0], device, 1024).room_bytes
    has_full = any("full_length" in row for row in found["rows"])
    rows = [row if has_full else row[:3] + row[4:] for row in map(cells, found["rows"])]
    full = "A full card is one of which nothing is left free. " if has_full else ""
    lines = [
        f"# The ladder, predicted for {device.name}",
        "",
        f"Predicted, not measured: {device.total_bytes / harness.GIB:.1f} GiB of which {room / harness.GIB:.1f} may be "
        f"taken; one sequence, bf16 arithmetic. The longest is found to 1 %. {full}Speeds are a roofline's estimate of "
        "forward and backward.",
        "",
        *(TABLE if has_full else WITHOUT_FULL).lines(rows),
        "",
        f"{harness.machine_line(found, '')}.",
        "",
    ]
    return "\n".join(lines)


def measured(options: Options, device: Device) -> int:
    """Measures on this machine's card and prints the page; with --write it continues what an earlier call tried."""
    about: dict[str, Any] = {**harness.about(), "device": device.name}
    name = f"ladder-{harness.slug(device.name)}"
    path = options.output_dir / f"{name}.json" if options.write else None
    results = ladder_search.Results(path, about["versions"])
    search = ladder_search.Search(device, results, about, options.budget_seconds, options.step_seconds, options.takes)
    if options.length is not None:
        finished = search.at(options.models, options.length)
    else:
        finished = not options.search or search.longest(options.models)
        finished = finished and (not options.speed or search.speeds(options.models))
    harness.finish(options, {**about, "tries": results.tries}, page, name)
    return harness.told(finished)


def main() -> int:
    """Predicts or measures."""
    building.use_expandable_segments()
    options = harness.read_options(Options, __doc__)
    if harness.page_again(options, page) is not None:
        return 0
    import torch

    on_card = options.device is None and torch.cuda.is_available()
    if options.device is None and not on_card:
        print("No CUDA device here: the ladder is predicted, for an H200. --device names another card.", flush=True)
    found: dict[str, Any] = harness.about()
    try:
        ladder_search.check_names(options.rungs)
        device = this_device() if on_card else find_device(options.device or "h200")
        found["device"] = device.name
        if options.cap_gib is not None:
            device = building.held_to(device, options.cap_gib)
            os.environ[building.CAP] = str(options.cap_gib)  # read by the processes that measure
            found |= {"cap_gib": options.cap_gib, "total_bytes": device.total_bytes}
        if on_card:
            return measured(options, device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print("\n".join(TABLE.head()), flush=True)
    found["rows"] = predicted_ladder(options, device)
    harness.finish(options, found, page, f"ladder-predicted-{harness.slug(device.name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
