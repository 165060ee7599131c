"""Long ListOps: nested lists of digits under MIN, MAX, MED and SM, to be worked out to one digit.

The recipe is that of Long Range Arena (arXiv 2011.04006), as in its published generator: 96,000 / 2,000 / 2,000
distinct examples; each argument is again an operator with probability 1/4 above the deepest level and else a digit;
2 to 10 arguments; only trees with 500 < length < 2,000 are kept, the length counted in tokens (an operator counts
for itself and its closing bracket). The text is without the round parentheses that its loader strips.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.extras.readers.rows import cached
from train.extras.readers.splits import Splits
from train.records import UsageError, UserError

if TYPE_CHECKING:
    from train.config import Data

OPERATORS = ("MIN", "MAX", "MED", "SM")
OPERATOR_PROBABILITY = 0.25
TRIES = 100_000
"""Trees drawn in a row without a new example before the options are said to be too narrow."""

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


def load(data: Data, labelled: bool) -> Splits:
    """Training, validation and test split, generated at first use.

    Raises:
        UsageError: an option that is unknown or out of range.
        UserError: options that allow too few distinct examples.
    """
    from datasets import Features, Value

    options = parse_options(data.dataset_options or {})
    columns = Features({"text": Value("string"), "label": Value("int64"), "source": Value("string")})
    with _no_second_progress_bar():
        examples = cached(rows, columns, **dataclasses.asdict(options), version=VERSION)
    if not labelled:
        examples = examples.remove_columns("label")
    ends = [options.test, options.test + options.validation, len(examples)]
    test, validation, train = (examples.select(range(start, end)) for start, end in zip([0, *ends], ends, strict=False))
    return Splits(train, validation, test)


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


def rows(
    train: int,
    validation: int,
    test: int,
    min_length: int,
    max_length: int,
    max_depth: int,
    max_args: int,
    seed: int,
    version: int,
) -> Iterator[dict[str, Any]]:
    """The examples: those of the test split first, then validation, then training.

    So a shorter training split is the head of a longer one, and the other two stay as they are.

    Raises:
        UserError: the options allow too few distinct examples.
    """
    from tqdm import tqdm

    total = train + validation + test
    draw = random.Random(seed).random
    seen: set[bytes] = set()
    with tqdm(total=total, desc="Generating ListOps", unit="example") as bar:
        while len(seen) < total:
            for _ in range(TRIES):
                tokens, value = expression(draw, max_depth, max_args, max_length)
                if not min_length < len(tokens) < max_length:
                    continue
                text = " ".join(tokens)
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest not in seen:
                    break
            else:
                raise UserError(
                    f"listops: only {len(seen):,} of {total:,} distinct examples with {min_length} < length < "
                    f"{max_length} found: widen min_length and max_length, or raise max_depth or max_args."
                )
            yield {"text": text, "label": value, "source": f"listops:{len(seen)}"}
            seen.add(digest)
            bar.update()


def expression(draw: Any, max_depth: int, max_args: int, max_length: int) -> tuple[list[str], int]:
    """The tokens of a random tree under an operator, and its value; given up once ``max_length`` is reached.

    A bare digit, which the recipe also draws, never passes a minimal length and is not drawn here.

    Args:
        draw: gives the next number in [0, 1); the only source of chance, and the same on every Python.
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


@contextlib.contextmanager
def _no_second_progress_bar() -> Iterator[None]:
    """The library's bar does not know the total; the one here does."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()
