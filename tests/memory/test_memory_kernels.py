"""What operators cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import flop_registry

from train.memory.kernels import Costs, attention_kernel
from train.memory.predict import Target

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


T4, A100, RTX_4090, H100 = (7, 5), (8, 0), (8, 9), (9, 0)
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "capability", "head_size", "has_mask", "shares_heads", "kernel"),
    [
        (HALF, T4, 64, False, False, "efficient"),
        (HALF, T4, 64, False, True, "math"),  # no kernel before Ampere shares heads
        (HALF, T4, 64, True, False, "efficient"),
        (torch.bfloat16, T4, 64, False, False, "math"),
        (SINGLE, A100, 64, False, False, "efficient"),
        (SINGLE, A100, 64, False, True, "math"),
        (SINGLE, H100, 64, False, True, "math"),
        (SINGLE, A100, 66, False, False, "math"),
        (HALF, A100, 64, False, True, "flash"),
        (HALF, A100, 256, False, True, "flash"),
        (HALF, A100, 320, False, False, "efficient"),
        (HALF, A100, 64, True, False, "efficient"),
        (HALF, A100, 64, True, True, "math"),
        (HALF, RTX_4090, 192, False, True, "flash"),
        (HALF, RTX_4090, 224, False, False, "efficient"),  # flash attention has no backward for it there
        (HALF, RTX_4090, 224, False, True, "math"),
        (DOUBLE, H100, 64, False, False, "math"),
    ],
)
def test_the_kernel_of_a_card(
    dtype: torch.dtype,
    capability: tuple[int, int],
    head_size: int,
    has_mask: bool,
    shares_heads: bool,
    kernel: str,
) -> None:
    query = torch.empty(1, 8, 128, head_size, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(1, 1, 128, 128, device="meta") if has_mask else None
    assert attention_kernel(query, mask, 0.0, Target("cuda", capability), shares_heads) == kernel


@pytest.mark.gpu
def test_the_kernel_is_the_one_that_torch_chooses_on_this_card() -> None:
    capability = torch.cuda.get_device_capability()
    names = {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "efficient"}
    names[SDPBackend.CUDNN_ATTENTION] = "cudnn"
    wrong = []
    cases = itertools.product((HALF, torch.bfloat16, SINGLE), (32, 64, 128, 200, 224, 256), (False, True), (8, 2))
    for dtype, head_size, has_mask, key_heads in cases:
        query, key = (
            torch.empty(1, heads, 128, head_size, dtype=dtype, device="cuda", requires_grad=True)
            for heads in (8, key_heads)
        )
        mask = torch.zeros(1, 1, 128, 128, dtype=dtype, device="cuda") if has_mask else None
        choice = torch._fused_sdp_choice(query, key, key, mask, 0.0, not has_mask, enable_gqa=key_heads != 8)
        chosen = names[SDPBackend(choice)]
        card = Target("cuda", capability, prefers_cudnn=chosen == "cudnn")
        planned = attention_kernel(query, mask, 0.0, card, key_heads != 8)
        if planned != chosen:
            wrong.append((dtype, head_size, has_mask, key_heads, planned, chosen))
    assert not wrong
