"""When memory that grows is a leak, and what is said of it, where a test says what each step leaves behind."""

from __future__ import annotations

import gc

import pytest

from train.extras.meter.memory import Inventory, LeakWatch

MIB = 2**20
ADVICE = (
    "Look for what is kept from step to step: a list of tensors, or a loss or output kept without .detach() or "
    ".item(), which keeps its whole graph."
)


class Watched:
    """Steps that end with as much as is said."""

    def __init__(self, on_cuda: bool = True) -> None:
        self.now, self.left, self.num_lists = 0, Inventory(), 0
        self.watch = LeakWatch(lambda: self.now, self.list_live, on_cuda)

    def list_live(self) -> Inventory:
        self.num_lists += 1
        return Inventory(self.left)

    def step(self, more: int, shapes: tuple[tuple[int, int], ...] = ((2, 8),)) -> bool:
        self.now += more
        self.watch.see(shapes)
        return self.watch.leak is not None

    def first_leak(self, *more: int) -> int | None:
        """The first of these steps, counted from 1, after which a leak is known."""
        return next((number for number, size in enumerate(more, 1) if self.step(size)), None)


@pytest.mark.slow
def test_on_cuda_four_steps_in_a_row_and_a_mebibyte_are_a_leak() -> None:
    assert Watched().first_leak(*[MIB // 4] * 9) == 5  # the first is compared with none
    assert Watched().first_leak(*[MIB // 4 - 1] * 9) == 6
    assert Watched().first_leak(0, 1, 1, 1, MIB, 1) == 5
    assert Watched().first_leak(0, MIB, MIB, MIB, 0, MIB, MIB, MIB, MIB) == 9
    assert Watched().first_leak(0, MIB, MIB, MIB, -1, MIB, MIB, MIB, MIB) == 9


def test_on_cuda_a_leak_is_a_thousandth_of_what_is_allocated() -> None:
    assert Watched().first_leak(4 * 2**30, *[MIB] * 9) == 6
    assert Watched().first_leak(2 * 2**30, *[MIB] * 9) == 5


def test_losses_that_wait_for_the_next_line_of_the_log_are_no_leak() -> None:
    """512 bytes each on CUDA, as many as lie between two lines."""
    assert Watched().first_leak(*[2 * 512] * 20_000) is None
    assert Watched().first_leak(*[8 * 512] * 1000) == 257


def test_on_a_cpu_each_step_leaves_64_kib() -> None:
    assert Watched(on_cuda=False).first_leak(*[2**16] * 9) == 5
    assert Watched(on_cuda=False).first_leak(*[2**16 - 1] * 9) is None


def test_shapes_that_are_new_begin_anew_and_new_windows_of_known_ones_do_not_count() -> None:
    one, two = ((2, 8),), ((2, 4),)
    watched = Watched()
    seen = [watched.step(MIB, shapes) for shapes in (one, one, one, two, two, two, one, two, one)]
    assert seen == [False] * 7 + [True] * 2  # the fourth is new
    assert "1.0 MiB more after each step, seen over 4 steps." in str(watched.watch.leak)
    watched = Watched()
    seen = [watched.step(MIB, shapes) for shapes in (one, two, one, two, (*one, *two), one, two)]
    assert seen == [False] * 6 + [True]
    assert "1.0 MiB more after each step, seen over 5 steps." in str(watched.watch.leak)


def test_a_step_is_suspect_while_memory_grows_and_can_be_compared() -> None:
    watched, shapes = Watched(), ((2, 8),)
    suspects = []
    for more in (MIB, MIB, 0, MIB, MIB, MIB, MIB):
        watched.step(more)
        suspects.append(watched.watch.suspects(shapes))
        assert not watched.watch.suspects(((2, 4),))
    assert suspects == [False, True, False, True, True, True, False]  # a leak that is known is looked for no more


def test_the_last_64_windows_can_be_compared() -> None:
    def window(number: int) -> tuple[tuple[int, int], ...]:
        return ((1, 1),) * number

    watched = Watched()
    for number in range(1, 66):
        watched.step(0, window(number))
    watched.step(MIB, window(65))
    assert [watched.watch.suspects(window(number)) for number in (1, 2, 65)] == [False, True, True]


def grow(watched: Watched, more: int, *tensors: tuple[str, int, int]) -> str | None:
    """What is said after enough steps that each leave ``more`` bytes, and a number of tensors of a size."""
    for _ in range(5):
        for name, size, number in tensors:
            watched.left[name, size] += number
        watched.step(more)
    return watched.watch.leak


def test_a_report_says_how_much_and_what() -> None:
    watched = Watched()
    watched.left["(9, 9) float32", 324] = 3  # there before
    assert grow(watched, MIB, ("(4, 65536) float32", MIB, 1)) == (
        "memory leak: 1.0 MiB more after each step, seen over 4 steps. What grows: 2 × (4, 65536) float32. " + ADVICE
    )
    assert watched.num_lists == 2  # after two steps that grew, and now
    assert watched.step(MIB) and watched.num_lists == 2


def test_a_report_on_a_cpu_counts_from_the_first_step() -> None:
    said = grow(Watched(on_cuda=False), MIB, ("(4, 65536) float32 made in clip", MIB, 1))
    assert said is not None and "What grows: 4 × (4, 65536) float32 made in clip. " in said


@pytest.mark.parametrize(
    ("more", "tensors", "named"),
    [
        # the same shape in two sizes is one kind; what is less than a hundredth is not named
        (100, [("a", 40, 1), ("a", 59, 1), ("b", 1, 1)], "4 × a; 2 × b"),
        (101, [("a", 41, 1), ("a", 59, 1), ("b", 1, 1)], "4 × a"),
        (100, [("a", 10, 1), ("b", 20, 2), ("c", 30, 1), ("d", 20, 1)], "4 × b; 2 × c; 2 × d"),
        (100, [("a", 10, 1), ("b", 20, 1), ("c", 30, 1), ("d", 20, 1), ("e", 20, 3)], "6 × e; 2 × c; 2 × b"),
        (100, [("a", 33, 1), ("b", 33, 1), ("c", 34, 1)], "2 × c; 2 × a; 2 × b"),
        (100, [("a", 98, 1), ("b", 1, 1)], "2 × a; 2 × b; 0.0 MiB held by autograd graphs"),
        (MIB, [("a", MIB // 2, 1)], "2 × a; 1.0 MiB held by autograd graphs"),
        (1000, [("a", 991, 1)], "2 × a"),
        (MIB, [], "2.0 MiB held by autograd graphs"),
    ],
)
def test_a_report_names_three_kinds_and_what_no_tensor_holds(
    more: int, tensors: list[tuple[str, int, int]], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.extras.meter.memory.LEAK_BYTES", 0)
    said = grow(Watched(), more, *tensors)
    assert said is not None and f" What grows: {named}. Look" in said


@pytest.mark.parametrize(("freed", "first", "steps"), [(2 * MIB, 5, 4), (2 * MIB + 1, 10, 5)])
def test_what_a_collection_of_cycles_frees_is_no_leak(
    freed: int, first: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, to_free = Watched(), [freed]

    def collect() -> None:
        watched.now -= to_free.pop() if to_free else 0

    monkeypatch.setattr(gc, "collect", collect)
    assert watched.first_leak(*[MIB] * 12) == first
    assert f"1.0 MiB more after each step, seen over {steps} steps." in str(watched.watch.leak)
