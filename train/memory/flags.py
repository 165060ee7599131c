"""How the commands about memory read their own flags, which stand among those of training."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number above zero."""
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers above zero, separated by commas: each once, ascending."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def with_underscores(words: list[str]) -> list[str]:
    """Flags written the way the configuration writes them: --max_length for --max-length."""

    def written(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word

    return [written(word) for word in words]
