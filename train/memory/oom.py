"""Out-of-memory messages: which they are, and the figures in them.

All figures are read from the wording of torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, from version 2.11
on); most other messages give at most the size that was asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# All patterns are for text without white space, see _squeezed.
_SIZE = r"(\d+(?:\.\d*)?)(bytes?|[KMGTPE]i?B)"
_FIGURES = {
    "requested_bytes": r"(?:allocate(?!d)|calloc)\D{0,20}?SIZE",
    "total_bytes": "totalcapaci?tyofSIZE",
    "free_bytes": "ofwhichSIZEisfree",
    "process_bytes": "thisprocesshasSIZEmemoryinuse",
    "allocated_bytes": "SIZEisallocatedbyPyTorch",
    "reserved_unallocated_bytes": "SIZEisreservedbyPyTorchbutunallocated",
}
_TORCH = "outofmemory.Triedtoallocate"
_HOST = (
    r"DefaultCPUAllocator|(?<!OutOf)MemoryError|bad_alloc|(?i:cannotallocatememory|oom[-_]kill|killedprocess)"
    r"|DataLoaderworker\(pid\S{3,40}bysignal:(?:Killed|Bus)|(?i:exit(?:edwith(?:exit)?)?(?:code|status):?(?:137|-9))"
)
_ANY = (  # not the bare words: advice about memory is not a message about it
    rf"{_HOST}|(?:^|[A-Z.:\])]|backend|(?i:error|failure))(?i:outofmemory)(?![a-z])"
    "|(?i:alloc(?:ation)?_failed|cublas_status_not_initialized|(?:tried|unable|failed)to(?:cuda)?[cm]?alloc)"
)


@dataclass(frozen=True)
class OutOfMemory:
    """The figures of one message in bytes; None where it does not give them."""

    on_host: bool  # in main memory, not on a device
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None  # of this process: PyTorch's reserve, the context, libraries
    allocated_bytes: int | None = None  # in tensors
    reserved_unallocated_bytes: int | None = None  # in no tensor
    other_processes: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of each process that the message names

    @property
    def reserved_bytes(self) -> int | None:
        """Held by PyTorch, in tensors or not."""
        return _total(self.allocated_bytes, self.reserved_unallocated_bytes)

    @property
    def other_processes_bytes(self) -> int | None:
        """Held by the processes that the message names, or else what this process does not explain."""
        named = sum(size for _, size in self.other_processes)
        return named if self.other_processes else self._rest(self.process_bytes)

    @property
    def available_bytes(self) -> int | None:
        """What PyTorch could have of the device as it was: its own reserve and the free rest."""
        return _total(self.free_bytes, self.reserved_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """Neither free nor reserved by this PyTorch: the driver's context, libraries and other processes."""
        return self._rest(self.reserved_bytes)

    def _rest(self, used_bytes: int | None) -> int | None:
        known = _total(self.free_bytes, used_bytes)
        return None if known is None or self.total_bytes is None else max(0, self.total_bytes - known)


def _total(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def parse_oom(message: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message, also from within a traceback or a log; None where there is none.

    Of several messages the first one with torch's figures counts. Sizes are as exact as the message: two decimals.
    """
    text = _squeezed(message)
    if (found := re.search(_TORCH, text) or re.search(_ANY, text)) is None:
        return None
    text = text[found.start() : found.start() + 1000]
    text = text[: text.find(_TORCH, 1) if _TORCH in text[1:] else None]  # up to another rank's message
    on_host = not text.startswith(_TORCH) and re.search(_HOST, text) is not None
    figures = {name: _size(pattern, text) for name, pattern in _FIGURES.items()}
    device, processes = re.search(r"GPU(\d+)has", text), re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", text)
    others = tuple((int(process), _bytes(*size)) for process, *size in processes)
    return _own_process_found(
        OutOfMemory(on_host, int(device[1]) if device else None, **figures, other_processes=others)
    )


def _squeezed(message: str) -> str:
    """``message`` without colours, ranks such as ``[rank0]:`` before its lines, quotes and any white space.

    Terminals and web pages break these long lines anywhere, also within a word or a number.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", message)
    return re.sub(r"[\s\"'`\\]+", "", re.sub(r"^\s*\[\w+\]:", "", text, flags=re.MULTILINE))


def _bytes(number: str, unit: str) -> int:
    # Allocators mean powers of two by GB and MB too.
    return round(float(number) * 2 ** (10 * "bKMGTPE".index("b" if unit.startswith("b") else unit[0].upper())))


def _size(pattern: str, text: str) -> int | None:
    """The size at ``SIZE`` of ``pattern``."""
    found = re.search(pattern.replace("SIZE", _SIZE), text, re.I)
    return _bytes(*found.groups()) if found else None


def _own_process_found(oom: OutOfMemory) -> OutOfMemory:
    """Takes this process out of the list of the others, where a container's driver knows it by another process id.

    It must be among them if what no listed process holds is too little for what PyTorch has reserved.
    """
    reserved = oom.reserved_bytes or 0
    large_enough = [entry for entry in oom.other_processes if entry[1] >= 0.99 * reserved]
    if oom.process_bytes is not None or oom.outside_bytes is None or not large_enough:
        return oom
    if oom.outside_bytes + reserved - sum(size for _, size in oom.other_processes) >= 0.9 * reserved:
        return oom
    own = min(large_enough, key=lambda entry: entry[1])
    return replace(oom, process_bytes=own[1], other_processes=tuple(e for e in oom.other_processes if e is not own))
