"""The rungs of the ladder: models, the techniques that each rung adds, and what the planner says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks import harness
from scripts.benchmarks.building import config_of
from train.memory.devices import Device, find_device
from train.memory.ladder import largest_fitting
from train.memory.plan import Outcome, Predictions, predicted
from train.memory.question import Question

MODELS: dict[str, dict[str, Any]] = {
    "0.5b": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936},
    "1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 128256},
    "8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Published shapes; nothing is downloaded."""
NAMES = {"0.5b": "Qwen2.5-0.5B", "1b": "Llama-3.2-1B", "8b": "Llama-3.1-8B"}

OPTIMIZER = ("optimizer on the host", {"dtype": "bfloat16", "optimizer_offload": True})
TECHNIQUES: list[tuple[str, dict[str, Any]]] = [
    ("chunked loss", {"loss": "chunked"}),
    ("activation checkpointing", {"gradient_checkpointing": "full"}),
    ("checkpoints on the host", {"gradient_checkpointing_offload": True}),
    ("tiled MLP", {"tiled_mlp": True}),
]
NOTHING = {"loss": "full", "gradient_checkpointing": "none", "mixed_precision": "bf16"}
IN_BACKWARD = ("update in backward", {"optimizer_in_backward": True, "max_grad_norm": None})
QLORA = (
    "QLoRA instead",
    {
        "dtype": "bfloat16",
        "optimizer_offload": False,
        "optimizer_in_backward": False,
        "max_grad_norm": 1.0,
        "adapter": "qlora",
    },
)
LONGEST = 16 * 2**20
"""Most tokens that are tried."""
ALIKE = 0.03
"""Share by which the memory of two cards may differ for the ladder of one to say where to begin on the other."""


@dataclass(frozen=True)
class Rung:
    """A model with all techniques up to one."""

    model: str
    name: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.model}: {self.name}"


def committed_lengths(device: Device, folder: Path = harness.RESULTS) -> dict[tuple[str, str], int]:
    """The longest sequences by (model, rung) of the predicted ladder in ``folder`` whose card is most like ``device``.

    On the full card where that was predicted. Empty where no card is like it.
    """
    found: list[tuple[float, dict[tuple[str, str], int]]] = []
    for path in sorted(folder.glob("ladder-predicted-*.json")):
        ladder = json.loads(path.read_text(encoding="utf-8"))
        total_bytes = ladder.get("total_bytes") or find_device(ladder["device"]).total_bytes
        difference = abs(total_bytes / device.total_bytes - 1)
        if difference <= ALIKE:
            rows = (row for row in ladder["rows"] if row.get("length") is not None)
            longest = {(row["model"], row["rung"]): row.get("full_length", row["length"]) for row in rows}
            found.append((difference, longest))
    return min(found, key=lambda entry: entry[0])[1] if found else {}


def rungs_of(model: str, with_qlora: bool = False) -> list[Rung]:
    """The ladder of ``model``; for 8B the optimizer moves to the host first, because nothing fits without it, and what
    else takes host memory comes later.
    """
    if model == "8b":
        loss, checkpointing, on_host, tiles = TECHNIQUES
        steps = [OPTIMIZER, loss, checkpointing, tiles, on_host]
    else:
        steps = [*TECHNIQUES, OPTIMIZER]
    steps += [IN_BACKWARD, QLORA] if with_qlora else [IN_BACKWARD]
    settings, rungs = dict(NOTHING), [Rung(model, "nothing", dict(NOTHING))]
    for name, added in steps:
        settings = {**settings, **added}
        rungs.append(Rung(model, name, settings))
    return rungs


def question_of(rung: Rung, device: Device, length: int) -> Question:
    """One sequence of ``length`` tokens with the settings of ``rung``; with fp16 where the device has no bf16."""
    settings = rung.settings
    if (device.compute_capability or (8, 0)) < (8, 0):
        settings = {**settings, "mixed_precision": "fp16", "dtype": "float32"}
    values = {
        "model_config": dict(MODELS[rung.model]),
        "tokenizer": "bytes",
        "max_length": length,
        "micro_batch_size": 1,
        **settings,
    }
    return Question(config_of(values), device, MODELS[rung.model]["vocab_size"])


def outcome_at(rung: Rung, device: Device, length: int, predictions: Predictions) -> Outcome:
    """The prediction for a step with ``length`` tokens."""
    return predicted(question_of(rung, device, length), predictions)


def multiple(length: float) -> int:
    """``length`` rounded down to a multiple of 1,024, or of 64 where that would be more than 1 %."""
    unit = 1024 if length >= 100 * 1024 else 64
    return int(length) // unit * unit


def lengths_to_try() -> list[int]:
    """Each about 1 % more than the one before it, at least 64 tokens."""
    lengths = [1024]
    while lengths[-1] < LONGEST:
        lengths.append(max(lengths[-1] + 64, multiple(lengths[-1] * 1.01)))
    return lengths


def predicted_longest(
    rung: Rung, device: Device, predictions: Predictions, near: int = 8192, on_full_card: bool = False
) -> int:
    """The longest of :func:`lengths_to_try` that is predicted to fit; 0: not even the shortest.

    Args:
        near: where the search begins.
        on_full_card: all of the card may be taken, without a margin.
    """

    room = device.total_bytes if on_full_card else question_of(rung, device, 1024).room_bytes
    lengths = lengths_to_try()
    nearest = min(lengths, key=lambda length: abs(length - near))
    return largest_fitting(lengths, lambda n: outcome_at(rung, device, n, predictions).needed_bytes, room, nearest) or 0
