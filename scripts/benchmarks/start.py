"""What a person waits for before the first step of a run, in parts: with nothing cached, in a new run, and resumed.

    python scripts/benchmarks/start.py --write          # the quickstart, three rounds, about 5 minutes on two cores

Parts end where the run prints its lines; the whole is the run's own figure, ``first step after … s``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import harness

PARTS = {
    "device: ": "libraries",
    "data: ": "documents read",
    "tokenizer: ": "tokenizer and tokens",
    "model: ": "model",
    "memory: ": "rehearsal, prediction",
}
"""The line that ends each part, and its name; the last part is the first step itself."""
LAST = "first step"
KINDS = ("nothing cached", "new run", "resumed")


@dataclass(frozen=True)
class Options(harness.Options):
    """Measures how long a run takes to its first step."""

    rounds: int = 3
    recipe: Path = harness.ROOT / "recipes" / "quickstart.yaml"


def measured(options: Options) -> dict[str, Any]:
    """Seconds of each part, of all rounds and their medians."""
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            own, other = Path(folder, "run"), Path(folder, "other")
            environment = {**os.environ, "HF_DATASETS_CACHE": str(Path(folder, "cache"))}
            found = {
                KINDS[0]: seconds_of(options.recipe, own, 1, environment),
                KINDS[1]: seconds_of(options.recipe, other, 1, environment),
                KINDS[2]: seconds_of(options.recipe, own, 2, environment),
            }
        shown = ", ".join(f"{kind} {sum(parts.values()):.1f} s" for kind, parts in found.items())
        print(f"round {number} of {options.rounds}: {shown}", flush=True)
        rounds.append(found)
    medians = {kind: {part: median(rounds, kind, part) for part in rounds[0][kind]} for kind in KINDS}
    wholes = {kind: statistics.median(sum(found[kind].values()) for found in rounds) for kind in KINDS}
    return {"recipe": options.recipe.stem, "rounds": rounds, "seconds": medians, "whole_seconds": wholes}


def seconds_of(recipe: Path, folder: Path, steps: int, environment: dict[str, str]) -> dict[str, float]:
    """Seconds by part of a run that ends after ``steps``.

    Raises:
        SystemExit: the run failed; what it printed is shown.
    """
    command = [sys.executable, str(harness.ROOT / "train" / "main.py"), "--config", str(recipe)]
    command += ["--output_dir", str(folder), "--max_steps", str(steps), "--eval_every_steps", "None"]
    ends, lines, last, started = {}, [], 0.0, time.perf_counter()
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        for begin, part in PARTS.items():
            if line.startswith(begin) and part not in ends:
                ends[part], last = time.perf_counter() - started - last, time.perf_counter() - started
    if process.wait():
        raise SystemExit("".join(lines))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    ends[LAST] = max(0.0, summary["seconds_to_first_step"] - last)
    return ends


def median(rounds: list[dict[str, dict[str, float]]], kind: str, part: str) -> float:
    """Of one part over all rounds."""
    return statistics.median(found[kind][part] for found in rounds)


def page(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    parts = [*PARTS.values(), LAST]
    table = harness.Table(("seconds", *KINDS), "l" + "r" * len(KINDS))
    rows = [[part, *(f"{found['seconds'][kind].get(part, 0.0):.1f}" for kind in KINDS)] for part in parts]
    rows.append(["until the first step is made", *(f"{found['whole_seconds'][kind]:.1f}" for kind in KINDS)])
    place = harness.machine_line(found, f"{harness.cpu_of(found)}, no GPU")
    return "\n".join(
        [
            f"# Seconds to the first step of recipes/{found['recipe']}.yaml",
            "",
            f"{place}. Medians of {len(found['rounds'])} rounds. Nothing cached: data is read and tokenised, a "
            "tokenizer is trained. New run: another folder, cached data. Resumed: the second step of a run. Written by "
            "`scripts/benchmarks/start.py`.",
            "",
            *table.lines(rows),
            "",
        ]
    )


def main() -> int:
    harness.report(Options, __doc__, measured, page, name="start")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
