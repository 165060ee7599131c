"""What a trace of allocations makes PyTorch reserve: a model of its CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13) with default settings: memory is taken from
the device in *segments*, cut into *blocks*, and kept when blocks are freed. Left out: streams (a freed block is free at
once) and CUDA graphs. Of equal blocks the lower is taken; that later segments lie higher, the driver does not promise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable

from train.extras.meter.tracker import CUDA_GRANULE_BYTES
from train.memory.kernels import rounded_up

_MIB = 2**20
SMALL_REQUEST_BYTES = _MIB  # the largest of the small pool; also what a large block must have left over to be split
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * _MIB, 20 * _MIB
OWN_SEGMENT_BYTES, OWN_SEGMENT_ROUNDING_BYTES = 10 * _MIB, 2 * _MIB  # larger requests get a segment of their own


class _Pool:
    """The free blocks for small requests, or those for large ones."""

    def __init__(self, page_bytes: int, end: int) -> None:
        self.page_bytes = page_bytes  # of a segment for several requests; an expandable one grows by as much
        self.end = end  # the address at which the next segment begins, or the only one ends
        self.free: list[tuple[int, int]] = []  # (size, address), ascending
        self._size_at: dict[int, int] = {}  # of these blocks by address
        self.size_before: dict[int, int] = {}  # of these blocks by the address at which they end
        self._blocks_on: Counter[int] = Counter()  # live blocks that begin or end on a page

    def add(self, address: int, size: int) -> None:
        """Adds a free block, merged with its free neighbours."""
        before, after = self.size_before.get(address, 0), self._size_at.get(address + size, 0)
        if before:
            self.remove(address - before, before)
        if after:
            self.remove(address + size, after)
        address, size = address - before, before + size + after
        insort(self.free, (size, address))
        self._size_at[address] = self.size_before[address + size] = size

    def remove(self, address: int, size: int) -> None:
        del self.free[bisect_left(self.free, (size, address))]
        del self._size_at[address], self.size_before[address + size]

    def take(self, size: int) -> tuple[int, int]:
        """Removes the smallest free block that is large enough, the lowest of several: (address, size)."""
        index = bisect_left(self.free, (size,))
        if sum(self.free[index]) == self.end and index + 1 < len(self.free):
            index += 1  # the block that can still grow is left for larger requests if another will do
        found, address = self.free.pop(index)
        del self._size_at[address], self.size_before[address + found]
        return address, found

    def pages_changed(self, address: int, size: int, change: int) -> int:
        """How many more pages have a live block once one has come (``change`` 1) or gone (−1)."""
        first, last = address // self.page_bytes, (address + size - 1) // self.page_bytes
        pages = max(0, last - first - 1)  # those between its first and its last are its own
        for page in {first, last}:
            self._blocks_on[page] += change
            pages += self._blocks_on[page] == (change > 0)
        return change * pages


class CachingAllocator:
    """The state of the allocator of one device of unlimited size; bytes allocated and reserved as ``torch.cuda`` says.

    With ``expandable_segments`` each pool has one segment that grows by pages. A full device gets back those without a
    live block, so ``least_reserved_bytes`` suffice. Addresses are unlimited here; PyTorch has 9/8 of the device.
    """

    def __init__(self, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = self.least_reserved_bytes = self._paged_bytes = 0
        # The pools begin so far apart that their addresses never meet, and with a whole page.
        self._pools = {True: _Pool(SMALL_SEGMENT_BYTES, end=0), False: _Pool(LARGE_SEGMENT_BYTES, end=20 << 56)}
        self._live: dict[int, tuple[_Pool, int, int]] = {}  # pool, address and size

    def allocate(self, key: int, size_bytes: int) -> None:
        """Allocates ``size_bytes`` for ``key``, which has none yet, from free blocks or from the device."""
        if size_bytes == 0:
            return
        size = rounded_up(size_bytes, CUDA_GRANULE_BYTES)
        pool = self._pools[small := size <= SMALL_REQUEST_BYTES]
        if not pool.free or pool.free[-1][0] < size:  # the last is the largest: more is taken from the device
            if self.expandable_segments:  # more pages for the only segment
                taken, gap = rounded_up(size - pool.size_before.get(pool.end, 0), pool.page_bytes), 0
            else:
                taken = pool.page_bytes if size < OWN_SEGMENT_BYTES else rounded_up(size, OWN_SEGMENT_ROUNDING_BYTES)
                gap = 1  # with it blocks of two segments are never neighbours
            pool.add(pool.end, taken)
            pool.end += taken + gap
            self.reserved_bytes += taken
        address, found = pool.take(size)
        left_over = found - size
        if left_over >= CUDA_GRANULE_BYTES if small or self.expandable_segments else left_over > SMALL_REQUEST_BYTES:
            pool.add(address + size, left_over)
            found = size
        self._live[key] = pool, address, found
        self.allocated_bytes += found
        self._paged_bytes += pool.pages_changed(address, found, 1) * pool.page_bytes
        self.least_reserved_bytes = max(self.least_reserved_bytes, self._paged_bytes)

    def free(self, key: int) -> None:
        """Returns the block of ``key`` to its pool; unknown keys are ignored."""
        if key in self._live:
            pool, address, size = self._live.pop(key)
            self.allocated_bytes -= size
            self._paged_bytes += pool.pages_changed(address, size, -1) * pool.page_bytes
            pool.add(address, size)


def replay(trace: Iterable[tuple[int, int]], expandable_segments: bool = False) -> CachingAllocator:
    """The allocator after a trace of (storage key, +bytes to allocate or −bytes to free); freed keys may come back."""
    allocator = CachingAllocator(expandable_segments)
    for key, change_bytes in trace:
        if change_bytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, change_bytes)
    return allocator
