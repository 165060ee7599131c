"""Attention's backward pass, some heads at a time: the same gradients, with smaller buffers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train.extras.long_sequences import attention, heads
from train.extras.long_sequences.heads import by_heads, divide_attention, heads_at_once

LAYOUTS = {"flash": (-2, (1, 2)), "cudnn": (1, None), "lengths": (-2, (0, 1))}
"""Where the heads of each kernel are, and which dimensions to swap for (B, H, S, D), the batch apart."""
SCALE, CUTS = 0.4, (0, 5, 14, 20)


class Kernel:
    """Causal attention in double precision whose backward pass uses all that it is given; keeps the heads of calls."""

    def __init__(self, layout: str) -> None:
        self.layout, self.heads = layout, list[tuple[int, int]]()

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, H, S, D) of the layout; or back."""
        swapped = LAYOUTS[self.layout][1]
        tensor = tensor[0] if self.layout == "lengths" and tensor.ndim == 4 else tensor
        tensor = tensor.transpose(*swapped) if swapped else tensor
        return tensor[None] if tensor.ndim == 3 else tensor

    def laid_out(self, tensor: Tensor) -> Tensor:
        return self.rows(tensor)[0] if self.layout == "lengths" else self.rows(tensor)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, H, S, S) of (B, H, S, D) and (B, H', S, D)."""
        place = torch.arange(query.shape[2])
        document = torch.bucketize(place, torch.tensor(CUTS[1:-1] if self.layout == "lengths" else ()), right=True)
        seen = (document == document[:, None]) & (place <= place[:, None])
        scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * SCALE
        return scores.masked_fill(~seen, -torch.inf)

    def call_boxed(self, keys: str, *given: Any, scale: float) -> Any:
        *tensors, sums, rest = given
        assert (keys, rest, scale, sums.is_contiguous()) == ("keys", "rest", SCALE, True)
        gradient, query, key, value, out = map(self.rows, tensors)
        self.heads.append((query.shape[1], key.shape[1]))
        shared = query.shape[1] // key.shape[1]
        weights = (self.scores(query, key) - sums.view(query.shape[:3])[..., None]).exp()
        of_weights = gradient @ value.repeat_interleave(shared, 1).mT
        of_scores = weights * (of_weights - (gradient * out).sum(-1, keepdim=True)) * SCALE
        of_keys = of_scores.mT @ query, weights.mT @ gradient
        summed = (t.unflatten(1, (-1, shared)).sum(2) for t in of_keys)
        return tuple(map(self.laid_out, (of_scores @ key.repeat_interleave(shared, 1), *summed)))


@pytest.mark.parametrize(("layout", "batch"), [("flash", 1), ("flash", 2), ("cudnn", 2), ("lengths", 1)])
@pytest.mark.parametrize(("calls", "seen"), [(1, [(12, 6)]), (2, [(6, 3)] * 2), (4, [(4, 2)] * 3), (9, [(2, 1)] * 6)])
def test_some_heads_at_a_time_have_the_gradients_of_all(
    layout: str, batch: int, calls: int, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, kernel = torch.Generator().manual_seed(1), Kernel(layout)
    shapes = [(batch, n, 20, 4) for n in (12, 12, 6, 6)]
    direction, *leaves = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    scores = kernel.scores(query, key)
    out = F.scaled_dot_product_attention(query, key, value, scores > -torch.inf, scale=SCALE, enable_gqa=True)
    expected = torch.autograd.grad(out, leaves, direction)
    monkeypatch.setattr(heads, "BUFFER_BYTES", -(-batch * 20 * 12 * 4 * (4 + 16) // calls))
    given = [kernel.laid_out(t.detach()) for t in (direction, query, key, value, out)]
    sums = scores.detach().logsumexp(-1)
    sums = sums[0] if layout == "lengths" else sums
    found = by_heads(kernel, LAYOUTS[layout][0], (), "keys", *given, sums, "rest", scale=SCALE)
    assert [t.stride() for t in found] == [t.stride() for t in given[1:4]]
    for gradient, own in zip(expected, map(kernel.rows, found), strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-12)
    assert kernel.heads == seen


@pytest.mark.parametrize(
    ("tokens", "query_heads", "key_heads", "at_once"),
    [
        (16384, 32, 8, 8),  # 512 MiB of buffers
        (32768, 32, 8, 4),
        (140288, 32, 8, 1),
        (10**7, 32, 8, 1),  # no head can be divided
        (81920, 32, 8, 2),  # calls are as even as can be: here of 640 MiB
        (65536, 32, 32, 16),  # heads that share nothing take half
        (10**6, 32, 1, 1),
        (1, 32, 8, 8),
    ],
)
def test_the_more_tokens_the_fewer_heads_are_taken_at_a_time(
    tokens: int, query_heads: int, key_heads: int, at_once: int
) -> None:
    assert heads_at_once(tokens * query_heads * 128, query_heads, key_heads, 2) == at_once


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """torch's operators for CUDA, divided, with kernels that give what they are given; the heads of their calls."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has the real kernels")
    calls: list[int] = []

    def kernel(dim: int, gradient: Tensor, *given: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append(given[1].shape[dim])
        return given[0] * 2, given[1] * 3, given[2] * 4

    libraries = [torch.library.Library("aten", "IMPL") for _ in range(2)]
    libraries[0].impl("_flash_attention_backward", partial(kernel, -2), "CUDA")
    libraries[0].impl("_cudnn_attention_backward", partial(kernel, 1), "CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(heads, "LIBRARY", libraries[1])
    monkeypatch.setattr(heads, "BUFFER_BYTES", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divide_attention.__wrapped__()
    yield calls
    for library in reversed(libraries):
        library._destroy()


def test_operators_divide_where_heads_do_not_depend_on_each_other(operators: list[int]) -> None:
    on_card = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    query, key, nothing = torch.randn(2, 8, 6, 4), torch.randn(2, 8, 3, 4), torch.empty(0)

    def flash(
        query: Tensor, key: Tensor, cuts: Tensor | None = None, dropout: float = 0.0, value: Tensor | None = None
    ) -> list[int]:
        value = key if value is None else value
        sums = torch.zeros(query.shape[-2], len(query)) if query.ndim == 3 else torch.zeros(2, 6, 8)
        lengths = (cuts, cuts, 8, 8, dropout, True)
        tensors = (query, query, key, value, query, sums)
        found = torch.ops.aten._flash_attention_backward.default.redispatch(
            on_card, *tensors, *lengths, nothing, nothing, scale=1.0
        )
        assert all(map(torch.equal, found, (query * 2, key * 3, value * 4)))
        calls, operators[:] = list(operators), []
        return calls

    def cudnn(bias: Tensor | None = None, cuts: Tensor | None = None, dropout: float = 0.0) -> list[int]:
        q, k = query.transpose(1, 2), key.transpose(1, 2)
        lengths = (bias, cuts, cuts, 8, 8, dropout, True)
        tensors = (q, q, k, k, q, torch.zeros(2, 6, 8))
        found = torch.ops.aten._cudnn_attention_backward.default.redispatch(
            on_card, *tensors, nothing, nothing, *lengths, scale=1.0
        )
        assert all(map(torch.equal, found, (q * 2, k * 3, k * 4)))
        calls, operators[:] = list(operators), []
        return calls

    cuts = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert flash(query, key) == flash(query[0], key[0], cuts) == cudnn() == [1, 1, 1]
    assert flash(query, key, dropout=0.1) == cudnn(dropout=0.1) == cudnn(bias=torch.zeros(2, 1, 8, 8)) == [3]
    assert cudnn(cuts=cuts) == [3]
    assert flash(query, key, value=key[:, :, :1]) == [3]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "lengths"])
@pytest.mark.parametrize("batch", [1, 2])
def test_on_a_card(kernel: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that the kernels have of all heads at once, with less memory meanwhile."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 kernels need an Ampere card or newer")
    shapes = [(batch, 4096, number, 64) for number in (32, 32, 8, 8)]
    direction, *leaves = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    query, key, value = (leaf.requires_grad_().transpose(1, 2) for leaf in leaves)
    found, peaks = [], []
    divide_attention()
    for size in (2**40, 1):
        monkeypatch.setattr(heads, "BUFFER_BYTES", size)
        if kernel == "lengths":
            cuts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * 4096
            flat = [leaf.flatten(0, 1) for leaf in leaves]
            out = attention.flash_over_lengths()(*flat, cuts, cuts, 4096, 4096, window_size=(-1, 0))
            out = out.unflatten(0, (batch, 4096))
        else:
            with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                out = out.transpose(1, 2)
        torch.autograd.grad(out, leaves, direction, retain_graph=True)  # libraries take what they keep
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found.append(torch.autograd.grad(out, leaves, direction))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    for whole, own in zip(*found, strict=True):
        assert (whole - own).float().norm() <= 0.01 * whole.float().norm()
    assert peaks[1] < 0.7 * peaks[0]
