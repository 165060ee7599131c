"""Host memory: how much of it a process may still take, which errors say it is full, copies to and from a device."""

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate
import torch
from torch import Tensor

from train.extras.oom import parse_oom
from train.figures import gib


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory was full: the device's or the machine's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and parse_oom(str(error)) is not None


def free_host_bytes(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """This process's share of what is available: of the machine below ``root``, or of its control group if less."""
    processes = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    return min([psutil.virtual_memory().available, *_left_in_groups(root)]) // processes


def page_locked(num_bytes: int) -> Tensor:
    """(num_bytes,) uint8 of host memory for copies to and from a card; ordinary memory if the driver locks none.

    Of this very size: torch's allocator of pinned memory rounds up to a power of two and keeps what it once had. Raises
    MemoryError if the host has no room; the driver's own error would read as if the card were full.
    """
    if num_bytes > (free := free_host_bytes()):
        copies = "for copies to and from the card"
        raise MemoryError(f"host memory: cannot allocate memory of {gib(num_bytes)} {copies}: {gib(free)} is free")
    is_others = not torch.cuda.is_available()  # then that accelerator's own allocator locks it
    whole = torch.empty(num_bytes + PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=is_others)
    buffer = whole[-whole.data_ptr() % PAGESIZE :][:num_bytes]  # whole pages: CUDA may not lock a neighbour's again
    if is_others:
        return buffer
    driver: Any = torch.cuda.cudart()
    address, portable = buffer.data_ptr(), 1
    if int(driver.cudaHostRegister(address, num_bytes, portable)) == 0:
        weakref.finalize(whole, driver.cudaHostUnregister, address).atexit = False
    else:
        with suppress(RuntimeError):  # or the next kernel would report this error as its own
            torch.zeros(1, device="cuda")
    return buffer


class StreamTransfers:
    """Copies between an accelerator and the host, on one stream of their own; by itself the host waits for none."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8 of host memory, to be reused."""
        return page_locked(num_bytes)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Starts copying each (target, source) after what is queued for computation so far; an event for the end.

        Copies run one after the other, in the order in which they were started.
        """
        # The current stream is looked up each time: under FSDP2, and in backward's thread, it may be another one. And
        # before entering ``stream``, inside which the current stream is that one.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Everything queued for computation from now on waits for ``event``."""
        self._module.current_stream(self._device).wait_event(event)


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group around this process leaves; files it has read count as free."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        group = root / "sys/fs/cgroup" / line.split(":", 2)[2].lstrip("/")
        for folder in (group, *group.parents):  # those above the groups hold no such files; nor does version 1
            with suppress(OSError, ValueError):  # no number: "max"
                left = int((folder / "memory.max").read_text(encoding="ascii"))
                left -= int((folder / "memory.current").read_text(encoding="ascii"))
                entries = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
                yield max(0, left + int(dict(entry.split() for entry in entries).get("inactive_file", 0)))
