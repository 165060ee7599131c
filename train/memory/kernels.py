"""Details of CUDA kernels that fake tensors do not show: which attention kernel runs, and its buffers.

The rules are those of torch's sources: ``sdp_utils.cpp`` for the choice among attention kernels, the backward
wrappers of each kernel for the buffers they take from the caching allocator and free before they return.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.launch import cpu_has_fast_bf16
from train.memory.optional import module_of

attention = module_of("long_sequences", "attention")

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def attention_kernel(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, capability: tuple[int, int], prefers_cudnn: bool
) -> str:
    """The kernel that ``scaled_dot_product_attention`` runs on a card: cudnn, flash, efficient or math.

    Args:
        query, key: (B, H, S, D) and (B, H', S', D).
        capability: the card's compute capability.
        prefers_cudnn: torch tries cuDNN first: on Hopper and data-centre Blackwell with a cuDNN newer than 9.15.
    """
    half, head_size = query.dtype in HALF, query.shape[-1]
    if query.dtype not in (*HALF, torch.float32) or query.ndim != 4:
        return "math"
    if prefers_cudnn and half and head_size % 8 == 0 and head_size <= 128:
        return "cudnn"
    wide = head_size > 192 and capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    banned = wide and query.requires_grad and (head_size <= 224 or dropout > 0)
    if mask is None and half and head_size <= 256 and capability >= (8, 0) and not banned:
        return "flash"
    if capability < (8, 0) and query.dtype == torch.bfloat16:
        return "math"
    alignment = 8 if half else 4
    return "efficient" if head_size % alignment == 0 or half else "math"


class Attention:
    """Stands in for ``scaled_dot_product_attention`` and calls the kernel that would run on the card.

    A plain replacement of the function: where checkpointing recomputes, in the thread of the backward pass, neither
    a function mode nor ``sdpa_kernel`` reaches, and without a card torch's own choice is always math.
    """

    def __init__(self, capability: tuple[int, int], prefers_cudnn: bool) -> None:
        self._capability, self._prefers_cudnn = capability, prefers_cudnn
        self._original = F.scaled_dot_product_attention
        self._at_once: Any = getattr(attention, "_attend_at_once", None)
        self.kernels_used: set[str] = set()

    def __enter__(self) -> Attention:
        F.scaled_dot_product_attention = self._attend  # pyright: ignore[reportAttributeAccessIssue]
        if attention is not None:
            attention._attend_at_once = self._attend_at_once
        return self

    def __exit__(self, *exception: Any) -> None:
        F.scaled_dot_product_attention = self._original
        if attention is not None:
            attention._attend_at_once = self._at_once

    def _attend_at_once(self, *args: Any) -> Tensor:
        """Calls the real operator for all documents at once, which gives the sizes without a card."""
        self.kernels_used.add("flash over lengths")
        return self._at_once(*args)

    def _attend(  # fixed by torch
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != "cuda":
            return self._original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (_autocast(t) for t in (query, key, value))
            attn_mask = None if attn_mask is None else _autocast(attn_mask)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        kernel = attention_kernel(query, key, attn_mask, dropout_p, self._capability, self._prefers_cudnn)
        self.kernels_used.add(kernel)
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        head_size = query.shape[-1]
        if head_size % 8:
            scale = head_size**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, 8 - head_size % 8)) for t in (query, key, value))
        if kernel == "flash":
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return out[..., :head_size]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # torch turns it into one to add, of the query's type
                zero, never = (torch.full((), x, dtype=query.dtype, device=query.device) for x in (0.0, -torch.inf))
                attn_mask = torch.where(attn_mask, zero, never)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        if kernel == "efficient":
            if enable_gqa:
                groups = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            run = aten._scaled_dot_product_efficient_attention
        else:
            run = aten._scaled_dot_product_cudnn_attention
        return run(query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale)[0][..., :head_size]


def _autocast(tensor: Tensor) -> Tensor:
    target = torch.get_autocast_dtype("cuda")
    if not tensor.is_floating_point() or tensor.dtype in (target, torch.float64):
        return tensor
    return tensor.to(target)


def temporary_bytes(func: Any, args: Any, result: Any) -> list[int]:
    """Buffers that the kernel of an operator takes from the allocator and frees before it returns."""
    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        query = args[1]
        rows, columns = min(query.shape[2], 128), min(args[2].shape[2], 512)
        return [query.numel() * query.element_size(), rows * columns * (4 + 2 * (query.dtype in HALF))]
    if name in ("aten::mm", "aten::addmm") and result.device.type == "cpu":
        # a processor without bf16 arithmetic sums in fp32 first
        sums_apart = result.dtype == torch.bfloat16 and not cpu_has_fast_bf16()
        return [result.numel() * 4 + 128] if sums_apart else []
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        return _flash_backward(args[1], args[2])
    if name == "torch_attn::_varlen_attn_backward":
        return _flash_backward_over_lengths(args[1], args[2], args[6].numel() - 1)
    if name == "aten::_scaled_dot_product_cudnn_attention_backward":
        return _flash_backward(args[1], args[1])
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        batch, heads, length, head_size = query.shape
        delta = batch * heads * _up(length, 32) * 4
        if query.dtype == torch.float32:
            return [delta]
        return [delta, batch * heads * _up(length, 64) * _up(head_size, 64) * 4 * (1 if head_size <= 128 else 3)]
    if name == "bitsandbytes::gemm_4bit":  # the weight and its scales as they were before they were quantised
        weights = args[2][0] * args[2][1]
        return [weights * args[0].element_size(), 4 * -(-weights // args[4])]
    if name == "aten::embedding_dense_backward":
        return _embedding_backward(args[0], args[1].numel(), args[2])
    return []


def _flash_backward(query: Tensor, key: Tensor) -> list[int]:
    """Of query (B, H, S, D) and key (B, H', S', D)."""
    batch, heads, length, head_size = query.shape
    return _flash_buffers(query, batch * _up(length, 128), heads, batch * key.shape[2], key.shape[1], head_size)


def _flash_backward_over_lengths(query: Tensor, key: Tensor, num_documents: int) -> list[int]:
    """Of sequences laid end to end, (T, H, D) and (T', H', D), each with 128 tokens to spare."""
    tokens, heads, head_size = query.shape
    return _flash_buffers(query, tokens + 128 * num_documents, heads, key.shape[0], key.shape[1], head_size)


def _flash_buffers(query: Tensor, rows: int, heads: int, keys: int, key_heads: int, head_size: int) -> list[int]:
    """softmax_d, the fp32 accumulator of dq, and dk and dv per query head where heads share them."""
    buffers = [rows * heads * 4, rows * heads * _up(head_size, 32 if head_size <= 128 else 64) * 4]
    if key_heads != heads:
        buffers += [keys * heads * head_size * query.element_size()] * 2
    return buffers


def _embedding_backward(gradient: Tensor, num_indices: int, num_embeddings: int) -> list[int]:
    """Buffers for sorting the indices; beyond 3,072 indices also partial sums per segment, an upper bound."""
    buffers = [num_indices * 8] * 5
    if num_indices > 3072:
        segments = num_indices // 10 + min(num_indices, num_embeddings)
        buffers.append(segments * gradient.shape[-1] * 4)
    return buffers


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def library_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS's workspaces, which it takes from the allocator once and keeps.

    32 MiB on Hopper and newer, 8 MiB and an eighth before (``CUDABlas.cpp``), for each thread that multiplies: the
    one of the forward pass and autograd's.
    """
    each = 32 * 2**20 if capability >= (9, 0) else 2 * 4096 * 1024 + 16 * 8 * 1024
    return 2 * each
