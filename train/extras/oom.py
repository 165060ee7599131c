"""Out-of-memory messages: which they are, and the figures in them.

All figures are read from the wording of torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp, from version 2.11
on); other messages give at most the size that was asked for.
"""

import re
from dataclasses import dataclass, replace

# All patterns are for text without white space, see squeezed.
_SIZE = r"(\d+(?:\.\d*)?)(bytes?|[KMGTPE]i?B)"
_FIGURES = {
    "requested_bytes": r"(?:allocate(?!d)|calloc|invalidbuffersize:|Requested:)\D{0,20}?SIZE",
    "total_bytes": r"totalcapaci?tyofSIZE",
    "free_bytes": "ofwhichSIZEisfree",
    "process_bytes": "thisprocesshasSIZEmemoryinuse",
    "limit_bytes": "SIZEallowed;",
    "allocated_bytes": "SIZEisallocatedbyPyTorch",
    "reserved_unallocated_bytes": "SIZEisreservedbyPyTorchbutunallocated",
}
_CONTEXT_BYTES = 2**30  # upper bound of the driver's context and libraries of one process; 0.3 to 0.7 GiB is common
_TORCH = "outofmemory.Triedtoallocate"
_HOST = (  # srun: of a step's control group
    r"DefaultCPUAllocator|(?<!OutOf)MemoryError|bad_alloc|(?i:cannotallocatememory|oom[-_]?kill|killedprocess)"
    r"|pagingfileistoosmall|srun:\S{0,60}OutOfMemory"
)
_ANY = (  # not the bare words: advice about memory is not a message about it
    rf"{_HOST}|(?:^|[A-Z.:\])]|backend|(?i:error|failure)\d*)(?i:outofmemory)(?!(?!atline)[a-z])"
    "|(?i:alloc(?:ation)?_failed|(?:tried|unable|failed)to(?:cuda)?[cm]?alloc|out_of_(?:device_)?memory)"
    "|(?i:status_not_initializedwhencallingcublascreate|wouldexceedallowedmemory|invalidbuffersize:)"
)


@dataclass(frozen=True)
class OutOfMemory:
    """The figures of one message in bytes; 0 where it does not give them."""

    on_host: bool  # in main memory, not on a device
    device_index: int | None = None
    requested_bytes: int = 0
    total_bytes: int = 0
    free_bytes: int = 0
    process_bytes: int = 0  # of this process: PyTorch's reserve, the context, libraries
    limit_bytes: int = 0  # which is set for this process
    allocated_bytes: int = 0  # in tensors
    reserved_unallocated_bytes: int = 0  # in no tensor
    other_processes: tuple[tuple[int, int], ...] = ()  # (process id, bytes) of each process that the message names

    @property
    def reserved_bytes(self) -> int:
        """Held by PyTorch, in tensors or not."""
        return self.allocated_bytes + self.reserved_unallocated_bytes

    @property
    def available_bytes(self) -> int:
        """What PyTorch could have of the device as it was: its own reserve and the free rest, up to its limit."""
        return min(self.free_bytes + self.reserved_bytes, self.limit_bytes or 2**63)

    @property
    def other_processes_bytes(self) -> int:
        """Held by the processes that the message names, or else what this process and the driver do not explain."""
        named = sum(size for _, size in self.other_processes)
        own = self.process_bytes or (self.reserved_bytes and self.reserved_bytes + _CONTEXT_BYTES)
        return named or (max(0, self.total_bytes - self.free_bytes - own) if own else 0)


def parse_oom(message: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message, also from within a traceback or a log; None where there is none.

    Of several messages the first one with torch's figures counts. Sizes are as exact as the message: two decimals.
    """
    text = squeezed(message)
    if (found := re.search(_TORCH, text) or re.search(_ANY, text)) is None:
        return None
    text = text[found.start() : found.start() + 1000]
    text = text[: text.find(_TORCH, 1) if _TORCH in text[1:] else None]  # up to another rank's message
    on_host = not text.startswith(_TORCH) and re.search(_HOST, text) is not None
    found = {name: re.search(pattern.replace("SIZE", _SIZE), text, re.I) for name, pattern in _FIGURES.items()}
    figures = {name: _bytes(*size.groups()) for name, size in found.items() if size}
    device, processes = re.search(r"GPU(\d+)has", text), re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", text)
    others = tuple((int(process), _bytes(*size)) for process, *size in processes)
    oom = OutOfMemory(on_host, int(device[1]) if device else None, **figures, other_processes=others)
    return _own_process_found(oom)


def squeezed(message: str) -> str:
    """``message`` without colours, ranks before lines, quotes and white space: terminals break its lines anywhere."""
    text = re.sub(r"\x1b\[[\d;]*m", "", message)
    return re.sub(r"[\s\"'`\\]+", "", re.sub(r"^\s*\[\w+\]:", "", text, flags=re.MULTILINE))


def _bytes(number: str, unit: str) -> int:
    # Allocators mean powers of two by GB and MB too. 2^64 bytes stand for a size that Windows does not tell.
    size = round(float(number) * 2 ** (10 * "BKMGTPE".index(unit[0].upper())))
    return size if size < 2**63 else 0


def _own_process_found(oom: OutOfMemory) -> OutOfMemory:
    """Takes this process out of the list of the others, where a container's driver knows it by another process id.

    It must be among them if what no listed process holds is too little for what PyTorch has reserved.
    """
    reserved, used = oom.reserved_bytes, oom.total_bytes - oom.free_bytes
    large_enough = [entry for entry in oom.other_processes if entry[1] >= 0.99 * reserved]
    if oom.process_bytes or not large_enough or used - sum(size for _, size in oom.other_processes) >= 0.9 * reserved:
        return oom
    own = min(large_enough, key=lambda entry: entry[1])
    return replace(oom, process_bytes=own[1], other_processes=tuple(e for e in oom.other_processes if e is not own))
