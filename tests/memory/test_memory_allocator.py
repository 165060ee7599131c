"""The model of the CUDA caching allocator, each rule by a case computed by hand."""

from __future__ import annotations

import random
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from train.memory import use_expandable_segments, uses_expandable_segments
from train.memory.allocator import CachingAllocator, least_reserved_bytes, replay
from train.memory.card_kernels import Costs
from train.memory.fakes import FakeTracker

KIB, MIB = 2**10, 2**20


def allocated(*sizes: int, **settings: Any) -> CachingAllocator:
    """Requests 0, 1, 2 … of these sizes."""
    return replay(enumerate(sizes), **settings)


class Block(NamedTuple):
    address: int
    size: int
    allocated: bool


def blocks(allocator: CachingAllocator) -> list[Block]:
    """All blocks of reserved memory by address, as ``torch.cuda.memory_snapshot`` would list them, small ones last."""
    pools = allocator._pools.values()
    found = [(pool, Block(address, size, False)) for pool in pools for size, address in pool.free]
    found += [(pool, Block(address, size, True)) for pool, address, size in allocator._live.values()]
    return sorted(block._replace(address=block.address + (pool is allocator._pools[True]) * 2**60)
                  for pool, block in found)  # fmt: skip


def free_sizes(allocator: CachingAllocator) -> list[int]:
    return [block.size for block in blocks(allocator) if not block.allocated]


def are_neighbours(one: Block, other: Block) -> bool:
    return one.address + one.size == other.address


def num_segments(allocator: CachingAllocator) -> int:
    found = blocks(allocator)
    return len(found) - sum(are_neighbours(*pair) for pair in pairwise(found))


@pytest.mark.parametrize(
    ("request_bytes", "allocated_bytes"), [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB - 1, MIB)]
)
def test_sizes_are_rounded_up_to_512_bytes(request_bytes: int, allocated_bytes: int) -> None:
    assert allocated(request_bytes).allocated_bytes == allocated_bytes


@pytest.mark.parametrize(
    ("request_bytes", "segment_mib"),
    [
        (1, 2),
        (MIB, 2),  # the largest small request
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),  # from here on a segment of its own
        (10 * MIB + 1, 12),
        (12 * MIB, 12),
        (101 * MIB, 102),
    ],
)
def test_a_new_segment_is_2_mib_20_mib_or_the_request_rounded_to_2_mib(request_bytes: int, segment_mib: int) -> None:
    allocator = allocated(request_bytes)
    assert allocator.reserved_bytes == segment_mib * MIB
    assert num_segments(allocator) == 1


def test_small_requests_share_a_segment_and_the_one_too_many_opens_the_next() -> None:
    assert allocated(MIB, MIB).reserved_bytes == 2 * MIB
    third = allocated(MIB, MIB, 1)
    assert (third.reserved_bytes, num_segments(third)) == (4 * MIB, 2)


def test_small_and_large_blocks_are_never_mixed() -> None:
    allocator = allocated(5 * MIB)  # 15 MiB of its segment are free
    allocator.allocate(1, MIB)
    assert allocator.reserved_bytes == (20 + 2) * MIB
    allocator.allocate(2, 2 * MIB)
    assert allocator.reserved_bytes == (20 + 2) * MIB


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    unsplit = allocated(10 * MIB + 512, 11 * MIB)  # 12 MiB with 2 MiB − 512 over; 12 MiB with 1 MiB over
    assert unsplit.allocated_bytes == 10 * MIB + 512 + 12 * MIB
    assert free_sizes(unsplit) == [2 * MIB - 512]
    assert allocated(11 * MIB - 512).allocated_bytes == 11 * MIB - 512


