"""Cards by name: memory, bandwidth and arithmetic rates. Needs no torch."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Card(NamedTuple):
    """One model of card; None where there is no figure to rely on, or no bf16 in hardware.

    Rates are dense FLOP/s of matrix products with fp32 accumulation, of fp32 without tensor cores (TF32 off).
    """

    memory_gib: float | None  # ``total_memory`` as torch reports it, GiB of 2^30: less than what the card is sold with
    compute_capability: tuple[int, int] | None  # None: not NVIDIA's
    bytes_per_second: float | None
    fp16: float
    bf16: float | None
    fp32: float | None
    context_mib: float | None  # of a process on the card: the CUDA context and kernels, outside of torch's allocator


def _cards() -> Iterator[tuple[str, Card]]:
    with Path(__file__).with_name("cards.csv").open(encoding="utf-8", newline="") as file:
        for name, memory, capability, *rates in list(csv.reader(line for line in file if line[0] != "#"))[1:]:
            known: Any = tuple(map(int, capability.split("."))) if capability else None
            figures: list[Any] = [float(figure) if figure else None for figure in (memory, *rates)]
            yield name, Card(figures[0], known, *figures[1:])


CARDS = dict(_cards())  # a product is the first whose words all occur in its name; the file names its sources
_OTHER_CHIP = re.compile(r"\b(laptop|max|mig|d|super|\d+[abcq])\b")
"""Words that mark a smaller chip, or a slice of one as 16Q does, sold under the name of a card above."""


def find_card(device_name: str) -> Card | None:
    """The card that ``torch.cuda.get_device_name`` names, such as "NVIDIA A100-SXM4-80GB"; None if unknown, or MIG."""
    words = set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=\d)gb\b", "", device_name.lower())))
    if _OTHER_CHIP.search(device_name.lower()):
        return None
    return next((card for name, card in CARDS.items() if words.issuperset(name.split("-"))), None)


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """The published dense rate of a device (:func:`find_card`) in fp16, bf16, tf32, or no (fp32 with TF32 off).

    None for a device that is not known, and for a type that it cannot multiply.
    """
    field = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "tf32": "bf16"}.get(precision, "")
    rate = getattr(find_card(device_name), field, None)
    # half of bf16's rate in the data sheet of every card above that has both
    return rate / 2 if rate and precision == "tf32" else rate
