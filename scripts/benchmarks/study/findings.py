"""What the figures of a study say, in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scripts.benchmarks.study.cells import (
    BASELINE,
    DOES_NOT_FIT,
    FAILED,
    LEFT_OUT,
    NOT_REACHED,
    OUT_OF_MEMORY,
    Cell,
    Reach,
    Sweep,
    frontier,
)
from train.figures import count, gib

_WORDS = {
    BASELINE: "the baseline",
    "checkpointing": "full checkpointing",
    "selective": "selective checkpointing",
    "chunked_loss": "a chunked loss",
    "bf16": "bf16",
}
_NEARLY_EQUAL = 0.05
"""Peaks that differ by less count as equal in the text."""


def in_words(technique: str) -> str:
    """A technique as it reads in a sentence."""
    return " and ".join(_WORDS.get(part, part) for part in technique.split("+"))


def findings(sweep: Sweep) -> list[str]:
    """What the figures say, in sentences."""
    reference = BASELINE if BASELINE in sweep.techniques else sweep.techniques[0]
    others = [name for name in sweep.techniques if name != reference]
    sentences = [_against(sweep, reference, name) for name in others]
    sentences += [
        _longest(sweep, reference),
        _shape_or_tokens(sweep, reference),
        _larger_batches(sweep, reference),
        _longer_sequences(sweep, reference),
        _accuracy(sweep),
        _missing(sweep),
    ]
    return [sentence for sentence in sentences if sentence]


def _against(sweep: Sweep, reference: str, technique: str) -> str | None:
    """One technique against the reference: at the largest micro-batch that both ran, and over all of them."""
    own, base = ({shape_of(c): c for c in sweep.measured if c.technique == name} for name in (technique, reference))
    both = sorted(own.keys() & base.keys(), key=lambda shape: (shape[0] * shape[1], shape[0]))
    if not both:
        return None
    memory = [(own[shape].peak_bytes or 0) / (base[shape].peak_bytes or 1) - 1 for shape in both]
    slowdown = [(own[shape].seconds_per_step or 0) / (base[shape].seconds_per_step or 1) for shape in both]
    length, size = both[-1]
    text = (
        f"With {in_words(technique)} a micro-batch of {size} × {length:,} tokens takes "
        f"{gib(own[both[-1]].peak_bytes or 0)} instead of {gib(base[both[-1]].peak_bytes or 0)} "
        f"({_change(memory[-1])}), a step {slowdown[-1]:.2f} × the time of {in_words(reference)}."
    )
    if len(both) > 1:
        text += (
            f" Over {len(both)} shapes: {_change(statistics.median(memory))} of memory at the median, from "
            f"{_change(min(memory))} to {_change(max(memory))}; {statistics.median(slowdown):.2f} × the time."
        )
    return text


def _longest(sweep: Sweep, reference: str) -> str | None:
    """How the longest length and the largest micro-batch within the budget grow."""
    reaches = frontier(sweep.cells, sweep.budget_bytes)
    known = {cell.length for cell in sweep.cells if cell.technique == reference and cell.needed_bytes is not None}
    reaches = [reach for reach in reaches if reach.length in known]  # where the reference failed, nothing grows
    longest = {
        name: max((r.length for r in reaches if r.technique == name and r.micro_batch_size), default=0)
        for name in sweep.techniques
    }
    best = max(sweep.techniques, key=lambda name: longest[name])
    within = f"within {gib(sweep.budget_bytes)}"
    if longest[best] > longest[reference]:
        began = f"from {longest[reference]:,}" if longest[reference] else "from none of those tried"
        text = f"The longest length tried that fits {within} grows {began} to {longest[best]:,} tokens"
        text += f" with {in_words(best)}."
    elif longest[reference]:
        text = f"The longest length tried, {longest[reference]:,} tokens, fits {within} with {in_words(reference)}."
    else:
        return f"Nothing tried fits {within}."
    if not longest[reference]:
        return text
    at = {r.technique: r for r in reaches if r.length == longest[reference]}
    largest = max(at.values(), key=lambda reach: reach.micro_batch_size)
    if largest.micro_batch_size > at[reference].micro_batch_size:
        text += (
            f" At {longest[reference]:,} tokens the largest micro-batch {within} grows from {_reach(at[reference])} to "
            f"{_reach(largest)} with {in_words(largest.technique)}."
        )
    return text


def _reach(reach: Reach) -> str:
    return f"{'' if reach.complete else 'at least '}{reach.micro_batch_size}{'' if reach.measured else ' (predicted)'}"


def _shape_or_tokens(sweep: Sweep, reference: str) -> str | None:
    """Whether memory follows the tokens of a micro-batch or its shape."""
    by_tokens: dict[tuple[int, bool], list[Cell]] = {}
    for cell in sweep.measured:
        if cell.technique == reference:
            key = (cell.length * cell.micro_batch_size, cell.accumulation_steps > 1)
            by_tokens.setdefault(key, []).append(cell)
    tokens, cells = max(
        ((key[0], group) for key, group in by_tokens.items()), key=lambda e: (len(e[1]), e[0]), default=(0, [])
    )
    if len(cells) < 2:
        return None
    cells = sorted(cells, key=lambda cell: cell.length)
    peaks = [cell.peak_bytes or 0 for cell in cells]
    spread = max(peaks) / min(peaks) - 1
    every = [cell.peak_bytes or 0 for group in by_tokens.values() for cell in group]
    if max(every) / min(every) - 1 <= _NEARLY_EQUAL:
        return None  # it follows neither: nearly all of it is weights
    shapes = _and([f"{cell.micro_batch_size} × {cell.length:,}" for cell in cells])
    sizes = _and([gib(peak) for peak in peaks])
    follows = (
        "memory follows the tokens of a micro-batch, not how they are cut into sequences"
        if spread <= _NEARLY_EQUAL
        else "memory depends on the shape too, not on the tokens of a micro-batch alone"
    )
    return f"With {in_words(reference)}, {shapes} ({tokens:,} tokens each) take {sizes}: {follows}."


def _larger_batches(sweep: Sweep, reference: str) -> str | None:
    """What a larger micro-batch costs and gains at the shortest length."""
    cells = _alike([c for c in sweep.measured if c.technique == reference and c.length == min(sweep.lengths)])
    if len(cells) < 2:
        return None
    small, large = min(cells, key=lambda c: c.micro_batch_size), max(cells, key=lambda c: c.micro_batch_size)
    speed = (large.tokens_per_second or 0) / (small.tokens_per_second or 1)
    memory = (large.peak_bytes or 0) / (small.peak_bytes or 1)
    return (
        f"At {small.length:,} tokens a micro-batch of {large.micro_batch_size} instead of {small.micro_batch_size} "
        f"takes {memory:.2f} × the memory and brings {speed:.2f} × the tokens per second."
    )


def _alike(cells: Sequence[Cell]) -> list[Cell]:
    """Those that accumulate, whose gradients stay during the next micro-batch; all, where fewer than two do."""
    accumulating = [cell for cell in cells if cell.accumulation_steps > 1]
    return accumulating if len(accumulating) > 1 else list(cells)


def _longer_sequences(sweep: Sweep, reference: str) -> str | None:
    """What length costs, one sequence at a time."""
    size = min(sweep.micro_batch_sizes)
    cells = _alike([c for c in sweep.measured if c.technique == reference and c.micro_batch_size == size])
    if len(cells) < 2:
        return None
    short, long = min(cells, key=lambda c: c.length), max(cells, key=lambda c: c.length)
    return (
        f"From {short.length:,} to {long.length:,} tokens, {size} at a time, memory goes from "
        f"{gib(short.peak_bytes or 0)} to {gib(long.peak_bytes or 0)} and speed from "
        f"{count(short.tokens_per_second or 0)} to {count(long.tokens_per_second or 0)} tokens per second."
    )


def _accuracy(sweep: Sweep) -> str | None:
    errors = [abs(cell.error) for cell in sweep.measured if cell.error is not None]
    if not errors:
        return None
    return (
        f"Predicted and measured peak differ by {small_share(statistics.median(errors))} at the median of "
        f"{len(errors)} cell{'s' if len(errors) > 1 else ''}, by {small_share(max(errors))} at most."
    )


def _missing(sweep: Sweep) -> str | None:
    """Which cells have no measurement, and why."""
    kinds = {
        DOES_NOT_FIT: "predicted to need more than the limit, and not run",
        OUT_OF_MEMORY: "ran out of memory",
        FAILED: "failed",
        LEFT_OUT: "left out, because their tokens do not divide those of an update",
        NOT_REACHED: "not reached in the time given",
    }
    numbers = {text: sum(cell.status == status for cell in sweep.grid) for status, text in kinds.items()}
    parts = [f"{number} {text}" for text, number in numbers.items() if number]
    if not parts:
        return None
    return f"Of {len(sweep.grid)} cells {len(sweep.measured)} were measured; {', '.join(parts)}."


def shape_of(cell: Cell) -> tuple[int, int]:
    """(length, micro-batch size)."""
    return cell.length, cell.micro_batch_size


def _change(share: float) -> str:
    text = f"{100 * share:+.0f} %".replace("-", "−")
    return "±0 %" if text in ("+0 %", "−0 %") else text


def small_share(share: float) -> str:
    """A relative error in percent."""
    return f"{100 * share:.2g} %" if share >= 1e-4 else "less than 0.01 %"


def _and(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]


def subject(sweep: Sweep) -> str:
    """Model, device and method in two sentences."""
    known = [cell for cell in sweep.cells if cell.num_parameters]
    size = f" of {count(known[0].num_parameters or 0)} parameters" if known else ""
    precisions = sorted({{"no": "fp32"}.get(c.precision, c.precision) for c in sweep.measured if c.precision})
    steps = max((cell.steps for cell in sweep.measured), default=0)
    text = (
        f"{sweep.model[:1].upper()}{sweep.model[1:]}{size}, vocabulary of {sweep.vocab_size:,}"
        f"{', ' + ' and '.join(precisions) if precisions else ''}, on {sweep.device}. "
        f"Every optimizer step has {sweep.tokens_per_update:,} tokens: micro-batch × length × accumulation."
    )
    if steps:
        fewer = " or, if those took long, fewer" if any(cell.steps < steps for cell in sweep.measured) else ""
        text += f" Times are medians of {steps} step{'s' if steps > 1 else ''}{fewer}."
    return text
