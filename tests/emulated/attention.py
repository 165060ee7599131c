"""What the card's attention kernels compute, by the CPU's; ``train.memory.card_kernels`` says which it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operators
from torch import Tensor

aten, of_lengths = torch.ops.aten, torch.ops.torch_attn


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


def over_lengths(query: Tensor, key: Tensor, value: Tensor, cuts: Tensor, *rest: Any, **more: Any) -> tuple[Any, ...]:
    """Of documents laid end to end: (T, H, D), key and value (T, H', D); the second result is not looked at."""
    parts, (scale, window) = _each(cuts, query, key, value), _scale_and_window(rest[3:], more)
    out = torch.cat([(_weights(q, k, scale, window) @ v).transpose(0, 1) for q, k, v in parts])
    return out.to(query.dtype), query.new_zeros(query.shape[1], len(query)).float(), torch.zeros(2, dtype=torch.uint64)


def over_lengths_backward(grad: Tensor, *tensors: Any, **more: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, cuts = tensors[:6]
    (scale, window), shared = _scale_and_window(tensors[9:10] + tensors[11:], more), query.shape[1] // key.shape[1]
    found = []
    for of_out, q, k, v in _each(cuts, grad, query, key, value):
        weights, factor = _weights(q, k, scale, window), q.shape[-1] ** -0.5 if scale is None else scale
        of_weights = of_out @ v.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        found.append((of_scores @ k, of_scores.mT @ q, weights.mT @ of_out))
    of_query, *others = (torch.cat([part.transpose(0, 1) for part in parts]) for parts in zip(*found, strict=True))
    summed = [other.unflatten(1, (-1, shared)).sum(2) for other in others]
    return tuple(gradient.to(query.dtype) for gradient in (of_query, *summed))


def _each(cuts: Tensor, first: Tensor, *others: Tensor) -> Any:
    """(H, S, D) in fp32 of each document, with as many heads in all tensors."""
    tensors = [tensor.repeat_interleave(first.shape[1] // tensor.shape[1], dim=1) for tensor in (first, *others)]
    return zip(*(tensor.float().transpose(0, 1).split(cuts.diff().tolist(), 1) for tensor in tensors), strict=True)


def _scale_and_window(rest: Any, more: dict[str, Any]) -> tuple[float | None, tuple[int, int]]:
    """Of the arguments that follow the longest lengths: ``is_causal, scale, window_size``."""
    _, scale, window = (*rest, *[None] * 3)[:3]
    left, right = more.get("window_size", window)  # (-1, 0) where it is causal
    return more.get("scale", scale), (left, right)


def _weights(query: Tensor, key: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """(H, S, S) of a document; ``window``: how many tokens one sees to its left and right, -1 for all."""
    length = query.shape[1]
    left, right = (length if size < 0 else size for size in window)
    ahead = torch.arange(length) - torch.arange(length).unsqueeze(1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill((ahead < -left) | (ahead > right), -torch.inf).softmax(-1)


def repeated(tensor: Tensor, query: Tensor) -> Tensor:
    """(B, H, S, D) keys or values for each head of the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


OF_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    of_lengths._varlen_attn.default: over_lengths,
    of_lengths._varlen_attn_backward.default: over_lengths_backward,
}
