"""What a trace of allocations makes PyTorch reserve: a model of its CUDA caching allocator.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (read in 2026, torch 2.13) with its default settings.
Memory is taken from the device in *segments*, cut into *blocks*, and kept when blocks are freed. What a step
allocates and what it reserves differ by what rounding, splitting and fragmentation leave unused.

Left out: ``record_stream`` (a freed block is free at once), CUDA graphs and private pools, and the settings
``max_split_size_mb``, ``roundup_power2_divisions``, ``garbage_collection_threshold`` and ``large_segment_size_mb``.
Addresses decide between free blocks of one size; here later segments lie at higher addresses, which the driver does
not promise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from train.outputs_log import gib

_MIB = 2**20
ROUNDING_BYTES = 512
"""Every size is rounded up to a multiple of this; no block is smaller."""
SMALL_REQUEST_BYTES = _MIB
"""The largest request that the small pool serves; also what a large block must have left over to be split."""
SMALL_SEGMENT_BYTES = 2 * _MIB
LARGE_SEGMENT_BYTES = 20 * _MIB
OWN_SEGMENT_BYTES = 10 * _MIB
"""Requests from this size on get a segment of their own size."""
OWN_SEGMENT_ROUNDING_BYTES = 2 * _MIB

# Address space of an expandable segment: larger than any device, and whole pages of either size.
_EXPANDABLE_SPACE_BYTES = LARGE_SEGMENT_BYTES << 30


class OutOfCapacityError(Exception):
    """The device has no room for a request, also after all unused segments were released.

    Attributes:
        requested_bytes: asked for, before rounding.
        allocated_bytes: in blocks that are in use.
        reserved_bytes: in segments.
        capacity_bytes: the limit.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int) -> None:
        super().__init__(
            f"{gib(requested_bytes)} asked for, {gib(allocated_bytes)} allocated, {gib(reserved_bytes)} reserved of "
            f"{gib(capacity_bytes)}"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(frozen=True)
class BlockRecord:
    """One block of reserved memory, as :meth:`CachingAllocator.blocks` lists them."""

    address: int
    size_bytes: int
    allocated: bool
    stream: int
    segment_address: int
    """Where its segment begins."""


class _Block:
    """A stretch of a segment, linked to its neighbours; in use, free, or (expandable segments) not mapped."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "segment_address", "size")

    def __init__(self, pool: _Pool, segment_address: int, address: int, size: int, mapped: bool) -> None:
        self.pool = pool
        self.segment_address = segment_address
        self.address = address
        self.size = size
        self.mapped = mapped
        self.allocated = False
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def split(self, size: int) -> _Block:
        """Cuts this block to ``size``; returns the rest, linked behind it and in no list yet."""
        rest = _Block(self.pool, self.segment_address, self.address + size, self.size - size, self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def merge(self) -> None:
        """Takes in the neighbours that are unused and mapped alike; they leave their lists."""
        before, after = self.prev, self.next
        if before is not None and not before.allocated and before.mapped == self.mapped:
            self.pool.remove(before)
            self.address = before.address
            self.size += before.size
            self.prev = before.prev
            if before.prev is not None:
                before.prev.next = self
        if after is not None and not after.allocated and after.mapped == self.mapped:
            self.pool.remove(after)
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.prev = self

    @property
    def expandable_size(self) -> int:
        """The size it could grow to where it lies."""
        behind = self.next
        return self.size if behind is None or behind.mapped else self.size + behind.size


class _Pool:
    """The unused blocks of one stream, small or large."""

    __slots__ = ("free", "page_bytes", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int) -> None:
        self.small = small
        self.stream = stream
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        # Sorted; an address occurs once, so that blocks are never compared.
        self.free: list[tuple[int, int, _Block]] = []  # by size, address
        self.unmapped: list[tuple[int, _Block]] = []  # by address

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The state of the allocator of one device.

    Args:
        capacity_bytes: what can be reserved at most; None: unlimited.
        expandable_segments: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: each pool of each stream has one
            segment that grows and shrinks by pages (2 MiB in the small pool, 20 MiB in the large one). Its address
            space is unlimited here; PyTorch's is 9/8 of the device.

    Attributes:
        allocated_bytes: in blocks in use, rounding and what was too little to split off included, as
            ``torch.cuda.memory_allocated`` counts.
        reserved_bytes: in segments, as ``torch.cuda.memory_reserved`` counts.
        peak_allocated_bytes: the most of the former so far.
        peak_reserved_bytes: the most of the latter so far.
        num_segments: held at present; an expandable segment counts once, whatever its size.
        num_retries: how often everything unused was released because the device was full, as
            ``num_alloc_retries`` of ``torch.cuda.memory_stats``.
    """

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_segments = 0
        self.num_retries = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._live: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, key: int, size_bytes: int, stream: int = 0) -> None:
        """Allocates ``size_bytes`` for ``key``, from blocks that were allocated on ``stream`` before or anew.

        Raises:
            OutOfCapacityError: no room; everything unused has been released, what is in use is unchanged.
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
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = _Pool(small, stream)

        block = self._take_free(pool, size) or self._take_new(pool, size)
        if block is None:
            self.num_retries += 1
            self._release_unused()
            block = self._take_new(pool, size)
        if block is None:
            assert self.capacity_bytes is not None
            raise OutOfCapacityError(size_bytes, self.allocated_bytes, self.reserved_bytes, self.capacity_bytes)

        left_over = block.size - size
        if left_over >= ROUNDING_BYTES if small or self.expandable_segments else left_over > SMALL_REQUEST_BYTES:
            pool.add(block.split(size))
        block.allocated = True
        self._live[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Gives the block of ``key`` back to its pool, merged with unused neighbours; unknown keys are ignored."""
        block = self._live.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge()
        block.pool.add(block)

    def blocks(self) -> list[BlockRecord]:
        """All blocks of reserved memory by address, like ``torch.cuda.memory_snapshot``."""
        unused = [block for pool in self._pools.values() for _, _, block in pool.free]
        return [
            BlockRecord(block.address, block.size, block.allocated, block.pool.stream, block.segment_address)
            for block in sorted([*self._live.values(), *unused], key=lambda block: block.address)
        ]

    def _take_free(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough, the lowest of several, out of the pool."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.expandable_segments:
            # A block that could still grow is left for larger requests as long as a bounded one will do.
            while index + 1 < len(free) and free[index + 1][2].expandable_size < free[index][2].expandable_size:
                index += 1
        return free.pop(index)[2]

    def _take_new(self, pool: _Pool, size: int) -> _Block | None:
        """A block of at least ``size`` with memory from the device, in no list; None: the device is full."""
        if self.expandable_segments:
            return self._take_grown(pool, size)
        segment_bytes = _segment_bytes(size)
        if not self._reserve(segment_bytes):
            return None
        return self._new_segment(pool, segment_bytes, mapped=True)

    def _take_grown(self, pool: _Pool, size: int) -> _Block | None:
        block = self._room_to_grow(pool, size)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind  # has taken in the block before it
        pool.remove(block)
        return block

    def _room_to_grow(self, pool: _Pool, size: int) -> _Block:
        """The first of a run of unused blocks, mapped or not, that has room for ``size``; the lowest such run."""
        for _, unmapped in pool.unmapped:
            before = unmapped.prev
            first = unmapped if before is None or before.allocated else before
            room, block = 0, first
            while block is not None and not block.allocated and room < size:
                room += block.size
                block = block.next
            if room >= size:
                return first
        block = self._new_segment(pool, _EXPANDABLE_SPACE_BYTES, mapped=False)
        pool.add(block)
        return block

    def _new_segment(self, pool: _Pool, size: int, mapped: bool) -> _Block:
        block = _Block(pool, self._next_address, self._next_address, size, mapped)
        self._next_address += size
        self.num_segments += 1
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Backs the start of an unmapped block by whole pages and makes it a free block, merged with neighbours."""
        pool = block.pool
        size = _rounded(size, pool.page_bytes)
        if not self._reserve(size):
            return False
        pool.remove(block)
        if size < block.size:
            pool.add(block.split(size))
        block.mapped = True
        block.merge()
        pool.add(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Gives back the whole pages inside a free block; what is left at its ends stays free."""
        pool = block.pool
        begin = _rounded(block.address, pool.page_bytes)
        end = (block.address + block.size) // pool.page_bytes * pool.page_bytes
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            inner = block.split(begin - block.address)
            pool.add(block)
            block = inner
        if end < block.address + block.size:
            pool.add(block.split(end - begin))
        self.reserved_bytes -= end - begin
        block.mapped = False
        block.merge()
        if block.prev is None and block.next is None:
            self.num_segments -= 1
        else:
            pool.add(block)

    def _release_unused(self) -> None:
        """Gives back all segments that are one free block; of expandable segments, all unused pages."""
        for pool in self._pools.values():
            unused = [block for _, _, block in pool.free]
            for block in unused:
                if self.expandable_segments:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size
                    self.num_segments -= 1

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True


def replay(
    trace: Iterable[tuple[int, int]], capacity_bytes: int | None = None, expandable_segments: bool = False
) -> CachingAllocator:
    """The allocator after a trace, all on one stream.

    Args:
        trace: (storage key, +bytes to allocate or −bytes to free) in order. A key may come back after it was freed.
        capacity_bytes: see :class:`CachingAllocator`.
        expandable_segments: see :class:`CachingAllocator`.

    Raises:
        OutOfCapacityError: the trace does not fit.
        ValueError: a key is allocated twice without being freed.
    """
    allocator = CachingAllocator(capacity_bytes, expandable_segments)
    for key, change_bytes in trace:
        if change_bytes < 0:
            allocator.free(key)
        else:
            allocator.allocate(key, change_bytes)
    return allocator


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _segment_bytes(size: int) -> int:
    """What is taken from the device for a request of ``size`` that no free block serves."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _rounded(size, OWN_SEGMENT_ROUNDING_BYTES)
