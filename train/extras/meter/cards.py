"""Cards by name: memory, bandwidth and arithmetic rates. Needs no torch."""

from __future__ import annotations

import re
from typing import NamedTuple


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


# Rates and bandwidth: NVIDIA's data sheets and architecture white papers; rates that are printed only with sparsity are
# halved. A100-80: SXM (PCIe: 1.935e12 bytes/s); B200 and GB200: 7.7e12, as bus width and clock give it
# (github.com/pytorch/ao/pull/4002). GeForce from Ampere on: tensor cores do twice the fp32 of the data sheet. P100
# has no tensor cores: fp32's rate, of PCIe. AMD: its data sheets; each of the MI250's two chips is a device.
# Memory: what torch printed on such cards in public issues and notes (_CudaDeviceProperties(total_memory=...), or "GPU
# 0 has a total capacity of ..." of an out-of-memory error), rounded down; where drivers differ, the smaller figure.
# H200 NVL: not observed, taken from the H200. GH200: the one with 96 GB. RTX 3060 Ti, 4060 Ti, 4070 Ti: from cards of
# the same size.
# A product is the first row whose words all occur in its name; rows without memory only tell products apart.
CARDS: dict[str, Card] = {
    "gb200": Card(184.3, (10, 0), 7.7e12, 2500e12, 2500e12, None),
    "b200": Card(178.3, (10, 0), 7.7e12, 2250e12, 2250e12, None),
    "gh200": Card(94.5, (9, 0), 4.0e12, 989.4e12, 989.4e12, 66.9e12),
    "h200-nvl": Card(139.7, (9, 0), 4.8e12, 835.5e12, 835.5e12, 60e12),
    "h200": Card(139.7, (9, 0), 4.8e12, 989.4e12, 989.4e12, 66.9e12),
    "h100-nvl": Card(93.0, (9, 0), 3.9e12, 835.5e12, 835.5e12, 60e12),
    "h100-pcie": Card(79.1, (9, 0), 2.0e12, 756.5e12, 756.5e12, 51.2e12),
    "h100-hbm2e": Card(None, (9, 0), 2.0e12, 756.5e12, 756.5e12, 51.2e12),
    "h100": Card(79.1, (9, 0), 3.35e12, 989.4e12, 989.4e12, 66.9e12),
    "a100-80": Card(79.1, (8, 0), 2.039e12, 312e12, 312e12, 19.5e12),
    "a100-40": Card(39.3, (8, 0), 1.555e12, 312e12, 312e12, 19.5e12),
    "a100": Card(None, (8, 0), None, 312e12, 312e12, 19.5e12),
    "a10g": Card(22.0, (8, 6), 0.6e12, 70e12, 70e12, 31.5e12),
    "a10": Card(22.0, (8, 6), 0.6e12, 125e12, 125e12, 31.2e12),
    "l40s": Card(44.3, (8, 9), 0.864e12, 362e12, 362e12, 91.6e12),
    "l40": Card(44.3, (8, 9), 0.864e12, 181e12, 181e12, 90.5e12),
    "l4": Card(22.0, (8, 9), 0.3e12, 121e12, 121e12, 30.3e12),
    "t4": Card(14.5, (7, 5), 0.3e12, 65e12, None, 8.1e12),
    "v100s": Card(None, (7, 0), 1.134e12, 130e12, None, 16.4e12),
    "v100-pcie": Card(None, (7, 0), 0.9e12, 112e12, None, 14e12),
    "v100-32": Card(31.7, (7, 0), 0.9e12, 125e12, None, 15.7e12),
    "v100-16": Card(15.7, (7, 0), 0.9e12, 125e12, None, 15.7e12),
    "v100": Card(None, (7, 0), None, 125e12, None, 15.7e12),
    "rtx-6000-ada": Card(47.3, (8, 9), 0.96e12, 364.2e12, 364.2e12, 91.1e12),
    "a6000": Card(47.4, (8, 6), 0.768e12, 154.8e12, 154.8e12, 38.7e12),
    "rtx-5090": Card(31.3, (12, 0), 1.792e12, 209.5e12, 209.5e12, 104.8e12),
    "rtx-4090": Card(23.5, (8, 9), 1.008e12, 165.2e12, 165.2e12, 82.6e12),
    "rtx-3090-ti": Card(23.5, (8, 6), 1.008e12, 80e12, 80e12, 40e12),
    "rtx-3090": Card(23.5, (8, 6), 0.936e12, 71e12, 71e12, 35.6e12),
    "rtx-4080": Card(15.5, (8, 9), 0.7168e12, 97.5e12, 97.5e12, 48.7e12),
    "rtx-4070-ti": Card(11.5, (8, 9), 0.5042e12, 80.2e12, 80.2e12, 40.1e12),
    "rtx-4070": Card(11.5, (8, 9), 0.5042e12, 58.3e12, 58.3e12, 29.15e12),
    "rtx-4060-ti-16": Card(15.5, (8, 9), 0.288e12, 44.1e12, 44.1e12, 22.06e12),
    "rtx-4060-ti-8": Card(7.6, (8, 9), 0.288e12, 44.1e12, 44.1e12, 22.06e12),
    "rtx-4060-ti": Card(None, (8, 9), 0.288e12, 44.1e12, 44.1e12, 22.06e12),
    "rtx-3060-ti": Card(7.6, (8, 6), 0.448e12, 32.4e12, 32.4e12, 16.2e12),
    "rtx-3060": Card(11.6, (8, 6), 0.36e12, 25.5e12, 25.5e12, 12.74e12),
    "rtx-2080-ti": Card(10.7, (7, 5), 0.616e12, 53.8e12, None, 13.4e12),
    "p100": Card(15.8, (6, 0), 0.732e12, 9.3e12, None, 9.3e12),
    "mi300x": Card(191.6, None, 5.3e12, 1307.4e12, 1307.4e12, 163.4e12),
    "mi250": Card(63.9, None, 1.638e12, 181e12, 181e12, 45.3e12),
    "mi250x": Card(63.9, None, 1.638e12, 191.5e12, 191.5e12, 47.9e12),
}
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
