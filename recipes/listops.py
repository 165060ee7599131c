"""Long ListOps: nested lists of digits under MIN, MAX, MED and SM, to be worked out to one digit.

The recipe is that of Long Range Arena (arXiv 2011.04006), as in its published generator: 96,000 / 2,000 / 2,000
distinct examples; each argument is again an operator with probability 1/4 above the deepest level and else a digit;
2 to 10 arguments; only trees with 500 < length < 2,000 are kept, the length counted in tokens (an operator counts
for itself and its closing bracket). The text is without the round parentheses that its loader strips.

Use it with ``dataset: recipes/listops.py:documents`` and, for other sizes, ``dataset_options`` (:class:`Options`).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.records import UsageError, UserError

if TYPE_CHECKING:
    import datasets

    from train.config import Config

OPERATORS = ("MIN", "MAX", "MED", "SM")
OPERATOR_PROBABILITY = 0.25
TRIES = 100_000
"""After so many trees in a row without a new example, the options are taken to be too narrow."""

VERSION = 1
"""Part of the cache key: raise it when the generator changes what it draws."""


@dataclass(frozen=True)
class Options:
    """``dataset_options``; the seed is not the run's, so that all runs see the same data."""

    train: int = 96_000
    validation: int = 2_000
    test: int = 2_000
    min_length: int = 500
    """Exclusive, in tokens."""
    max_length: int = 2_000
    """Exclusive, in tokens."""
    max_depth: int = 10
    """Levels of the tree, the digits' included."""
    max_args: int = 10
    seed: int = 0


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Training, validation and test split (``text``, ``label``, ``source``), generated at first use and then cached.

    Raises:
        UsageError: an option that is unknown or out of range.
        UserError: options that allow too few distinct examples.
    """
    from datasets import Features, Value
    from datasets.fingerprint import Hasher

    from train.extras.cache import generated

    options = parse_options(config.data.dataset_options or {})
    columns = Features({"text": Value("string"), "label": Value("int64"), "source": Value("string")})
    key = {"options": dataclasses.asdict(options), "version": VERSION}
    examples = generated(rows, columns, Hasher.hash(key), **key)
    ends = [0, options.test, options.test + options.validation, len(examples)]
    names = ("test", "validation", "train")
    return {name: examples.select(range(ends[i], ends[i + 1])) for i, name in enumerate(names)}


def parse_options(values: dict[str, Any]) -> Options:
    """The options that ``values`` set over the defaults.

    Raises:
        UsageError: naming the option, its value and what would do.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"listops knows {', '.join(known)}."
            raise UsageError(f"dataset_options: unknown option {name!r}. {hint}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"dataset_options: {name}: {value!r} is not a whole number.")
    options = Options(**values)
    ranges = {
        "train": (1, 10**8),
        "validation": (1, 10**8),
        "test": (1, 10**8),
        "min_length": (0, 10**6),
        "max_length": (options.min_length + 2, 10**6),
        "max_depth": (2, 100),
        "max_args": (2, 1000),
        "seed": (0, 2**63),
    }
    for name, (least, most) in ranges.items():
        if not least <= getattr(options, name) <= most:
            raise UsageError(f"dataset_options: {name}: {getattr(options, name)} must be from {least} to {most}.")
    return options


def rows(options: Mapping[str, int], version: int) -> Iterator[dict[str, Any]]:
    """Distinct examples: those of the test split first, then validation, then training.

    So a smaller training split is the head of a larger one, and the other two stay as they are. ``version`` only
    tells cache entries apart.

    Raises:
        UserError: the options allow too few.
    """
    total = options["train"] + options["validation"] + options["test"]
    least, most = options["min_length"], options["max_length"]
    draw = random.Random(options["seed"]).random
    seen: set[bytes] = set()
    while len(seen) < total:
        for _ in range(TRIES):
            tokens, value = expression(draw, options["max_depth"], options["max_args"], most)
            if not least < len(tokens) < most:
                continue
            text = " ".join(tokens)
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest not in seen:
                break
        else:
            raise UserError(
                f"listops: only {len(seen):,} of {total:,} distinct examples with {least} < length < {most} found: "
                "widen min_length and max_length, or raise max_depth or max_args."
            )
        yield {"text": text, "label": value, "source": f"listops:{len(seen)}"}
        seen.add(digest)


def expression(draw: Callable[[], float], max_depth: int, max_args: int, max_length: int) -> tuple[list[str], int]:
    """The tokens of a random tree under an operator, and its value; given up once ``max_length`` is reached.

    A bare digit, which the published recipe also draws, never passes a minimal length and is not drawn here.

    Args:
        draw: gives the next number in [0, 1); the only source of chance, with the same numbers on every Python.
    """
    tokens: list[str] = []

    def operator(depth: int) -> int:
        name = OPERATORS[int(draw() * len(OPERATORS))]
        tokens.append(f"[{name}")
        arguments = []
        for _ in range(2 + int(draw() * (max_args - 1))):
            if len(tokens) >= max_length:
                break
            if depth + 1 < max_depth and draw() < OPERATOR_PROBABILITY:
                arguments.append(operator(depth + 1))
            else:
                digit = int(draw() * 10)
                tokens.append(str(digit))
                arguments.append(digit)
        tokens.append("]")
        return evaluate(name, arguments) if arguments else 0

    return tokens, operator(1)


def evaluate(name: str, arguments: Sequence[int]) -> int:
    """The value of one operator; the median of an even number is the mean of the middle two, rounded down."""
    if name == "MIN":
        return min(arguments)
    if name == "MAX":
        return max(arguments)
    if name == "SM":
        return sum(arguments) % 10
    ordered = sorted(arguments)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
