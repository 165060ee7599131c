"""Modules of extras that may have been deleted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch


def module_of(extra: str, name: str) -> Any:
    """The module ``name`` of an extra, or None if the extra is not here."""
    return import_module(f"train.extras.{extra}.{name}") if find_spec(f"train.extras.{extra}") else None


def patched(module: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """Inside it, ``module`` has ``value`` under ``name``; does nothing for None."""
    return nullcontext() if module is None else patch.object(module, name, value)
