"""How values read: bytes as GiB, seconds as minutes, names of metrics as words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_NAMES = {
    "macro_f1": "macro F1",
    "f1": "F1",
    "mfu": "MFU",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "causal_lm": "causal language",
    "masked_lm": "masked language",
}


_SECRETS = (
    (re.compile(r"(?<=:/)(/?)[^/\s@'\"]+@"), r"\1…@"),
    (re.compile(r"(?i)([?&;](?:[\w-]*(?:token|key|secret|password|signature)|sig)=)[^&\s'\"]+"), r"\1…"),
    (re.compile(r"\bhf_\w{20,}"), "hf_…"),
)
"""User and password of a URL, what its parameters keep secret, and the Hub's tokens."""


def without_secrets(text: str) -> str:
    """``text`` that may be shown and kept."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def gib(size_bytes: float) -> str:
    """A size in GiB (2^30 bytes), in MiB below a tenth of one."""
    if size_bytes < 0.1 * 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.{1 if size_bytes >= 100 * 2**30 else 2}f} GiB"


def count(value: float) -> str:
    """A count in three digits: 874, 2.35k, 24.1k, 1.84M, 7.62B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share between 0 and 1 in percent."""
    return f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """Seconds as the two largest of days, hours, minutes and seconds."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def number(value: Any) -> str:
    """A measured number in four digits, a whole one with its thousands apart; texts as they are, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:#.4g}".rstrip(".")


def words(name: str) -> str:
    """The name of a metric or of a task, in words."""
    return _NAMES.get(name, name.replace("_", " "))


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that fit into a cell of a table: numbers, texts and missing values."""
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float | str)}


def shown(values: Mapping[str, Any], name: str, text: Callable[[Any], str]) -> str | None:
    """``text`` of the value called ``name``, or None where there is no such value."""
    value = values.get(name)
    return None if value is None else text(value)