def test_a_small_block_is_split_from_512_bytes_on() -> None:
    allocator = allocated(MIB, MIB - 512)
    assert (allocator.allocated_bytes, free_sizes(allocator)) == (2 * MIB - 512, [512])
    allocator.allocate(2, 512)
    assert (allocator.allocated_bytes, free_sizes(allocator)) == (2 * MIB, [])


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_several() -> None:
    # Holes of 30, 14 and 14 MiB, each a segment of its own.
    allocator = allocated(30 * MIB, 14 * MIB, 14 * MIB)
    for key in (2, 0, 1):
        allocator.free(key)
    thirty, low, high = (block.address for block in blocks(allocator))
    allocator.allocate(3, 13 * MIB)
    assert [block.address for block in blocks(allocator) if block.allocated] == [low]
    allocator.allocate(4, 13 * MIB)
    assert [block.address for block in blocks(allocator) if block.allocated] == [low, high]
    allocator.allocate(5, 13 * MIB)
    assert [block.address for block in blocks(allocator) if block.allocated] == [thirty, low, high]
    assert allocator.reserved_bytes == 58 * MIB


def test_free_neighbours_merge_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        allocator = allocated(5 * MIB, 5 * MIB, 5 * MIB)  # and 5 MiB free behind them
        for key in order:
            allocator.free(key)
        assert free_sizes(allocator) == [20 * MIB]
        allocator.allocate(3, 20 * MIB)
        assert allocator.reserved_bytes == 20 * MIB


