"""Flags of a frozen dataclass by ``argparse``: a benchmark's command line needs no package beyond Python's own.

A field's type says what its flag takes, the line under the field is its help. ``--no_write`` and ``--no-write`` mean
False, a tuple takes several words, ``None`` leaves an optional field unset, and hyphens work like underscores.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def read(kind: type[T], program: str, description: str | None, arguments: Sequence[str]) -> T:
    """An instance of the dataclass ``kind``; a wrong flag ends the program with status 2.

    Args:
        program: its name in the help.
        description: the first part of the help.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program, description=description, formatter_class=shape, allow_abbrev=False)
    hints, helps = typing.get_type_hints(kind), help_of(kind)
    for field in dataclasses.fields(kind):  # type: ignore
        text = f"{helps.get(field.name, '')} (default: {field.default})".strip().replace("%", "%%")
        hint = hints[field.name]
        if hint is bool:
            parser.add_argument(
                f"--{field.name}", f"--no_{field.name}", action=Switch, default=field.default, help=text
            )
            continue
        inner = _without_none(hint)
        several = typing.get_origin(inner) is tuple
        one = reader_of(typing.get_args(inner)[0] if several else inner, optional=hint != inner and not several)
        metavar = getattr(one, "metavar", field.name.upper())
        nargs = "*" if several else None
        parser.add_argument(f"--{field.name}", type=one, nargs=nargs, default=field.default, metavar=metavar, help=text)
    words = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in arguments]
    values = vars(parser.parse_args(words))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


class Switch(argparse.Action):
    """``--name`` means True, ``--no_name`` False."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no_"))


def reader_of(hint: Any, optional: bool = False) -> Callable[[str], Any]:
    """What makes a value of the type ``hint`` from a word; an ``optional`` one may be None."""
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()

    def value(word: str) -> Any:
        if optional and word == "None":
            return None
        if choices and word not in choices:
            raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(choices)}")
        try:
            return word if choices else hint(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a valid {hint.__name__}") from None

    value.metavar = "|".join(choices) if choices else {int: "N", float: "X", Path: "PATH"}.get(hint, "TEXT")  # type: ignore
    return value


def _without_none(hint: Any) -> Any:
    """The type in an optional one."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    return next(part for part in typing.get_args(hint) if part is not type(None))


def help_of(kind: type) -> dict[str, str]:
    """The string that stands under each field of ``kind`` and its bases, in one line."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        body = ast.parse(inspect.getsource(cls).lstrip()).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
