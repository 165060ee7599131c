"""Operations and bytes moved by a step, operator by operator, and the time they would take on a card.

The estimate is a roofline (Williams, Waterman, Patterson 2009): each operator takes as long as its arithmetic or its
traffic, whichever is longer, at rates that real kernels reach. It ranks settings; it does not replace a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
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
        inputs, outputs = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (args, result))
        if not outputs or outputs[0].device.type == "meta":
            return
        if func is torch.ops.aten.copy_.default and len({t.device.type for t in inputs}) > 1:
            return  # between host and device: the plan adds the time that waits for it
        flops, formula = 0.0, flop_registry.get(func.overloadpacket)
        if func.namespace == "torch_attn" or (formula is not None and "_scaled_dot_product" in func._schema.name):
            names = [argument.name for argument in func._schema.arguments]
            flops = _attention_flops(func._schema.name, dict(zip(names, args, strict=False), **kwargs))
        elif formula is not None:
            flops = float(formula(*args, **kwargs, out_val=result))
        traffic = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        self.add(flops, traffic, outputs[0].dtype, repeats)

    def add(self, flops: float, traffic: float, dtype: torch.dtype, repeats: int = 1) -> None:
        """Adds a kernel that computes in ``dtype`` and moves ``traffic`` bytes, ``repeats`` times."""
        rate = self.flops_per_second.get(dtype) or max(self.flops_per_second.values())
        computing, moving = flops / (rate * REACHED_FLOPS), traffic / (self.bytes_per_second * REACHED_BANDWIDTH)
        self.flops += flops * repeats
        self.seconds += max(LAUNCH_SECONDS, computing, moving) * repeats


def _attention_flops(name: str, given: dict[str, Any]) -> float:
    """Of the attention operator ``name`` with these arguments; torch 2.11's own formula refuses grouped queries.

    Sequences of different lengths, laid end to end, count as if all were as long as the longest.
    """
    size, value_size = given["query"].shape[-1], given["value"].shape[-1]
    left, right = given.get("window_size") or (-1, -1)
    seen = given["max_k"] if "max_k" in given else given["value"].shape[-2]
    if given.get("is_causal") or right == 0:
        seen /= 2  # half of the square is not computed
    if left >= 0:
        seen = min(seen, left + right + 1)
    sizes = 3 * size + 2 * value_size if "backward" in name else size + value_size
    return 2.0 * (given["query"].numel() // size) * seen * sizes
