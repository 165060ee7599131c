"""The measured ladder: real steps, each in a process of its own, between what trained and what ran out of memory."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from scripts.benchmarks import building, harness
from scripts.benchmarks.rungs import (
    NAMES,
    NOTHING,
    OPTIMIZER,
    Rung,
    committed_lengths,
    multiple,
    outcome_at,
    predicted_longest,
    question_of,
    rungs_of,
)
from train.memory.devices import Device
from train.memory.plan import Outcome, Predictions, predicted
from train.memory.predict import Job, Predictor
from train.memory.question import Question, replace_length, target_of
from train.records import UsageError, UserError

HOST_MARGIN_BYTES = 8 * 2**30
"""Of host memory, for the process itself."""
STEP = 1.05
"""The predicted longest sequence is tried, then by this factor longer ones until one does not train, or shorter ones
until one does."""
START_SECONDS = 45.0
"""Of a process that measures, before its step, at most: libraries, weights on the card, and a short first step."""
SMALL_CARD_BYTES = 48 * 2**30
SPEED_LENGTHS = (32768, 4096)
SPEED_TOKENS = 32768
"""Of a micro-batch with which speed is measured, if so many fit."""
SPEED_STEPS = 7
SCALE_STEPS = 20
"""Most steps in which fp16 may find its scale."""
TRAINER = "Trainer's default"
TIMES = ("seconds", "tokens_per_second", "mfu")
"""Figures of a measurement that depend on how long a step took."""


class Results:
    """What was tried.

    Args:
        path: of a file that keeps it from call to call; None: it is kept in memory only.
        versions: of the libraries now; raises UserError where what is kept was measured with others.
    """

    def __init__(self, path: Path | None, versions: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.tries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.tries = kept["tries"]
            changed = [name for name, version in (versions or {}).items() if kept["versions"].get(name) != version]
            if changed:
                raise UserError(
                    f"{path} has tries with another version of {', '.join(changed)}: give another --output_dir, or "
                    "delete the file to measure all again."
                )

    def of(self, kind: str, key: str) -> list[dict[str, Any]]:
        """Tries of one rung."""
        return [row for row in self.tries if row["kind"] == kind and row["key"] == key]

    def add(self, row: dict[str, Any], about: dict[str, Any]) -> None:
        """Keeps ``row``, in the file at once."""
        self.tries.append(row)
        if self.path is not None:
            harness.write_figures(self.path, {**about, "tries": self.tries})


def measure(job: Job, steps: int) -> dict[str, Any]:
    """Real steps of ``job`` in this process: median seconds and, on a card, peak bytes.

    Several follow a short one, which loads kernels. A single one is made as a run rehearses its longest step, in memory
    that no other step has cut into pieces: so it is planned.
    """
    import torch

    [batch] = building.random_micro_batches(job, 1)
    training = building.build_training(job, [batch])
    if steps == 1:
        training.make_optimizer_state()
    else:
        short = building.random_micro_batches(replace(job, length=min(job.length, 1024)), 1)
        for _ in range(SCALE_STEPS):  # until fp16 has found its scale
            training.step(short)
            if not training.was_skipped:
                break
    on_card = job.target.device_type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    norms: list[float] = []
    seconds = [harness.timed(lambda: norms.append(training.step().grad_norm)) for _ in range(steps)]
    if training.precision != "fp16" and not all(map(math.isfinite, norms)):
        raise SystemExit("a gradient was not finite: such a step is not a measurement")
    median = statistics.median_low(seconds)  # of two the second, as a rule: the first also makes buffers
    speed = training.speed(median, job.micro_batch_size * job.length, job.length)
    row: dict[str, Any] = {"seconds": median, "tokens_per_second": speed["tokens_per_second"]}
    if on_card:
        row["mfu"] = speed["mfu"]
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return row


def free_host_bytes() -> int:
    """Host memory that a new process may take."""
    import psutil  # comes with accelerate

    return psutil.virtual_memory().available


def measure_trainer(job: Job) -> dict[str, Any]:
    """Two steps of transformers' Trainer with its defaults and bf16, on the same model and length."""
    import tempfile

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    building.hold_card()
    fields = dict(job.values["model_config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **{**fields, "max_position_embeddings": job.length})
    with torch.device("cuda"):
        network = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, job.vocab_size, (2, job.length))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=1, max_steps=2, bf16=True, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(network, arguments, train_dataset=rows).train()  # type: ignore
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def tried_apart(job: Job, mode: str, timeout_seconds: float, steps: int = 1) -> dict[str, Any]:
    """:func:`measure` or :func:`measure_trainer` in a process of its own; see :func:`harness.apart` for the outcome."""
    return harness.apart([__file__, mode, str(steps)], asdict(job), timeout_seconds)


def longer(length: int) -> int:
    """The next length to try after one that trained."""
    return max(length + 64, multiple(length * STEP))


def next_length(tries: Sequence[dict[str, Any]], guess: int) -> int | None:
    """The length to try after ``tries``, first ``guess``; None: one trained and the next did not, or none is left."""
    trained = [row["length"] for row in tries if row["outcome"] == "ok"]
    too_long = [row["length"] for row in tries if row["outcome"] in ("oom", "host")]
    if trained and too_long:
        return None
    if trained:
        return longer(max(trained))
    length = multiple(min(too_long) / STEP) if too_long else guess
    return length if length >= 1024 else None


@dataclass
class Search:
    """Tries until nothing is left or time is up.

    Args:
        about: date and machine, written with the results.
        budget_seconds: no measurement begins after this.
        step_seconds: a step that is predicted to take longer is not measured.
        takes: whether a rung is tried.
    """

    device: Device
    results: Results
    about: dict[str, Any]
    budget_seconds: float = 420
    step_seconds: float = 200
    takes: Callable[[Rung], bool] = lambda rung: True

    def __post_init__(self) -> None:
        self._has_measured = False
        self._started = time.perf_counter()
        self._committed = committed_lengths(self.device)

    def longest(self, models: Sequence[str]) -> bool:
        """Finds the longest sequence of each rung; whether nothing is left to try."""
        trainers = [Rung(model, TRAINER, dict(NOTHING)) for model in models]
        rungs = [rung for first in trainers for rung in [first, *self._rungs_of(first.model)] if self.takes(rung)]
        with Predictor() as predictor:
            predictions = Predictions(predictor)
            return all(self._find_longest(rung, predictions) for rung in rungs)

    def speeds(self, models: Sequence[str]) -> bool:
        """Measures tokens per second; whether nothing is left to try."""
        cases = product(models, SPEED_LENGTHS)
        rungs = ((Rung(model, *named), length) for model, length in cases for named in speed_settings(model))
        with Predictor() as predictor:
            predictions = Predictions(predictor)
            return all(self._measure_speed(rung, length, predictions) for rung, length in rungs if self.takes(rung))

    def at(self, models: Sequence[str], length: int) -> bool:
        """Makes one step of each rung at ``length``; whether nothing is left to try."""
        with Predictor() as predictor:
            predictions = Predictions(predictor)
            rungs = [rung for model in models for rung in self._rungs_of(model) if self.takes(rung)]
            for rung in rungs[::-1]:  # the first may not fit
                if not self._is_known("at", rung, length) and not self._try("at", rung, length, predictions):
                    return False
        return True

    def _rungs_of(self, model: str) -> list[Rung]:
        """With QLoRA on a small card, if its package is there."""
        is_small = self.device.total_bytes < SMALL_CARD_BYTES
        return rungs_of(model, with_qlora=is_small and importlib.util.find_spec("bitsandbytes") is not None)

    def _is_known(self, kind: str, rung: Rung, length: int) -> bool:
        return any(row["length"] == length for row in self.results.of(kind, rung.key))

    def _left_seconds(self) -> float:
        return self.budget_seconds - (time.perf_counter() - self._started)

    def _is_late(self, step_seconds: float = 0.0) -> bool:
        """Whether a measurement with steps of so many seconds should wait for a later call.

        The first of a call never waits, so that each call gets further.
        """
        return self._left_seconds() < (START_SECONDS + step_seconds if self._has_measured else 0.0)

    def _timeout_seconds(self) -> float:
        return max(60.0, self._left_seconds() + START_SECONDS)

    def _add(self, kind: str, rung: Rung, length: int, **found: Any) -> str:
        """Keeps and prints a row; returns its outcome."""
        row: dict[str, Any] = {"kind": kind, "key": rung.key, "model": rung.model, "rung": rung.name, "length": length}
        row |= found
        self.results.add(row, self.about)
        print(TABLE.row(cells(row)), flush=True)
        return row["outcome"]

    def _find_longest(self, rung: Rung, predictions: Predictions) -> bool:
        """Brackets the longest sequence of one rung; False: time is up."""
        tries = self.results.of("longest", rung.key)
        if any(row["outcome"] in ("error", "slow", "does not fit") for row in tries):
            return True
        if self._is_late():
            return False
        guess = tries[0]["predicted_longest"] if tries else self._guess(rung, predictions)
        if guess == 0:
            self._add("longest", rung, 1024, outcome="does not fit", predicted_longest=0)
            return True
        while (length := next_length(tries, guess)) is not None:
            outcome = self._try("longest", rung, length, predictions, predicted_longest=guess)
            if outcome in (None, "error", "slow", "timeout"):
                return outcome is not None
            tries = self.results.of("longest", rung.key)
        return True

    def _guess(self, rung: Rung, predictions: Predictions) -> int:
        """Where the search begins: as committed for such a card, else as predicted now."""
        name = "nothing" if rung.name == TRAINER else rung.name
        committed = self._committed.get((rung.model, name))
        return predicted_longest(rung, self.device, predictions, on_full_card=True) if committed is None else committed

    def _try(self, kind: str, rung: Rung, length: int, predictions: Predictions, **more: Any) -> str | None:
        """Makes one step, if nothing speaks against it, and keeps what came of it; None: time is up."""
        outcome = outcome_at(rung, self.device, length, predictions)
        found = self._obstacle(outcome, length)
        if found is None:
            if self._is_late(2 * outcome.seconds_per_token * length):
                return None
            self._has_measured = True
            is_timed = kind == "at" and 2 * outcome.seconds_per_token * length <= self.step_seconds
            found = self._tried(rung, question_of(rung, self.device, length), steps=1 + is_timed)
            if kind == "longest":  # the only step at this length: it says whether it fits, not how long one takes
                found = {name: value for name, value in found.items() if name not in TIMES}
        planned = {
            "predicted_peak_bytes": outcome.prediction.peak_bytes,
            "predicted_needed_bytes": outcome.needed_bytes,
            "predicted_host_bytes": outcome.host_bytes,
        }
        return self._add(kind, rung, length, **planned, **more, **found)

    def _obstacle(self, outcome: Outcome, length: int) -> dict[str, Any] | None:
        """Why a length is not measured; None: it is."""
        free_bytes, seconds = free_host_bytes(), outcome.seconds_per_token * length
        if outcome.host_bytes > free_bytes - HOST_MARGIN_BYTES:
            return {"outcome": "host", "free_host_bytes": free_bytes}
        return {"outcome": "slow", "predicted_seconds": seconds} if seconds > self.step_seconds else None

    def _tried(self, rung: Rung, question: Question, steps: int = 1) -> dict[str, Any]:
        job = replace(question.job(question.asked), target=target_of(self.device))
        return tried_apart(job, "trainer" if rung.name == TRAINER else "template", self._timeout_seconds(), steps)

    def _measure_speed(self, rung: Rung, length: int, predictions: Predictions) -> bool:
        """Seconds per step with examples of one length, as many as fit up to SPEED_TOKENS; False: time is up."""
        if self._is_known("speed", rung, length):
            return True
        if self._is_late():
            return False
        self._has_measured = True
        size = max(1, SPEED_TOKENS // length)
        while True:
            sized = replace(rung, settings={**rung.settings, "micro_batch_size": size})
            question = replace_length(question_of(sized, self.device, length), length)
            outcome = predicted(question, predictions)
            if outcome.fits or size == 1:
                break
            size //= 2
        found = self._tried(rung, question, SPEED_STEPS) if outcome.fits else {"outcome": "does not fit"}
        planned = outcome.prediction
        found |= {"predicted_peak_bytes": planned.peak_bytes, "estimated_seconds": planned.seconds}
        self._add("speed", rung, length, micro_batch_size=size, **found)
        return True


def speed_settings(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and settings with which tokens per second are measured."""
    first = OPTIMIZER[1] if model == "8b" else {}
    base = {**NOTHING, "loss": "auto", **first}
    return [
        ("fast", base),
        ("fast, compiled", {**base, "compile": True}),
        ("selective checkpointing", {**base, "gradient_checkpointing": "selective"}),
        ("full checkpointing", {**base, "gradient_checkpointing": "full"}),
    ]


def check_names(rungs: Sequence[str]) -> None:
    """Raises UsageError where no model has a rung, or a setting whose speed is measured, of one of these names."""
    named = [(rung.name, rung.settings) for model in NAMES for rung in rungs_of(model, with_qlora=True)]
    known = dict([(TRAINER, {}), *named, *speed_settings("1b")])
    if unknown := [name for name in rungs if name not in known]:
        raise UsageError(f"--rungs: there is no {', '.join(unknown)}. There are {', '.join(known)}.")


TABLE = harness.Table(
    ("model", "rung, with those above it", "tokens", "outcome", "step, s", "tokens/s", "MFU", "peak, GiB", "predicted"),
    "llrlrrrrr",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of what was tried."""

    def shown(name: str, form: str, scale: float = 1.0) -> str:
        return format(row[name] / scale, form) if row.get(name) is not None else ""

    outcome, size = row["outcome"], row.get("micro_batch_size", 1)
    if outcome == "slow":
        outcome = f"not run: {row['predicted_seconds']:,.0f} s a step by estimate"
    elif outcome == "host":
        outcome = f"not run: {row['predicted_host_bytes'] / 2**30:,.0f} GiB of host memory"
    elif outcome == "error":
        outcome = f"error: {row['message']}"
    return [
        NAMES[row["model"]],
        row["rung"],
        f"{size} × {row['length']:,}" if size > 1 else f"{row['length']:,}",
        outcome,
        shown("seconds", ".2f"),
        shown("tokens_per_second", ",.0f"),
        shown("mfu", ".1%"),
        shown("peak_bytes", ".2f", 2**30),
        shown("predicted_peak_bytes", ".2f", 2**30),
    ]


def tables(tries: Sequence[dict[str, Any]]) -> list[str]:
    """The longest sequence that trained with each rung, each rung at one length, and the speeds."""
    kinds = {kind: [row for row in tries if row["kind"] == kind] for kind in ("longest", "at", "speed")}
    by_rung = [[r for r in kinds["longest"] if r["key"] == key] for key in dict.fromkeys(r["key"] for r in tries)]
    brackets = [bracket_cells(rows) for rows in by_rung if rows]
    longest = ["", "## The longest sequence", "", *BRACKETS.lines(brackets), "", held_line(kinds["longest"])]
    lines = longest if brackets else []
    # What was tried at one length began with the last rung.
    for title, rows in (("Each rung at one length", kinds["at"][::-1]), ("Speed", kinds["speed"])):
        lines += ["", f"## {title}", "", *TABLE.lines(map(cells, rows))] if rows else []
    return lines[1:]


def held_line(tries: Sequence[dict[str, Any]]) -> str:
    """How often the predicted length trained and the next did not."""
    outcomes: dict[str, set[str]] = {}
    for row in (row for row in tries if row["length"] in (guess := row["predicted_longest"], longer(guess))):
        outcomes.setdefault(row["key"], set()).add(f"{row['outcome']} {row['length'] == row['predicted_longest']}")
    both = [found for found in outcomes.values() if len(found) == 2 or "oom True" in found]
    held = sum(found == {"ok True", "oom False"} for found in both)
    return f"In {held} of {len(both)} cases the predicted length trained, and one up to {STEP - 1:.0%} longer did not."


BRACKETS = harness.Table(
    (
        "model", "rung, with those above it", "predicted, tokens", "trained", "ran out of memory",
        "peak, GiB", "predicted",
    ),
    "llrrrrr",
)  # fmt: skip


def bracket_cells(tries: Sequence[dict[str, Any]]) -> list[str]:
    """The longest sequence that trained with a rung, and the shortest that ran out of memory."""
    trained = [row for row in tries if row["outcome"] == "ok"]
    best = max(trained, key=lambda row: row["length"]) if trained else tries[-1]
    model, rung, length, outcome, *_, peak, predicted_peak = cells(best)
    ran_out = min((row["length"] for row in tries if row["outcome"] == "oom"), default=None)
    longest, guess = length if trained else outcome, tries[0].get("predicted_longest")
    return [
        model,
        rung,
        f"{guess:,}" if guess else "",
        longest,
        f"{ran_out:,}" if ran_out else "",
        peak,
        predicted_peak,
    ]


def main() -> None:
    """In the process of :func:`tried_apart`: reads a job from stdin and prints its figures."""
    mode, steps = sys.argv[1], int(sys.argv[2])
    job = building.job_from(json.loads(sys.stdin.read()))
    print(json.dumps(measure_trainer(job) if mode == "trainer" else measure(job, steps)))


if __name__ == "__main__":
    main()
