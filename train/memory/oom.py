"""Out-of-memory messages: which they are, and the figures in them.

The figures are read from the wordings of torch's CUDA allocators from version 2.11 on
(c10/cuda/CUDACachingAllocator.cpp, c10/cuda/CUDAMallocAsyncAllocator.cpp). Of any other message only the size that was
asked for is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

_SIZE = r"(\d+(?:\.\d*)?)(bytes?|[KMGTPE]i?B)"


def _figure(pattern: str) -> Any:
    """A field that is read at SIZE of ``pattern``, in text without white space, see :func:`_squeezed`."""
    return field(default=None, metadata={"pattern": pattern})


@dataclass(frozen=True)
class OutOfMemory:
    """The figures of one message in bytes; None where it does not give them."""

    backend: str  # CUDA, host, or GPU: some other device
    device_index: int | None = None
    library: str | None = None  # who asked, where it was not PyTorch's allocator: the driver, cuBLAS, cuDNN or NCCL
    requested_bytes: int | None = _figure("(?:Triedtoallocate(?:morethan)?|Requested:)SIZE")
    total_bytes: int | None = _figure("(?:totalcapaci?tyof|Devicelimit:)SIZE")
    free_bytes: int | None = _figure(r"ofwhichSIZEisfree|accordingtoCUDA\):SIZE")
    process_bytes: int | None = _figure("thisprocesshasSIZEmemoryinuse")  # PyTorch's reserve, the context, libraries
    allocated_bytes: int | None = _figure("SIZEisallocatedbyPyTorch|Currentlyallocated:SIZE")  # in tensors
    reserved_unallocated_bytes: int | None = _figure("SIZEisreservedbyPyTorchbutunallocated")  # in no tensor
    private_pools_bytes: int | None = _figure("SIZEallocatedinprivatepools")  # of CUDA graphs
    allowed_bytes: int | None = _figure(r"SIZEallowed|memoryfraction\):SIZE")  # torch's memory fraction
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
        room = _total(self.free_bytes, self.reserved_bytes)
        return room if room is None or self.allowed_bytes is None else min(room, self.allowed_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """Neither free nor reserved by this PyTorch: the driver's context, libraries and other processes."""
        return self._rest(self.reserved_bytes)

    def _rest(self, used_bytes: int | None) -> int | None:
        known = _total(self.free_bytes, used_bytes)
        return None if known is None or self.total_bytes is None else max(0, self.total_bytes - known)


def _total(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


_ANSI = re.compile(r"\x1b\[[\d;?]*[ -/]*[@-~]|\[\d+(?:;\d+)*m")
_LOG_PREFIX = re.compile(
    r"""^(?: \s+ | [#>|"'`-]+ | \[[^\]]*\]:? | \d+:\s | \([^()]*\b(?:pid|rank)=\d+[^()]*\)
      | (?:\d{4}-)?\d\d-\d\d[T\s] | \d\d:\d\d:\d\d[.,\d]*Z? | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:? )+""",
    re.VERBOSE,
)
# All patterns are for text without white space, see _squeezed.
_CUDA_STARTS = (
    r"CUDAoutofmemory\.Triedtoallocate|Allocationondevice\d+wouldexceedallowedmemory",
    r"CUDAoutofmemory(?:\.|$)",
)
_HOST = (
    r"DefaultCPUAllocator|(?<!OutOf)MemoryError|bad_alloc|HOST_ALLOCATION_FAILED"
    r"|(?i:cannotallocatememory|oom[-_]kill|killedprocess)|DataLoaderworker\(pid\S{3,40}bysignal:(?:Killed|Bus)"
    r"|(?i:exit(?:edwith(?:exit)?)?(?:code|status):?(?:137|-9))"
)
_ANY = (  # not the bare words: advice about memory is not a message about it
    rf"{_HOST}|(?:[:\])]|(?i:error|failure)\d*)(?i:outofmemory)|(?:^|[A-Z.]|backend)(?i:outofmemory)(?![a-z])"
    "|(?i:out_of_(?:device_)?memory|alloc(?:ation)?_failed|cublas_status_not_initialized|notenoughmemory|resource_exhausted)"
    "|(?i:(?:tried|unable|failed)to(?:cuda)?(?:c|m)?alloc|can(?:no)?tallocate)"
)
_ANY_REQUEST = r"(?:allocat(?:e(?!d)|ing)|calloc|malloc)\D{0,20}?SIZE"


def parse_oom(message: str) -> OutOfMemory | None:
    """The figures of an out-of-memory message, also from within a traceback or a log; None where there is none.

    Of several messages the first one counts. Sizes are as exact as the message: two decimals of their unit.
    """
    text = _squeezed(message)
    for pattern in _CUDA_STARTS:
        _, *messages = re.split(f"(?={pattern})", text)
        if messages:
            return _read_cuda(messages[0])
    found = re.search(_ANY, text)
    return None if found is None else _read_any(text[max(0, found.start() - 80) : found.start() + 400])


def _squeezed(message: str) -> str:
    """``message`` without colours, log prefixes, quotes and any white space.

    Terminals, loggers and web pages break these long lines anywhere, also within a word or a number.
    """
    lines = _ANSI.sub("", message.replace("\\n", "\n")).splitlines()
    return re.sub(r"[\s\"'`\\]+", "", "\n".join(_LOG_PREFIX.sub("", line) for line in lines))


def _bytes(number: str, unit: str) -> int:
    # Allocators mean powers of two by GB and MB too.
    return round(float(number) * 2 ** (10 * "bKMGTPE".index("b" if unit.startswith("b") else unit[0].upper())))


def _size(pattern: str, text: str) -> int | None:
    """The size at ``SIZE`` of ``pattern``, which may have it in one of several places."""
    found = re.search(pattern.replace("SIZE", _SIZE), text, re.I)
    return _bytes(*filter(None, found.groups())) if found else None


def _read_cuda(text: str) -> OutOfMemory:
    device = re.search(r"GPU(\d+)has|device(\d+)would", text)
    processes = re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", text)
    figures: dict[str, Any] = {f.name: _size(f.metadata["pattern"], text) for f in fields(OutOfMemory) if f.metadata}
    if (figures["allowed_bytes"] or 0) >= (figures["total_bytes"] or 0):  # 2^64 stands for no limit
        figures["allowed_bytes"] = None
    others = tuple((int(process), _bytes(*size)) for process, *size in processes)
    index = int(device[1] or device[2]) if device else None
    return _own_process_found(OutOfMemory("CUDA", index, other_processes=others, **figures))


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


def _read_any(text: str) -> OutOfMemory:
    """A message of another allocator or library, with a little of what stands around it."""
    requested = _size(_ANY_REQUEST, text)
    if not re.search(_HOST, text) and re.search("cublas|cudnn|nccl|cuda|triton", text, re.I):
        library = next((name for name in ("cuBLAS", "cuDNN", "NCCL") if name.lower() in text.lower()), "the driver")
        return OutOfMemory("CUDA", library=library, requested_bytes=requested)
    on_gpu = not re.search(_HOST, text) and re.search("outofmemory|GPU|exhausted", text, re.I)
    return OutOfMemory("GPU" if on_gpu else "host", requested_bytes=requested)  # it may not say which device
