"""The table of cards, whose figures are printed, against what their chips and memory give by count and clock."""

import pytest

from train.extras.meter.cards import CARDS

# Multiprocessors, MHz, operations of each in a cycle with fp16; bits of memory at once, Gbit/s of each, GB sold.
Chip = tuple[int, int, int, int, float, int]
CHIPS: dict[tuple[int, int] | None, dict[str, Chip]] = {
    (6, 0): {"p100": (56, 1303, 128, 4096, 1.43, 16)},
    (7, 0): {
        "v100s": (80, 1597, 1024, 4096, 2.214, 32),
        "v100-pcie": (80, 1380, 1024, 4096, 1.755, 32),
        "v100-32": (80, 1530, 1024, 4096, 1.755, 32),
        "v100-16": (80, 1530, 1024, 4096, 1.755, 16),
        "v100": (80, 1530, 1024, 4096, 1.755, 32),
    },
    (7, 5): {"t4": (40, 1590, 1024, 256, 10, 16), "rtx-2080-ti": (68, 1545, 512, 352, 14, 11)},
    (8, 0): {
        "a100-80": (108, 1410, 2048, 5120, 3.186, 80),
        "a100-40": (108, 1410, 2048, 5120, 2.43, 40),
        "a100": (108, 1410, 2048, 5120, 2.43, 40),
    },
    (8, 6): {
        "a10g": (80, 1710, 512, 384, 12.5, 24),
        "a10": (72, 1695, 1024, 384, 12.5, 24),
        "a6000": (84, 1800, 1024, 384, 16, 48),
        "rtx-3090-ti": (84, 1860, 512, 384, 21, 24),
        "rtx-3090": (82, 1695, 512, 384, 19.5, 24),
        "rtx-3060-ti": (38, 1665, 512, 256, 14, 8),
        "rtx-3060": (28, 1777, 512, 192, 15, 12),
    },
    (8, 9): {
        "l40s": (142, 2520, 1024, 384, 18, 48),
        "l40": (142, 2490, 512, 384, 18, 48),
        "l4": (58, 2040, 1024, 192, 12.5, 24),
        "rtx-6000-ada": (142, 2505, 1024, 384, 20, 48),
        "rtx-4090": (128, 2520, 512, 384, 21, 24),
        "rtx-4080": (76, 2505, 512, 256, 22.4, 16),
        "rtx-4070-ti": (60, 2610, 512, 192, 21, 12),
        "rtx-4070": (46, 2475, 512, 192, 21, 12),
        "rtx-4060-ti-16": (34, 2535, 512, 128, 18, 16),
        "rtx-4060-ti-8": (34, 2535, 512, 128, 18, 8),
        "rtx-4060-ti": (34, 2535, 512, 128, 18, 8),
    },
    (9, 0): {
        "gh200": (132, 1830, 4096, 6144, 5.2, 96),
        "h200-nvl": (132, 1545, 4096, 6144, 6.25, 141),
        "h200": (132, 1830, 4096, 6144, 6.25, 141),
        "h100-nvl": (132, 1545, 4096, 6144, 5.1, 94),
        "h100-pcie": (114, 1620, 4096, 5120, 3.19, 80),
        "h100-hbm2e": (114, 1620, 4096, 5120, 3.19, 80),
        "h100": (132, 1830, 4096, 5120, 5.23, 80),
    },
    (12, 0): {"rtx-5090": (170, 2407, 512, 512, 28, 32)},
    None: {
        "mi300x": (304, 2100, 2048, 8192, 5.2, 192),
        "mi250": (104, 1700, 1024, 4096, 3.2, 64),
        "mi250x": (110, 1700, 1024, 4096, 3.2, 64),
    },
}


@pytest.mark.parametrize(
    ("name", "capability", "chip"), [(name, key, chip) for key, chips in CHIPS.items() for name, chip in chips.items()]
)
def test_figures_are_those_that_chip_and_memory_give(name: str, capability: tuple[int, int] | None, chip: Chip):
    card, (processors, mhz, operations, bits, gigabits, sold_gb) = CARDS[name], chip
    assert card.compute_capability == capability
    assert card.fp16 == pytest.approx(processors * mhz * 1e6 * operations, rel=0.015)
    assert card.bf16 == (card.fp16 if capability is None or capability >= (8, 0) else None)
    lanes = 128 if capability is not None and capability < (8, 6) else 256  # of fp32, two operations each
    # A10G and Hopper: other clocks without tensor cores.
    assert card.fp32 == pytest.approx(processors * mhz * 1e6 * lanes, rel=0.16)
    # T4: 300 GB/s in the data sheet.
    assert card.bytes_per_second in (None, pytest.approx(bits / 8 * gigabits * 1e9, rel=0.07))
    assert card.memory_gib is None or 0.9 * sold_gb < card.memory_gib < sold_gb


def test_every_card_has_a_chip():
    """Other than Blackwell's of data centres, whose clock is not published."""
    assert CARDS.keys() - {name for chips in CHIPS.values() for name in chips} == {"b200", "gb200"}
