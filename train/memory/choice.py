"""``gradient_checkpointing: auto``: the least recomputation whose step is predicted to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from train.memory.plan import Recompute, largest_fitting
from train.outputs_log import gib
from train.records import UserError

SMALLEST_FIRST = (
    Recompute("full", offload=True),
    Recompute("full"),
    Recompute("selective"),
    *(Recompute("selective", every) for every in (2, 3, 4, 8)),
    Recompute("none"),
)
"""What is chosen from: each needs more memory, and takes less time, than the one before it.

Every n layers is selective: what attention gives back is little, and at long sequences dear to compute again."""


def choose(
    needs: Callable[[dict[str, Any]], int], room_bytes: int, device_type: str, offload: bool
) -> tuple[dict[str, Any], str]:
    """The settings to take, by flag, and a line for a person.

    Args:
        needs: bytes that a step with these settings is predicted to need.
        room_bytes: what may be taken.
        offload: whether the inputs of checkpointed layers are to rest in host memory in any case.

    Raises:
        UserError: nothing fits, or none of it can be predicted.
    """
    ways = [way for way in SMALLEST_FIRST if device_type != "cpu" or not way.offload]
    flags = [_flags(way, offload) for way in ways]
    if offload and device_type != "cpu":
        ways, flags = ways[1:], flags[1:]  # the first two are the same
    needed: dict[int, int] = {}
    problems: list[UserError] = []

    def needs_of(number: int) -> int | None:
        try:
            needed[number] = needs(flags[number - 1])
        except UserError as error:
            problems.append(error)
            return None
        return needed[number]

    numbers = range(1, len(ways) + 1)
    best = largest_fitting(numbers, needs_of, room_bytes, first=numbers[-1])
    if best is None:
        if not needed:
            raise problems[0]
        raise UserError(
            f"gradient_checkpointing: auto: {_words(flags[min(needed) - 1])} is predicted to need "
            f"{gib(needed[min(needed)])}, and {gib(room_bytes)} may be taken. python -m train.memory plan finds "
            "settings that fit."
        )
    whole = needed.get(numbers[-1])
    without = f"; without it {gib(whole)}" if whole is not None and best != numbers[-1] else ""
    chosen = flags[best - 1]
    line = f"gradient_checkpointing: {_words(chosen)}, predicted to take {gib(needed[best])} of {gib(room_bytes)} that "
    return chosen, f"{line}may be taken{without}"


def _flags(way: Recompute, offload: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": way.gradient_checkpointing,
        "gradient_checkpointing_every_n_layers": way.every_n_layers,
        "gradient_checkpointing_offload": (offload or way.offload) and way.gradient_checkpointing != "none",
    }


def _words(flags: dict[str, Any]) -> str:
    every = flags["gradient_checkpointing_every_n_layers"]
    return (
        flags["gradient_checkpointing"]
        + (f" every {every} layers" if every > 1 else "")
        + (" with offload" if flags["gradient_checkpointing_offload"] else "")
    )
