"""What stands in for a package that is not installed: names to import and compare with, none to use.

Benchmarks that make their own batches need neither data sets nor metrics, but the modules that they call name classes
of such packages. See ``harness.stand_in_for_missing``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable


def classes_of(package: str) -> Callable[[str], type]:
    """A module's ``__getattr__``: for each name a class of that name, without instances."""

    @functools.cache
    def class_named(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*arguments: object, **options: object) -> None:
            raise ImportError(f"{name} needs the package {package}, which is not installed: pip install {package}")

        return type(name, (), {"__new__": refuse})

    return class_named
