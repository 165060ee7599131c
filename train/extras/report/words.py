"""What page, charts and model card share: names in words, and the values that fit into a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from train.figures import gib

_NAMES = {"macro_f1": "macro F1", "f1": "F1", "mfu": "MFU", "tokens_per_second": "tokens/s"}


def words(name: str) -> str:
    """The name of a metric in words."""
    return _NAMES.get(name, name.replace("_", " "))


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that fit into a cell of a table: numbers, texts and missing values."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float | str)}


def shown(values: Mapping[str, Any], name: str, text: Callable[[Any], str]) -> str | None:
    """``text`` of the value called ``name``; None if there is no such value."""
    value = values.get(name)
    return None if value is None else text(value)


def machine_facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts about the machine and the versions of a summary, by the name a person reads."""
    machine = summary.get("hardware") or {}
    facts = {
        "GPU": ", ".join(f"{gpu['name']} ({gib(gpu['memory_bytes'])})" for gpu in machine.get("gpus") or []),
        "CPU": machine.get("cpu"),
        "CPU cores": machine.get("cpu_cores"),
        "Memory": shown(machine, "memory_bytes", gib),
        "Platform": machine.get("platform"),
        **(summary.get("versions") or {}),
    }
    return {name: value for name, value in facts.items() if value}
