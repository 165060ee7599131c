"""What is learned. Adding a task is one file beside these and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from train.errors import UsageError

if TYPE_CHECKING:
    from train.config import Data
    from train.tasks.base import Task

TASKS = {
    "causal_lm": "train.tasks.causal_lm:CausalLM",
    "masked_lm": "train.tasks.masked_lm:MaskedLM",
    "sequence_classification": "train.tasks.sequence_classification:SequenceClassification",
}


def check_task(name: str) -> None:
    """Raises UsageError for a task that is not there; imports nothing."""
    if name not in TASKS:
        raise UsageError(f"task: {name!r} is not one of {', '.join(TASKS)}.")


def build_task(data: Data) -> Task:
    """The task that ``data`` names."""
    module, _, cls = TASKS[data.task].partition(":")
    return getattr(importlib.import_module(module), cls)(data)
