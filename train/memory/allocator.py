"""What a trace of allocations makes PyTorch reserve: a model of its CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (read in 2026, torch 2.13) with its default settings.
Memory is taken from the device in *segments*, cut into *blocks*, and kept when blocks are freed.

Left out: streams (a freed block is free at once), CUDA graphs and private pools, the release of unused segments when
the device is full, and the settings ``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold`` and ``large_segment_size_mb``. Addresses decide between free blocks of one size; here
later segments lie at higher addresses, which the driver does not promise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from train.extras.meter.tracker import CUDA_GRANULE_BYTES
from train.memory.kernels import rounded_up

_MIB = 2**20
SMALL_REQUEST_BYTES = _MIB
"""The largest request that the small pool serves; also what a large block must have left over to be split."""
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * _MIB, 20 * _MIB
OWN_SEGMENT_BYTES, OWN_SEGMENT_ROUNDING_BYTES = 10 * _MIB, 2 * _MIB  # larger requests get a segment of their own


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of a segment, linked to its neighbours; in use or free."""

    address: int = 0
    size: int = 0
    allocated: bool = True
    prev: _Block | None = None
    next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Cuts this block to ``size``; returns the rest, free and linked behind it."""
        rest = _Block(self.address + size, self.size - size, allocated=False)
        _link(rest, self.next)
        _link(self, rest)
        self.size = size
        return rest


def _link(before: _Block | None, after: _Block | None) -> None:
    if before is not None:
        before.next = after
    if after is not None:
        after.prev = before


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks for small requests, or those for large ones."""

    page_bytes: int  # by which an expandable segment grows
    end: int  # the address at which the next segment begins
    free: list[tuple[int, int, _Block]] = field(default_factory=list)  # by size, then address
    stop: _Block = field(default_factory=_Block)  # behind the last block of an expandable segment

    def add(self, block: _Block) -> None:
        """Adds a free block, merged with its free neighbours."""
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            self.remove(before)
            block.address, block.size = before.address, before.size + block.size
            _link(before.prev, block)
        if after is not None and not after.allocated:
            self.remove(after)
            block.size += after.size
            _link(block, after.next)
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def take(self, size: int) -> _Block | None:
        """Removes the smallest free block that is large enough, the lowest of several."""
        index = bisect_left(self.free, (size,))
        if index == len(self.free):
            return None
        # The block that can still grow is left for larger requests if another will do.
        if self.free[index][2].next is self.stop and index + 1 < len(self.free):
            index += 1
        return self.free.pop(index)[2]


class CachingAllocator:
    """The state of the allocator of one device of unlimited size; bytes allocated and reserved as ``torch.cuda`` says.

    With ``expandable_segments`` each pool has one segment that grows by pages (2 MiB in the small pool, 20 MiB in the
    large one). Its address space is unlimited here; PyTorch's is 9/8 of the device.
    """

    def __init__(self, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        # The pools begin so far apart that their addresses never meet.
        self._pools = {True: _Pool(SMALL_SEGMENT_BYTES, end=0), False: _Pool(LARGE_SEGMENT_BYTES, end=1 << 60)}
        self._live: dict[int, tuple[_Block, _Pool]] = {}

    def allocate(self, key: int, size_bytes: int) -> None:
        """Allocates ``size_bytes`` for ``key``, which has none yet, from free blocks or from the device."""
        if size_bytes == 0:
            return
        size = rounded_up(size_bytes, CUDA_GRANULE_BYTES)
        small = size <= SMALL_REQUEST_BYTES
        pool = self._pools[small]
        block = pool.take(size) or self._reserve(pool, size)
        block.allocated = True
        left_over = block.size - size
        if left_over >= CUDA_GRANULE_BYTES if small or self.expandable_segments else left_over > SMALL_REQUEST_BYTES:
            pool.add(block.split(size))
        self._live[key] = block, pool
        self.allocated_bytes += block.size

    def free(self, key: int) -> None:
        """Returns the block of ``key`` to its pool; unknown keys are ignored."""
        if key in self._live:
            block, pool = self._live.pop(key)
            self.allocated_bytes -= block.size
            block.allocated = False
            pool.add(block)

    def _reserve(self, pool: _Pool, size: int) -> _Block:
        """Memory from the device as one block in no list: a new segment, or more pages at the end of the only one."""
        last, taken = pool.stop.prev, rounded_up(size, OWN_SEGMENT_ROUNDING_BYTES)
        if size < OWN_SEGMENT_BYTES:
            taken = SMALL_SEGMENT_BYTES if size <= SMALL_REQUEST_BYTES else LARGE_SEGMENT_BYTES
        tail = None if last is None or last.allocated else last
        if self.expandable_segments:
            taken = rounded_up(size - (tail.size if tail else 0), pool.page_bytes)
        block = _Block(pool.end, taken)
        pool.end += taken
        self.reserved_bytes += taken
        if tail is not None:
            pool.remove(tail)
            tail.size += taken
            return tail
        if self.expandable_segments:
            _link(last, block)
            _link(block, pool.stop)
        return block


def replay(trace: Iterable[tuple[int, int]], expandable_segments: bool = False) -> CachingAllocator:
    """The allocator after a trace of (storage key, +bytes to allocate or −bytes to free); freed keys may come back."""
    allocator = CachingAllocator(expandable_segments)
    for key, change_bytes in trace:
        if change_bytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, change_bytes)
    return allocator
