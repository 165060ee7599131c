"""A copy of a model without its weights, on which extras try what it allows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def without_weights(model: nn.Module, device: str = "cpu", real: torch.dtype | None = None) -> Any:
    """A copy with tensors of the same shapes, tied where they were tied: on the meta device, or in a FakeTensorMode.

    ``real`` is the type of real numbers; None keeps theirs.
    """
    twins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        dtype = real if real is not None and tensor.is_floating_point() else tensor.dtype
        twin = torch.empty(tensor.shape, dtype=dtype, device=device)
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        if (scales := getattr(tensor, "quant_state", None)) is not None:  # of weights in 4 bits: kept as they are
            twins[id(tensor)].quant_state = twins[id(scales)] = scales
    return copy.deepcopy(model, twins)
