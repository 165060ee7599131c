"""What a trace of allocations makes PyTorch reserve: a model of its CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (read in 2026, torch 2.13) with its default settings.
Memory is taken from the device in *segments*, cut into *blocks*, and kept when blocks are freed. What a step
allocates and what it reserves differ by what rounding, splitting and fragmentation leave unused.

Left out: streams (a freed block is free at once), CUDA graphs and private pools, the release of unused segments when
the device is full, and the settings ``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold`` and ``large_segment_size_mb``. Addresses decide between free blocks of one size; here
later segments lie at higher addresses, which the driver does not promise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

_MIB = 2**20
ROUNDING_BYTES = 512
"""Every size is rounded up to a multiple of this; no block is smaller."""
SMALL_REQUEST_BYTES = _MIB
"""The largest request that the small pool serves; also what a large block must have left over to be split."""
SMALL_SEGMENT_BYTES = 2 * _MIB
LARGE_SEGMENT_BYTES = 20 * _MIB
OWN_SEGMENT_BYTES = 10 * _MIB
"""Requests of this size and more get a segment of their own size."""
OWN_SEGMENT_ROUNDING_BYTES = 2 * _MIB

_LARGE_POOL_ADDRESS = 1 << 60
"""Where the large pool begins, so that the pools' addresses never meet."""


class _Block:
    """A stretch of a segment, linked to its neighbours; in use or free."""

    __slots__ = ("address", "allocated", "next", "pool", "prev", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.allocated = False
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Cuts this block to ``size``; returns the rest, linked behind it and in no list yet."""
        rest = _Block(self.pool, self.address + size, self.size - size)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        if self.pool.last is self:
            self.pool.last = rest
        self.next = rest
        self.size = size
        return rest

    def merge(self) -> None:
        """Absorbs the free neighbours, which leave their lists."""
        before, after = self.prev, self.next
        if before is not None and not before.allocated:
            self.pool.remove(before)
            self.address = before.address
            self.size += before.size
            self.prev = before.prev
            if before.prev is not None:
                before.prev.next = self
        if after is not None and not after.allocated:
            self.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.prev = self
            if self.pool.last is after:
                self.pool.last = self


class _Pool:
    """The free blocks for small requests, or those for large ones."""

    __slots__ = ("end", "free", "last", "page_bytes")

    def __init__(self, small: bool) -> None:
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.end = 0 if small else _LARGE_POOL_ADDRESS
        self.free: list[tuple[int, int, _Block]] = []
        """Sorted by size, then address; an address occurs once, so that blocks are never compared."""
        self.last: _Block | None = None
        """The block at the end of the expandable segment, which alone can grow."""

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """The state of the allocator of one device of unlimited size.

    Args:
        expandable_segments: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: each pool has one segment that
            grows by pages (2 MiB in the small pool, 20 MiB in the large one). Its address space is unlimited here;
            PyTorch's is 9/8 of the device.

    Attributes:
        allocated_bytes: in blocks in use, including rounding and remainders too small to split off, as
            ``torch.cuda.memory_allocated`` counts.
        reserved_bytes: in segments, as ``torch.cuda.memory_reserved`` counts; it never shrinks.
        peak_allocated_bytes: the most that ``allocated_bytes`` has been.
    """

    def __init__(self, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._pools = {small: _Pool(small) for small in (True, False)}
        self._live: dict[int, _Block] = {}

    def allocate(self, key: int, size_bytes: int) -> None:
        """Allocates ``size_bytes`` for ``key``, from free blocks or from the device.

        Raises:
            ValueError: the key is in use, or the size is negative.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise ValueError(f"a size of {size_bytes} bytes")
            return
        if key in self._live:
            raise ValueError(f"key {key} is in use")
        size = _rounded(size_bytes, ROUNDING_BYTES)
        small = size <= SMALL_REQUEST_BYTES
        pool = self._pools[small]
        block = self._take_free(pool, size)
        if block is None:
            block = self._grow(pool, size) if self.expandable_segments else self._reserve(pool, _segment_bytes(size))
        left_over = block.size - size
        if left_over >= ROUNDING_BYTES if small or self.expandable_segments else left_over > SMALL_REQUEST_BYTES:
            pool.add(block.split(size))
        block.allocated = True
        self._live[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Returns the block of ``key`` to its pool, merged with free neighbours; unknown keys are ignored."""
        block = self._live.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge()
        block.pool.add(block)

    def _take_free(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough, the lowest of several, out of the pool."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        # The block that can still grow is left for larger requests if another will do.
        if pool.free[index][2] is pool.last and index + 1 < len(pool.free):
            index += 1
        return pool.free.pop(index)[2]

    def _reserve(self, pool: _Pool, size: int) -> _Block:
        """``size`` bytes from the device as one block that is in no list."""
        block = _Block(pool, pool.end, size)
        pool.end += size
        self.reserved_bytes += size
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """A block of at least ``size`` at the end of the expandable segment, in no list."""
        last = pool.last
        free_bytes = 0 if last is None or last.allocated else last.size
        block = pool.last = self._reserve(pool, _rounded(size - free_bytes, pool.page_bytes))
        if last is not None:
            block.prev, last.next = last, block
        block.merge()
        return block


def replay(trace: Iterable[tuple[int, int]], expandable_segments: bool = False) -> CachingAllocator:
    """The allocator after a trace.

    Args:
        trace: (storage key, +bytes to allocate or −bytes to free) in order. A key may come back after it was freed.
        expandable_segments: see :class:`CachingAllocator`.

    Raises:
        ValueError: a key is allocated twice without being freed.
    """
    allocator = CachingAllocator(expandable_segments)
    for key, change_bytes in trace:
        if change_bytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, change_bytes)
    return allocator


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _segment_bytes(size: int) -> int:
    """The segment taken from the device for a request of ``size`` that no free block serves."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _rounded(size, OWN_SEGMENT_ROUNDING_BYTES)
