"""What fits on the cards that people own, predicted: sequence length × micro-batch, with more and more techniques.

    python scripts/study.py cards --output_dir runs/cards                             # three published models
    python scripts/study.py cards --config recipe.yaml --output_dir runs/cards        # yours; takes training flags

Needs no GPU and downloads nothing: each cell executes the real step on tensors without data. Memory is predicted once
for cards with bf16 and once for those without; what a card's context takes is added. Speed is a roofline estimate, with
the least saving technique that fits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks import building, harness
from scripts.benchmarks.rungs import MODELS, NAMES, question_of, rungs_of
from scripts.benchmarks.study.cards_page import SHOWN_SIZES, SIZES, Cell, Speed, kernels_of, largest, room_bytes, write
from train.config import argument
from train.memory.__main__ import Parser, numbers
from train.memory.devices import Device, find_device
from train.memory.plan import Predictions
from train.memory.plan import predicted as outcome_of
from train.memory.predict import Predictor
from train.memory.question import Question, replace_length, vocabulary_size
from train.records import UsageError, UserError

if TYPE_CHECKING:
    from scripts.benchmarks.rungs import Rung

RULE = "what a full card has to hold"  # by which bytes are counted; it is part of a cell's key
CARDS = ("t4", "rtx-4090", "l40s", "a100-80", "h200")
FIRST_RUNGS = ("nothing", "chunked loss", "activation checkpointing")
"""Of the ladder, in addition to its last two; each has all techniques up to it."""
OWN = {"loss": "full", "gradient_checkpointing": "none"}
OWN_RUNGS: dict[str, dict[str, Any]] = {
    "nothing": OWN,
    "chunked loss": OWN | {"loss": "chunked"},
    "activation checkpointing": {"loss": "chunked", "gradient_checkpointing": "full"},
    "checkpoints on the host": {
        "loss": "chunked",
        "gradient_checkpointing": "full",
        "gradient_checkpointing_offload": True,
    },
}
"""Of a recipe; techniques of its own stay."""
LENGTHS = (1024, 4096, 16384, 65536, 131072)


def main(arguments: list[str]) -> int:
    """Runs the study of the command line and returns the exit status (see ``train.records``)."""
    parser = Parser(
        prog="scripts/study.py cards",
        usage="scripts/study.py cards --output_dir DIR [flags below] [training flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cards", default=",".join(CARDS), metavar="NAME,NAME...", help="default: %(default)s")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,NAME...", help="default: %(default)s")
    lengths = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", type=numbers, default=lengths, metavar="N,N...", help="default: %(default)s")

    def study() -> None:
        own, words = parser.parse_known_args(list(map(argument, arguments)))
        cards = {name: find_device(name) for name in own.cards.split(",")}
        if others := [name for name, device in cards.items() if device.kind != "cuda"]:
            raise UsageError(f"--cards: {others[0]} has no memory of its own: give cards, such as rtx-4090 or 24GiB.")
        asked = own_questions(words) if words else published_questions(own.models.split(","))
        own.output_dir.mkdir(parents=True, exist_ok=True)
        building.use_expandable_segments()  # as a run on a card does
        command = shlex.join(["cards", *arguments])
        cells, speeds = predicted(asked, cards, own.lengths, own.output_dir / "cells.jsonl")
        found = {
            **harness.about(),
            "command": command,
            "cards": {name: {"room_bytes": room_bytes(device)} for name, device in cards.items()},
            "techniques": {f"{model}: {rung}": ask.changes for (model, rung), ask in asked.items()},
            "lengths": list(own.lengths),
            "cells": list(map(asdict, cells)),
            "speeds": list(map(asdict, speeds)),
        }
        write(own.output_dir, found)

    return harness.exit_status(study)


@dataclass(frozen=True)
class Ask:
    """How to ask for a rung of a model: the flags it sets, and its question on a device."""

    changes: Mapping[str, Any]
    rung: Rung | None = None
    config: Any = None

    def question(self, device: Device, length: int, size: int) -> Question:
        """A micro-batch of ``size`` examples of ``length`` tokens, the second of a step where steps accumulate."""
        if self.rung is not None:
            question = question_of(self.rung, device, length)
        else:
            changed = building.changed_config(self.config, self.changes)
            classes = 2 if building.is_classifier(changed) else 0
            question = replace_length(Question(changed, device, vocabulary_size(changed), classes), length)
        steps = 1 if question.config.get("optimizer_in_backward") else 2
        sizes = {"micro_batch_size": size, "gradient_accumulation_steps": steps, "global_batch_size": None}
        return replace(question, config=question.config.changed(**sizes))


def published_questions(models: Sequence[str]) -> dict[tuple[str, str], Ask]:
    """By (model, rung), for the shapes of models that everybody knows."""
    if unknown := set(models) - MODELS.keys():
        raise UsageError(f"--models: {min(unknown)} is none of {', '.join(MODELS)}.")
    asked = {}
    for model in models:
        ladder, added = rungs_of(model), list[str]()
        for rung in ladder:
            added.append(rung.name)
            if rung.name in FIRST_RUNGS or rung in ladder[-2:]:
                asked[NAMES[model], ", ".join(added)] = Ask({**rung.settings}, rung)
                added = []
    return asked


def own_questions(words: Sequence[str]) -> dict[tuple[str, str], Ask]:
    """By (model, rung), for the recipe of a training command line."""
    config = building.parsed_config(words)
    return {(config.architecture.name, name): Ask(changes, None, config) for name, changes in OWN_RUNGS.items()}


def predicted(
    asked: Mapping[tuple[str, str], Ask], cards: Mapping[str, Device], lengths: Sequence[int], file: Path
) -> tuple[list[Cell], list[Speed]]:
    """All cells that can fit on a card, and a speed for each card and length; known ones are read from ``file``."""
    known, versions = dict[str, dict[str, Any]](), harness.about()["versions"]
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError, KeyError):  # a line that was cut off
            row = json.loads(line)
            known[row["key"]] = row["value"]

    with Predictor() as predictor, file.open("a", encoding="utf-8") as kept:
        predictions = Predictions(predictor)

        def once(question: Question, **place: Any) -> dict[str, Any]:
            """Bytes and time of a micro-batch, or why there are none."""
            job = question.job(question.asked)
            text = json.dumps([asdict(job), versions, RULE], sort_keys=True)
            text = "\n".join([text, *building.texts_of_functions(text)])
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            if key not in known:
                try:
                    outcome = outcome_of(question, predictions)
                except UserError as error:  # not kept: tried again next time
                    return {"reason": str(error)}
                value = {
                    "reserved_bytes": outcome.prediction.least_reserved_bytes,
                    "seconds": outcome.seconds_per_token,
                }
                known[key] = value
                kept.write(json.dumps({"key": key, "value": value}) + "\n")
                kept.flush()
                print(f"{len(known)}: {place} {value}"[:150], file=sys.stderr, flush=True)
            return known[key]

        cells = list(_cells(asked, cards, lengths, once))
        return cells, list(_speeds(asked, cards, lengths, cells, once))


def _cells(
    asked: Mapping[tuple[str, str], Ask], cards: Mapping[str, Device], lengths: Sequence[int], once: Any
) -> Iterator[Cell]:
    for kernels in dict.fromkeys(map(kernels_of, cards)):
        own = [device for name, device in cards.items() if kernels_of(name) == kernels]
        most = max(room_bytes(device) for device in own)
        for (model, rung), ask in asked.items():
            end = SIZES[-1]
            for length in sorted(lengths):
                for size in (size for size in SIZES if size <= end):
                    place: dict[str, Any] = {"model": model, "rung": rung, "length": length, "micro_batch_size": size}
                    try:
                        value: dict[str, Any] = once(ask.question(find_device(kernels), length, size), **place)
                    except UsageError as error:  # these kernels cannot do it
                        value = {"reason": str(error)}
                    bytes_, reason = value.get("reserved_bytes"), value.get("reason")
                    yield Cell(**place, kernels=kernels, reserved_bytes=bytes_, reason=reason)
                    if bytes_ is None or bytes_ > most:  # longer ones need more
                        end = size
                        break


def _speeds(
    asked: Mapping[tuple[str, str], Ask],
    cards: Mapping[str, Device],
    lengths: Sequence[int],
    cells: Sequence[Cell],
    once: Any,
) -> Iterator[Speed]:
    for card, device in cards.items():
        for model in dict.fromkeys(model for model, _ in asked):
            for length in lengths:
                for rung in (rung for name, rung in asked if name == model):
                    if size := min(largest(cells, model, rung, length, device, kernels_of(card)), SHOWN_SIZES[-1]):
                        place = {"model": model, "rung": rung, "length": length, "micro_batch_size": size}
                        seconds = once(asked[model, rung].question(device, length, size), card=card, **place)
                        speed = 1 / seconds["seconds"] if seconds.get("seconds") else None
                        yield Speed(card=card, tokens_per_second=speed, **place)
                        break
