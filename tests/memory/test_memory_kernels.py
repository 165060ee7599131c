"""What operators cost."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from train.memory.kernels import Costs

BATCH, HEADS, QUERIES, KEYS, SIZE, VALUE_SIZE = 2, 8, 6, 10, 16, 24
KERNELS = ("flash", "efficient", "cudnn")


def attention(kernel: str, key_heads: int) -> tuple[Costs, float]:
    """What forward and backward of a kernel cost as counted here, and the operations that torch counts, if it does."""
    q, k, v, out = (
        torch.empty(BATCH, heads, length, size)
        for heads, length, size in (
            (HEADS, QUERIES, SIZE),
            (key_heads, KEYS, SIZE),
            (key_heads, KEYS, VALUE_SIZE),
            (HEADS, QUERIES, VALUE_SIZE),
        )
    )
    costs, theirs = Costs({torch.float32: 1e12}, 1e12), 0.0
    for suffix, tensors, result in (("", (q, k, v), out), ("_backward", (out, q, k, v), (q, k, v))):
        func = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
        costs.count(func.default, tensors, {}, result)
        if key_heads == HEADS:
            theirs += flop_registry[func](*tensors, out_val=result)
    return costs, theirs


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_counts_as_torch_counts_it(kernel: str) -> None:
    costs, theirs = attention(kernel, HEADS)
    assert costs.flops == theirs > 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_heads_that_share_keys_compute_as_much(kernel: str) -> None:
    """Which torch 2.11 cannot count."""
    assert attention(kernel, HEADS // 4)[0].flops == attention(kernel, HEADS)[0].flops