def test_blocks_of_different_segments_do_not_merge() -> None:
    allocator = allocated(10 * MIB, 10 * MIB)
    allocator.free(0)
    allocator.free(1)
    assert free_sizes(allocator) == [10 * MIB, 10 * MIB]
    allocator.allocate(2, 20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_hole_between_live_blocks_is_fragmentation() -> None:
    allocator = allocated(6 * MIB, 6 * MIB, 6 * MIB)
    allocator.free(1)
    allocator.allocate(3, 7 * MIB)  # 6 MiB and 2 MiB are free, but apart
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocated_bytes == 19 * MIB


def test_a_step_with_the_same_sizes_reserves_nothing_more() -> None:
    step = [(0, 40 * MIB), (1, 3 * MIB), (2, 7 * KIB), (1, -3 * MIB), (3, 25 * MIB), (0, -40 * MIB), (3, -25 * MIB)]
    once = replay([*step, (2, -7 * KIB)])
    often = replay([*step, (2, -7 * KIB)] * 5)
    assert once.reserved_bytes == often.reserved_bytes == (40 + 20 + 26 + 2) * MIB
    assert often.allocated_bytes == 0


def test_a_storage_may_come_back_with_another_size() -> None:
    allocator = replay([(0, 4 * MIB), (0, -4 * MIB), (0, 6 * MIB)])
    assert allocator.allocated_bytes == 6 * MIB


def test_empty_requests_and_unknown_frees_change_nothing() -> None:
    allocator = replay([(0, 0), (5, -100), (0, 0), (0, -1)])
    assert (allocator.allocated_bytes, allocator.reserved_bytes, num_segments(allocator)) == (0, 0, 0)


def test_what_was_reserved_stays_when_less_is_in_use() -> None:
    trace = [(0, 60 * MIB), (1, 40 * MIB), (0, -60 * MIB), (1, -40 * MIB), (2, 60 * MIB), (2, -60 * MIB), (3, 1)]
    allocator = replay(trace)
    assert allocator.allocated_bytes == 512
    assert allocator.reserved_bytes == 102 * MIB


def test_expandable_segments_grow_by_pages_and_serve_from_the_free_tail() -> None:
    allocator = allocated(30 * MIB, grows=True)
    assert (allocator.reserved_bytes, num_segments(allocator)) == (40 * MIB, 1)
    allocator.allocate(1, 25 * MIB)  # 10 MiB of the tail and one more page
    assert (allocator.reserved_bytes, num_segments(allocator)) == (60 * MIB, 1)
    assert (allocator.allocated_bytes, free_sizes(allocator)) == (55 * MIB, [5 * MIB])
    allocator.allocate(2, 1)
    assert (allocator.reserved_bytes, num_segments(allocator)) == (62 * MIB, 2)


def test_expandable_segments_split_off_512_bytes_of_large_blocks_too() -> None:
    assert allocated(20 * MIB - 512, grows=True).allocated_bytes == 20 * MIB - 512


def test_expandable_segments_keep_the_block_that_can_grow_for_last() -> None:
    # Free: a hole of 12 MiB, and a tail of 11 MiB that fits better but can grow.
    allocator = allocated(12 * MIB, 17 * MIB, grows=True)
    allocator.free(0)
    hole, _, tail = blocks(allocator)
    assert (hole.size, tail.size) == (12 * MIB, 11 * MIB)
    allocator.allocate(2, 10 * MIB)
    assert [b.size for b in blocks(allocator) if b.address == hole.address and b.allocated] == [10 * MIB]
    assert free_sizes(allocator) == [2 * MIB, 11 * MIB]


def test_expandable_segments_avoid_the_fragmentation_of_growing_sizes() -> None:
    trace = [(i, sign * (20 + 2 * i) * MIB) for i in range(20) for sign in (1, -1)]
    assert replay(trace).reserved_bytes == sum(20 + 2 * i for i in range(20)) * MIB
    assert replay(trace, grows=True).reserved_bytes == 60 * MIB


# From 0 to 60, 60 to 65 and 65 to 155 MiB, in pages of 20; the first is freed, and 70 MiB fit nowhere but at the end.
FULL = [(0, 60 * MIB), (1, 5 * MIB), (2, 90 * MIB), (0, -60 * MIB), (3, 70 * MIB)]


def test_a_full_device_gets_back_the_pages_without_a_live_block() -> None:
    assert replay(FULL, grows=True).reserved_bytes == 240 * MIB
    allocator = replay(FULL, grows=True, limit_bytes=180 * MIB)  # pages 0 to 2 went, 8 to 11 came
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (165 * MIB, 180 * MIB)
    with pytest.raises(MemoryError):
        replay(FULL, grows=True, limit_bytes=180 * MIB - 1)
    assert least_reserved_bytes(FULL, 165 * MIB, 240 * MIB) - 180 * MIB in range(20 * MIB)


def test_pages_that_were_given_back_are_filled_again_the_lowest_first() -> None:
    allocator = replay(FULL, grows=True, limit_bytes=180 * MIB)
    allocator.limit_bytes = 240 * MIB
    allocator.allocate(4, 30 * MIB)  # in pages 0 and 1
    assert (blocks(allocator)[0], allocator.reserved_bytes) == (Block(0, 30 * MIB, True), 220 * MIB)
    allocator.allocate(5, 29 * MIB)  # the rest of page 1, and page 2
    assert (blocks(allocator)[1], allocator.reserved_bytes) == (Block(30 * MIB, 29 * MIB, True), 240 * MIB)
    with pytest.raises(MemoryError):
        allocator.allocate(6, 21 * MIB)
    check(allocator)


@pytest.mark.parametrize("first", [2, 3])
def test_a_block_next_to_a_hole_counts_as_long_as_it_can_grow(first: int) -> None:
    # From 0 to 5, 5 to 20, 20 to 40, 40 to 60, 60 to 82, 82 to 120 and 120 to 140 MiB.
    allocator = allocated(*(size * MIB for size in (5, 15, 20, 20, 22, 38, 20)), grows=True)
    allocator.limit_bytes = 160 * MIB
    allocator.free(first)
    allocator.allocate(7, 30 * MIB)  # its page is given back
    allocator.limit_bytes = 180 * MIB
    for key in (1, 5 - first, 5):
        allocator.free(key)
    allocator.allocate(8, 60 * MIB)  # and so are the page next to it, and that from 100 to 120 MiB
    assert free_sizes(allocator) == [15 * MIB, 18 * MIB, 10 * MIB] and allocator.reserved_bytes == 180 * MIB
    allocator.allocate(9, 14 * MIB)  # 15 MiB would do, but can become 55, the 18 only 38
    assert Block(82 * MIB, 14 * MIB, True) in blocks(allocator)


def random_trace(events: int, seed: int, largest_log2: float = 27.0) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    live: list[tuple[int, int]] = []
    trace: list[tuple[int, int]] = []
    while len(trace) < events:
        if live and (len(live) > 300 or generator.random() < 0.45):
            key, size = live.pop(generator.randrange(len(live)))
            trace.append((key, -size))
        else:
            live.append((len(trace), int(2 ** generator.uniform(0, largest_log2))))
            trace.append(live[-1])
    return trace


def check(allocator: CachingAllocator) -> None:
    """Blocks lie apart, and their sizes add up to what the allocator reports."""
    found = blocks(allocator)
    assert all(one.address + one.size <= other.address for one, other in pairwise(found))
    assert sum(block.size for block in found) == allocator.reserved_bytes
    assert sum(block.size for block in found if block.allocated) == allocator.allocated_bytes
    for one, other in pairwise(found):
        assert one.allocated or other.allocated or not are_neighbours(one, other), "neighbours that are both free"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("expandable_segments", [False, True])
def test_random_traces_keep_the_books(seed: int, expandable_segments: bool) -> None:
    trace = random_trace(3000, seed)
    least = reserved = replay(trace, expandable_segments).reserved_bytes
    if expandable_segments:
        least = least_reserved_bytes(trace, 0, reserved)
        assert 0.5 * reserved < least < 0.99 * reserved
    allocator = CachingAllocator(expandable_segments, limit_bytes=least)
    live: dict[int, int] = {}
    for number, (key, change) in enumerate(trace):
        if change < 0:
            allocator.free(key)
            del live[key]
        else:
            allocator.allocate(key, change)
            live[key] = change
        assert sum(live.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes <= least
        if number % 100 == 0:
            check(allocator)

    for key in live:
        allocator.free(key)
    check(allocator)
    assert allocator.allocated_bytes == 0
    assert len(blocks(allocator)) == num_segments(allocator)


def test_two_hundred_thousand_events_take_seconds() -> None:
    trace = random_trace(200_000, seed=0)
    begin = time.process_time()
    replay(trace)
    assert time.process_time() - begin < 5


def test_segments_do_not_grow_under_wsl_and_on_cards_that_cannot_map_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver says of a vGPU: there the first allocation would fail with "operation not supported"."""

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGet(self, device: Any, number: int) -> int:
            return 0

        def cuDeviceGetAttribute(self, answer: Any, attribute: int, device: Any) -> int:
            assert attribute == 102
            answer._obj.value = maps
            return 0

    def chosen(is_here: bool = True) -> dict[str, str]:
        environment: dict[str, str] = {}
        use_expandable_segments(environment, is_here)
        return environment

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.release", lambda: "6.8.0-generic")
    monkeypatch.setattr("ctypes.CDLL", Driver)
    expandable, maps = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 1
    assert chosen() == expandable
    maps = 0
    assert chosen() == {}
    maps = 1
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert chosen() == {}
    monkeypatch.setattr(sys, "platform", "win32")
    assert chosen() == {}
    assert chosen(is_here=False) == expandable  # a plan for a card elsewhere is the same wherever it is made


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has expandable segments")
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_allocator_was_told_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.8.0-generic")
    environment: dict[str, str] = {}
    assert not uses_expandable_segments(environment)
    use_expandable_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} and uses_expandable_segments(environment)
    own = {name: "max_split_size_mb:128"}
    use_expandable_segments(own)
    assert own == {name: "max_split_size_mb:128"} and not uses_expandable_segments(own)


def test_each_allocation_and_free_of_a_prediction_is_recorded() -> None:
    with FakeTensorMode(), FakeTracker("cuda", Costs({torch.float32: 1e12}, 1e12)) as tracker:
        one, two, empty = (torch.empty(size, device="cuda") for size in (100, 129, 0))
        assert [size for _, size in tracker.trace] == [512, 1024]
        one.add_(1)  # nothing new
        one.untyped_storage().resize_(600)
        assert [size for _, size in tracker.trace] == [512, 1024, -512, 1024]
        del one
        assert [size for _, size in tracker.trace] == [512, 1024, -512, 1024, -1024]
        live = [(key, block.num_bytes) for key, block in tracker.live.items() if block.num_bytes]
        assert live == [(two.untyped_storage()._tracked_as, 1024)]  # type: ignore
        assert tracker.live_bytes == 1024 and len(tracker.live) == 2 and not empty.numel()
