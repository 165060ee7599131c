"""What a trace of allocations makes PyTorch reserve: a model of its CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.13) with default settings: memory is taken from
the device in *segments*, cut into *blocks*, and kept when blocks are freed; a full device gets back the pages of
expandable segments on which no live block lies. Left out: streams (a freed block is free at once), CUDA graphs, and
that a full device also gets back other segments. Of equal blocks the lower is taken; later segments are put higher.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from train.extras.meter.tracker import CUDA_GRANULE_BYTES
from train.memory.card_kernels import rounded_up

_MIB = 2**20
SMALL_REQUEST_BYTES = _MIB  # the largest of the small pool; also what a large block must have left over to be split
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * _MIB, 20 * _MIB
OWN_SEGMENT_BYTES, OWN_SEGMENT_ROUNDING_BYTES = 10 * _MIB, 2 * _MIB  # larger requests get a segment of their own


class _Pool:
    """The free blocks for small requests, or those for large ones."""

    def __init__(self, page_bytes: int, is_expandable: bool) -> None:
        self.page_bytes = page_bytes  # of a segment for several requests; an expandable one grows by as much
        self.holes = {0: 1 << 56} if is_expandable else {}  # ends of parts without memory by address
        self.free: list[tuple[int, int]] = []  # (size, address), ascending
        self.size_at: dict[int, int] = {}  # of these blocks by address
        self.size_before: dict[int, int] = {}  # of these blocks by the address at which they end

    def add(self, address: int, size: int) -> None:
        """Adds a free block, if it is not empty, merged with its free neighbours."""
        if size:
            before, after = self.size_before.get(address, 0), self.size_at.get(address + size, 0)
            if before:
                self.remove(address - before, before)
            if after:
                self.remove(address + size, after)
            address, size = address - before, before + size + after
            insort(self.free, (size, address))
            self.size_at[address] = self.size_before[address + size] = size

    def remove(self, address: int, size: int) -> None:
        del self.free[bisect_left(self.free, (size, address))]
        del self.size_at[address], self.size_before[address + size]

    def take(self, size: int) -> tuple[int, int] | None:
        """Removes the smallest free block that is large enough, the lowest of several: (address, size), or None."""
        if (index := bisect_left(self.free, (size,))) == len(self.free):
            return None
        while index + 1 < len(self.free) and self._grown(index + 1) < self._grown(index):
            index += 1  # a block that can still grow is left for larger requests if another will do
        found, address = self.free[index]
        self.remove(address, found)
        return address, found

    def _grown(self, index: int) -> int:
        size, address = self.free[index]
        return self.holes.get(address + size, address + size) - address

    def first_room(self, size: int) -> int:
        """The lowest address from which on holes and free blocks have room for ``size`` bytes, at least one hole."""
        for hole in sorted(self.holes):
            begin = end = hole - self.size_before.get(hole, 0)
            while end - begin < size and (more := self.size_at.get(end) or self.holes.get(end, end) - end):
                end += more
            if end - begin >= size:
                return begin
        raise AssertionError("the last hole has room for everything")

    def give_back(self) -> int:
        """Bytes of the pages without a live block, which become holes."""
        given = 0
        for size, address in list(self.free):
            first, end = rounded_up(address, self.page_bytes), (address + size) // self.page_bytes * self.page_bytes
            if first < end:
                given += end - first
                self.remove(address, size)
                self.add(address, first - address)
                self.add(end, address + size - end)
                joined = next((start for start, stop in self.holes.items() if stop == first), first)
                self.holes[joined] = self.holes.pop(end, end)
        return given


class CachingAllocator:
    """The state of the allocator of one device; bytes allocated and reserved as ``torch.cuda`` says.

    With ``expandable_segments`` each pool has one segment that grows by pages; these may reserve ``limit_bytes``.
    Addresses are unlimited here; PyTorch has 9/8 of the device.
    """

    def __init__(self, expandable_segments: bool = False, limit_bytes: float = math.inf) -> None:
        self.expandable_segments, self.limit_bytes = expandable_segments, limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        sizes = {True: SMALL_SEGMENT_BYTES, False: LARGE_SEGMENT_BYTES}
        self._pools = {is_small: _Pool(size, expandable_segments) for is_small, size in sizes.items()}
        self._live: dict[int, tuple[_Pool, int, int]] = {}  # pool, address and size
        self._end = 0  # the address at which the next segment begins, if they do not grow

    def allocate(self, key: int, size_bytes: int) -> None:
        """Allocates ``size_bytes`` for ``key``, which has none yet, from free blocks or from the device.

        Raises MemoryError if the device is full, also once it has got back what lies unused.
        """
        if size_bytes == 0:
            return
        size = rounded_up(size_bytes, CUDA_GRANULE_BYTES)
        pool = self._pools[small := size <= SMALL_REQUEST_BYTES]
        try:
            address, found = pool.take(size) or self._from_device(pool, size)
        except MemoryError:
            self.reserved_bytes -= sum(each.give_back() for each in self._pools.values())
            address, found = self._from_device(pool, size)
        left_over = found - size
        if left_over >= CUDA_GRANULE_BYTES if small or self.expandable_segments else left_over > SMALL_REQUEST_BYTES:
            pool.add(address + size, left_over)
            found = size
        self._live[key] = pool, address, found
        self.allocated_bytes += found

    def _from_device(self, pool: _Pool, size: int) -> tuple[int, int]:
        """A block (address, size) that was not there yet, or not all of it; MemoryError if the device is full."""
        if not self.expandable_segments:
            found = pool.page_bytes if size < OWN_SEGMENT_BYTES else rounded_up(size, OWN_SEGMENT_ROUNDING_BYTES)
            self._reserve(found)
            address, self._end = self._end, self._end + found + 1  # blocks of two segments do not touch
            return address, found
        address = pool.first_room(size)
        while (found := pool.size_at.get(address, 0)) < size:  # the free block there grows into the hole behind it
            hole, end = address + found, pool.holes[address + found]
            pages = min(end - hole, rounded_up(size - found, pool.page_bytes))
            self._reserve(pages)
            del pool.holes[hole]
            if hole + pages < end:
                pool.holes[hole + pages] = end
            pool.add(hole, pages)
        pool.remove(address, found)
        return address, found

    def _reserve(self, size: int) -> None:
        if self.reserved_bytes + size > self.limit_bytes:
            raise MemoryError
        self.reserved_bytes += size

    def free(self, key: int) -> None:
        """Returns the block of ``key`` to its pool; unknown keys are ignored."""
        if key in self._live:
            pool, address, size = self._live.pop(key)
            self.allocated_bytes -= size
            pool.add(address, size)


def replay(trace: Iterable[tuple[int, int]], grows: bool = False, limit_bytes: float = math.inf) -> CachingAllocator:
    """The allocator after a trace of (storage key, +bytes to allocate or −bytes to free); freed keys may come back.

    If it ``grows``, its segments are expandable. Raises MemoryError if ``limit_bytes`` are too few.
    """
    allocator = CachingAllocator(grows, limit_bytes)
    for key, change_bytes in trace:
        if change_bytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, change_bytes)
    return allocator


def least_reserved_bytes(trace: Sequence[tuple[int, int]], too_few_bytes: int, enough_bytes: int) -> int:
    """The least memory with which expandable segments work, to a page; above ``too_few_bytes``, which do not suffice.

    A little more may fail, though it hardly ever does, because blocks then lie elsewhere.
    """
    while enough_bytes - too_few_bytes > LARGE_SEGMENT_BYTES:
        tried = (too_few_bytes + enough_bytes) // 2
        try:
            replay(trace, True, tried)
            enough_bytes = tried
        except MemoryError:
            too_few_bytes = tried
    return enough_bytes
