"""Names what is wrong with a run: pure functions of its rows ``health``.

The bounds stand between what small models with and without these problems showed in 100 steps. Smallest norm of a
block over the largest of a layer: healthy ≥ 4e-3, deep and not normalised ≤ 2e-7. Growth of activations: healthy ≤ 13,
learning rate × 30 ≥ 480. Norm of the gradient: healthy ≤ 9, large weights ≥ 4e7. fp16's 5 %: arXiv 1710.03740.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

Rows: TypeAlias = Sequence[Mapping[str, Any]]
VANISHED, EXPLODED, JUMP = 1e-4, 1e3, 100.0  # of the largest norm; a norm; times the usual norm
HIGH_GROWTH, LOST_SHARE, NEAR_LARGEST = 100.0, 0.05, 65504 / 2  # of activations; these two of fp16
NORMALISE = "Normalise layers (LayerNorm, RMSNorm), add residual connections"
LOWER_RATE = "Divide learning_rate by 10 or warm up longer; scripts/study.py learning_rate finds a rate"


class Problem(NamedTuple):
    """What is wrong, the layer where it is worst, what shows it, and what helps."""

    name: str
    layer: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} in {self.layer}: {self.finding}. {self.remedy}."


def problems_in(rows: Rows) -> list[Problem]:
    """What the newest of ``rows`` shows next to those before it."""
    if rows[-1]["grad_norm"] is None:  # a loss scale that is too high makes such steps, and is lowered
        found = [exploding(rows)] if rows[-1]["loss_scale"] is None else []
    else:
        found = [learning_rate_too_high(rows), fp16_trouble(rows) or vanishing(rows), exploding(rows)]
    return list(filter(None, found))


def largest(row: Mapping[str, Any], values: Sequence[float | None]) -> tuple[float, str]:
    """The largest of a figure, and its layer."""
    return max((value or 0.0, layer) for value, layer in zip(values, row["layers"], strict=True))


def learning_rate_too_high(rows: Rows) -> Problem | None:
    """Activations have grown many times."""
    pairs = zip(rows[0]["activations"], rows[-1]["activations"], strict=True)
    growth, layer = largest(rows[-1], [now and first and now / max(first, 1.0) for first, now in pairs])
    if growth <= HIGH_GROWTH:
        return None
    finding = f"its activations are {growth:.3g} times those at the start"
    return Problem("learning rate too high", layer, finding, LOWER_RATE)


def vanishing(rows: Rows) -> Problem | None:
    """A block's gradient is next to nothing, in two rows in a row; where it was not at first, a rate is too high."""
    names = rows[-1]["layers"]

    def small(row: Mapping[str, Any]) -> set[int]:  # without those that the step did not use: no norm, no activations
        bound, norms = VANISHED * largest(row, row["norms"])[0], row["norms"]
        return {i for i in blocks if norms[i] is not None and norms[i] < bound and (norms[i] or row["activations"][i])}

    blocks = [place for place, layer in enumerate(names) if layer.rpartition(".")[2].isdigit()]
    if len(rows) < 2 or not (both := small(rows[-1]) & small(rows[-2])):
        return None
    norms = rows[-1]["norms"]
    worst, (norm, where) = min(sorted(both), key=lambda place: norms[place]), largest(rows[-1], norms)
    finding = f"its norm is {norms[worst]:.2g}, that of {where} {norm:.2g} ({len(both)} of {len(blocks)} blocks)"
    if worst not in small(rows[0]):
        return Problem("learning rate too high", names[worst], f"since the start {finding}", LOWER_RATE)
    remedy = f"{NORMALISE}, or use ReLU or GELU with an initialisation that suits them"
    return Problem("vanishing gradient", names[worst], finding, remedy)


def exploding(rows: Rows) -> Problem | None:
    """The gradient is huge, much larger than usual, or not finite."""
    row, usual = rows[-1], [r["grad_norm"] for r in rows[:-1] if r["grad_norm"] is not None]
    norm, layer = largest(row, [float("inf") if value is None else value for value in row["norms"]])
    if row["grad_norm"] is not None and norm <= EXPLODED and (len(usual) < 5 or norm <= JUMP * median(usual)):
        return None
    remedy = f"{NORMALISE}, initialise with smaller weights, clip (max_grad_norm: 1.0), lower learning_rate"
    return Problem("exploding gradient", layer, f"its norm is {norm:.2g}", remedy)


def fp16_trouble(rows: Rows) -> Problem | None:
    """fp16 makes zero of more than a few elements of a gradient, or activations come close to its largest number."""
    row, scale = rows[-1], rows[-1]["loss_scale"]
    # All zero is underflow only where it stays so: LoRA's first matrices have no gradient in the first step.
    flushed = row["flushed" if scale is None else "flushed_scaled"]
    layers = zip(flushed, row["norms"], rows[-2:][0]["norms"], row["activations"], strict=True)
    lost = [1.0 if norm == last == 0 and used and len(rows) > 1 else some for some, norm, last, used in layers]
    share, layer = largest(row, lost)
    activation, where = largest(row, row["activations"])
    if row["fp16"] and share > LOST_SHARE:
        finding = f"with {'no loss scale' if scale is None else f'a loss scale of {scale:g}'} {share:.0%} becomes zero"
        return Problem("fp16 underflow", layer, finding, "Use bf16 or, without a loss scale, mixed_precision: fp16")
    if row["fp16"] and activation > NEAR_LARGEST:
        finding = f"activations reach {activation:.3g} of 65,504"
        return Problem("fp16 overflow", where, finding, f"Use bf16. {NORMALISE}")
    return None
