"""Operations and bytes moved by a step, operator by operator, and the time they would take on a card.

The estimate is a roofline (Williams, Waterman, Patterson 2009): each operator takes as long as its arithmetic or its
traffic, whichever is longer, at rates that real kernels reach. It ranks settings; it does not replace a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

REACHED_FLOPS, REACHED_BANDWIDTH = 0.7, 0.8
"""Shares of the published rates that large kernels reach."""
LAUNCH_SECONDS = 5e-6
"""Least time of an operator: launching its kernel."""


@dataclass
class Costs:
    """Arithmetic and time of the operators of a step on a card with the given rates."""

    flops_per_second: dict[torch.dtype, float]
    """Published dense rates by type."""
    bytes_per_second: float
    flops: float = 0.0
    seconds: float = 0.0

    def count(self, func: Any, args: Any, kwargs: Any, result: Any, repeats: int = 1) -> None:
        """Adds one operator, ``repeats`` times."""
        if func.is_view or func.namespace not in ("aten", "torch_attn"):
            return
        inputs, outputs = list(_tensors(args)), list(_tensors(result))
        if not outputs or outputs[0].device.type == "meta":
            return
        if func is torch.ops.aten.copy_.default and len({t.device.type for t in inputs}) > 1:
            return  # between host and device: the plan adds the time that waits for it
        traffic = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        flops = 0.0
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            is_attention = "_scaled_dot_product" in func._schema.name
            flops = (
                _flops_of_attention(func, args, kwargs)
                if is_attention
                else float(formula(*args, **kwargs, out_val=result))
            )
            if _is_causal(func, args, kwargs):
                flops /= 2  # half of the square is not computed
        if func.namespace == "torch_attn":
            flops = _flops_over_lengths(func, args, kwargs)
        self.add(flops, traffic, outputs[0].dtype, repeats)

    def add(self, flops: float, traffic: float, dtype: torch.dtype, repeats: int = 1) -> None:
        """Adds a kernel that computes in ``dtype`` and moves ``traffic`` bytes, ``repeats`` times."""
        rate = self.flops_per_second.get(dtype) or max(self.flops_per_second.values())
        seconds = max(
            LAUNCH_SECONDS, flops / (rate * REACHED_FLOPS), traffic / (self.bytes_per_second * REACHED_BANDWIDTH)
        )
        self.flops += flops * repeats
        self.seconds += seconds * repeats


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    return bool(_named(func, args, kwargs).get("is_causal", False))


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False), **kwargs)


def _flops_of_attention(func: Any, args: Any, kwargs: Any) -> float:
    """Of attention over whole rows; torch 2.11's own formula refuses several query heads to a key head."""
    given = _named(func, args, kwargs)
    batch, heads, queries, size = given["query"].shape
    keys, value_size = given["value"].shape[-2:]
    sizes = 3 * size + 2 * value_size if "backward" in func._schema.name else size + value_size
    return 2.0 * batch * heads * queries * keys * sizes


def _flops_over_lengths(func: Any, args: Any, kwargs: Any) -> float:
    """Of flash attention over sequences of different lengths, as if all were as long as the longest."""
    given = _named(func, args, kwargs)
    tokens, heads, head_size = given["query"].shape
    left, right = given.get("window_size") or (-1, -1)
    seen = given["max_k"] * (0.5 if given.get("is_causal") or right == 0 else 1.0)
    if left >= 0:
        seen = min(seen, left + right + 1)
    products = 5 if "backward" in func._schema.name else 2
    return 2.0 * products * tokens * seen * heads * head_size


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
