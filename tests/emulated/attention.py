"""What the card's attention kernels compute, by the CPU's; ``train.memory.kernels`` says which one the card takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def flash(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None) -> tuple[Any, ...]:
    is_causal = bool(rest[1]) if len(rest) > 1 else False
    assert not (rest and rest[0]), "the CPU's kernel has no dropout"
    keys, values = (repeated(tensor, query) for tensor in (key, value))
    forward: Any = aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = forward(query, keys, values, 0.0, is_causal, scale=scale)
    none, length = query.new_empty(0), query.shape[2]
    return out, sums, none, none, length, length, none.clone(), none.clone(), none.clone()


def flash_backward(grad: Tensor, *tensors: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    query, key, value, out, sums = tensors[:5]
    is_causal = tensors[10]
    keys, values = (repeated(tensor, query) for tensor in (key, value))
    backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, *others = backward(grad, query, keys, values, out, sums, 0.0, is_causal, scale=scale)
    shared = query.shape[1] // key.shape[1]
    return of_query, *(other.unflatten(1, (-1, shared)).sum(2) for other in others)


def efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any, **more: Any) -> Any:
    is_causal, scale = bool(rest[2]) if len(rest) > 2 else more.get("is_causal", False), more.get("scale")
    forward: Any = aten._scaled_dot_product_flash_attention_for_cpu
    assert not (rest[1] if len(rest) > 1 else 0), "the CPU's kernel has no dropout"
    out, sums = forward(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, sums, query.new_empty(0), query.new_empty(0)


def efficient_backward(grad: Tensor, *tensors: Any, scale: float | None = None) -> tuple[Any, ...]:
    query, key, value, bias, out, sums = tensors[:6]
    is_causal = bool(tensors[10]) if len(tensors) > 10 else False
    backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(grad, query, key, value, out, sums, 0.0, is_causal, attn_mask=bias, scale=scale)
    return *gradients, None


def repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """(B, H, S, D) keys or values for each head of the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


OF_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
