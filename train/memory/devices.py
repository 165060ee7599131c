"""Devices to plan for: the memory that a process can use, memory bandwidth and arithmetic rates."""

import re
from dataclasses import dataclass

from train.extras.meter.cards import CARDS, find_card
from train.records import UsageError

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Device:
    """One device, as far as it is known."""

    name: str
    total_bytes: int  # as torch reports ``total_memory``: less than what the card is sold with
    context_bytes: int = 0  # of a process on one device: the CUDA context and kernels, outside of the allocator
    compute_capability: tuple[int, int] | None = None  # (major, minor); None: no CUDA device, or unknown
    memory_bytes_per_second: float | None = None  # by the data sheet; None: unknown, as are all speeds then

    @property
    def kind(self) -> str:
        """As torch calls the type of device."""
        return next((kind for kind in ("cpu", "mps") if self.name.startswith(kind)), "cuda")


def find_device(text: str) -> Device:
    """The device of a name such as ``h200``, ``a100-80``, ``RTX 4090`` or ``cpu``, or of a size such as ``24GiB``.

    Also the name that torch gives a card. A size is taken as the memory that is reported (GiB: 2^30 bytes, GB: 10^9),
    on a card whose speed is unknown. ``mps 16GiB`` is Apple's, with what Metal recommends to take at most. ``cpu`` is
    what this machine, or this process's control group, has free; ``mps`` is this machine's. The start of a name is
    enough where no other begins so. Raises UsageError for any other.
    """
    given = text.strip().lower()
    if size := re.fullmatch(r"(mps[\s:-]*)?(\d+(?:\.\d+)?)\s*g(i?)b?", given):
        unit, unit_bytes = ("GiB", _GIB) if size[3] else ("GB", 10**9)
        name, total_bytes = f"{float(size[2]):g}{unit}", int(float(size[2]) * unit_bytes)
        if size[1]:
            return Device(f"mps {name}", total_bytes)
        if total_bytes <= _context_bytes():
            raise UsageError(f"device {name!r}: a CUDA context alone takes that. Give a whole card's memory, as 24GiB.")
        return Device(name, total_bytes, _context_bytes())
    if given == "cpu":
        from train.extras.host_memory import free_host_bytes  # here: --help does not wait for torch

        return Device(name="cpu", total_bytes=free_host_bytes())
    if given.startswith("mps"):
        import torch

        if given == "mps" and torch.backends.mps.is_available():
            return Device("mps", torch.mps.recommended_max_memory())
        raise UsageError(f"device {text!r}: Apple's GPUs take part of the machine's memory. Say how much: 'mps 16GiB'.")
    short, names = given.removeprefix("rtx"), [name for name, card in CARDS.items() if card.memory_gib]
    card, start = find_card(given) or find_card(f"rtx {short}"), "-".join(re.findall(r"[a-z0-9]+", short)) or "?"
    begins = re.compile(rf"(rtx-)?{re.escape(start)}(?!-ti\b)(?!(?<=\d\d)\d)")  # no h200 for an h20
    meant = [n for n in names if CARDS[n] is card] or [n for n in names if begins.match(n)]
    if said := re.search(r"(\d+)\s*gb", given):  # a card of another size has the name, too
        meant = [n for n in meant if 0.8 < (CARDS[n].memory_gib or 0) / int(said[1]) < 1.1]
    if len(meant) > 1:
        raise UsageError(f"device {text!r} may be {' or '.join(meant)}. Say which.")
    if not meant:
        others = "Say how much memory it has, such as 24GiB (Apple's chips: 'mps 16GiB')"
        raise UsageError(f"unknown device {text!r}. {others}, or one of {', '.join([*names, 'cpu'])}.")
    card = CARDS[meant[0]]
    total_bytes, context_bytes = int((card.memory_gib or 0) * _GIB), _context_bytes(card.compute_capability)
    return Device(meant[0], total_bytes, context_bytes, card.compute_capability, card.bytes_per_second)


def this_device() -> Device:
    """The current CUDA device with the memory and capability that it reports; else this machine's MPS, or its CPU."""
    import torch

    if not torch.cuda.is_available():
        return find_device("mps" if torch.backends.mps.is_available() else "cpu")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    card, is_nvidia = find_card(properties.name), torch.version.hip is None  # AMD counts its chips differently
    capability, bandwidth = (properties.major, properties.minor) if is_nvidia else None, card and card.bytes_per_second
    return Device(properties.name, properties.total_memory, _context_bytes(capability), capability, bandwidth)  # type: ignore


def nccl_buffer_bytes(group_size: int) -> int:
    """What NCCL takes on each device for one process group, outside of PyTorch's allocator: a rough estimate.

    As measured among 4 A100 with NVLink, after an all-reduce: 544 MB in groups of two, 688 MB in larger ones
    (github.com/NVIDIA/nccl/issues/964; MB taken as MiB). It grows with faster links; 1.6 GB were seen as well (issue
    864). All-to-all took 3.3 GB more on 8 H100 (issue 1685) and is not included.
    """
    return {1: 0, 2: 544}.get(group_size, 688) * _MIB


def _context_bytes(capability: tuple[int, int] | None = None) -> int:
    known = {card.compute_capability: card.context_mib for card in CARDS.values() if card.context_mib}
    return int(known.get(capability, 600)) * _MIB  # 600: of other cards
