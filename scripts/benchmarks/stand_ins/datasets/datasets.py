"""Stands in for 🤗 datasets where that is not installed: names to import and compare with, none to use.

Benchmarks that make their own batches need no data set, but the modules that they call name its classes. See
``harness.stand_in_for_missing``.
"""

from __future__ import annotations

import functools
from typing import Any

__version__ = "0"


@functools.cache
def __getattr__(name: str) -> Any:
    """A class of that name, without instances."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise ImportError(f"{name} needs the package {__name__}, which is not installed: pip install {__name__}")

    return type(name, (), {"__new__": refuse})
