"""Fake tensors of a prediction are those that torch's own mode makes, found by the form of what they are made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from train.extras.activations import tiling
from train.extras.activations.tiling import tiles
from train.extras.losses import chunked
from train.extras.losses.chunked import rows_by_chunk
from train.memory.fakes import FakeMode, few_pieces

Made = Callable[[Tensor, Tensor], Any]
OPERATORS: dict[str, Made] = {
    "a new tensor": lambda a, b: a + b,
    "an int": lambda a, b: a * 2,
    "a float": lambda a, b: a * 2.0,
    "a bool": lambda a, b: a * True,
    "of another type": lambda a, b: a.to(torch.bfloat16),
    "of another device": lambda a, b: a.to("meta"),
    "a product": lambda a, b: a @ b.t(),
    "a view": lambda a, b: a.view(2, 2, 6),
    "a view of a view": lambda a, b: a.t()[2:, 1:],
    "an expanded view": lambda a, b: a.unsqueeze(1).expand(4, 3, 6),
    "strides": lambda a, b: torch.empty_strided((2, 3), (5, 1), dtype=a.dtype),
    "transposed memory": lambda a, b: a.t().clone(),
    "in place": lambda a, b: a.add_(b),
    "in place of a view": lambda a, b: a.view(-1).mul_(2),
    "into a given tensor": lambda a, b: torch.add(b, 1, out=a),
    "another shape in place": lambda a, b: a.clone().t_(),
    "grown in place": lambda a, b: a.clone().resize_(8, 6),
    "another's memory": lambda a, b: a.clone().set_(b),  # type: ignore
    "several": lambda a, b: torch.cat([a, b], dim=1),
    "a tuple": lambda a, b: a.max(dim=1),
    "pieces": lambda a, b: a.split(2),
    "a conjugate": lambda a, b: torch.complex(a.float(), b.float()).conj(),
    "a sum": lambda a, b: a.sum([1], keepdim=True),
}


def described(result: Any, given: tuple[Tensor, Tensor]) -> Any:
    """The form of a result, the size of its memory, and of which argument it is."""
    if isinstance(result, tuple | list):
        return [described(part, given) for part in result]
    storage = result.untyped_storage()
    whose = [number for number, tensor in enumerate(given) if tensor.untyped_storage()._cdata == storage._cdata]
    same = [number for number, tensor in enumerate(given) if tensor is result]
    form = result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, result.is_conj()
    return form, storage.nbytes(), whose, same


@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_is_the_same_the_second_time_and_as_torch_gives_it(name: str) -> None:
    found: list[Any] = []
    for mode, times in (FakeTensorMode(), 1), (FakeMode(), 3):
        with mode:
            for dtype in torch.float32, torch.int64:
                for _ in range(times):
                    given = torch.zeros(4, 6, dtype=dtype), torch.zeros(4, 6, dtype=dtype)
                    try:
                        result = OPERATORS[name](*given)
                    except (RuntimeError, TypeError) as error:  # as 64-bit numbers do, in the place of others
                        found.append((mode, dtype, type(error)))
                        continue
                    found.append((mode, dtype, described(result, given)))
                    for made in result if isinstance(result, tuple | list) else [result]:
                        assert isinstance(made, FakeTensor)
    for dtype in torch.float32, torch.int64:
        by_torch, *by_form = [seen for _, kind, seen in found if kind == dtype]
        assert by_form == [by_torch] * 3


def test_a_known_form_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, *args: Any) -> Any:
        asked.append(str(func))
        return original(mode, func, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    with FakeMode():
        for _ in range(5):
            first, second = torch.empty(4, 6), torch.empty(4, 6)
            assert (first + second).t().shape == (6, 4)
            assert (first + 1).shape == (4, 6)
            assert (first.double() + second).dtype == torch.float64
    assert [asked.count(f"aten.{name}") for name in ("t.default", "add.Tensor", "_to_copy.default")] == [1, 3, 1]


def test_numbers_that_are_equal_are_not_the_same_argument() -> None:
    with FakeMode():
        whole = torch.empty(4, dtype=torch.int64)
        found = [(whole * factor).dtype for factor in (1, 1.0, True, 1)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_the_type_of_results_follows_the_default_type() -> None:
    with FakeMode():
        whole, found = torch.empty(4, dtype=torch.int64), list[torch.dtype]()
        for dtype in torch.bfloat16, torch.float32, torch.bfloat16:
            torch.set_default_dtype(dtype)
            try:
                found.append((whole / 2).dtype)
            finally:
                torch.set_default_dtype(torch.float32)
    assert found == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_frozen_part_in_inference_mode_is_no_obstacle() -> None:
    with FakeMode():
        tensor = torch.empty(4, 6)
        for is_inference in (True, False, True, False):
            with torch.inference_mode(is_inference):
                assert tensor.view(2, 2, 6).shape == (2, 2, 6)
                assert (tensor + 1).is_inference() is is_inference


def test_a_result_is_the_tensor_that_was_given_for_it() -> None:
    mode, add = FakeMode(), torch.ops.aten.add.out
    with mode:
        first, second, third = (torch.empty(4, 6) for _ in range(3))
    for given in first, third, first:
        assert mode.dispatch(add, (), (first, second), {"out": given}) is given


def test_what_is_kept_keeps_no_tensor_alive() -> None:
    """Or a prediction would count memory that is free."""
    freed: list[str] = []
    mode = FakeMode()
    for _ in range(2):
        real = torch.ones(6)
        with mode:
            tensor = torch.empty(4, 6)
            joined = torch.cat([tensor * real, tensor])
        for name, held in ("real", real), ("tensor", tensor), ("joined", joined):
            weakref.finalize(held, freed.append, name)
        del real, tensor, joined, held
    assert sorted(freed) == sorted(["real", "tensor", "joined"] * 2)


@pytest.mark.parametrize("cut", [tiles, rows_by_chunk])
@pytest.mark.parametrize("rows", [1, 999, 1000, 4096, 4097, 100_000, 131_072, 131_073])
def test_pieces_that_are_left_out_count_as_those_that_are_not(cut: Callable[..., Any], rows: int) -> None:
    tracker: Any = SimpleNamespace(repeats=1, offloaded_bytes=0)
    with few_pieces(tracker):
        module: Any = tiling if cut is tiles else chunked
        cut_here = getattr(module, cut.__name__)
        found = [(tracker.repeats, min(piece.stop, rows) - piece.start) for piece in cut_here(rows, 1000)]
    assert sum(times * size for times, size in found) == rows
    assert sum(times for times, _ in found) == len(list(cut(rows, 1000)))
    assert len(found) <= 3 and tracker.repeats == 1
