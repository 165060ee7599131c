"""``torch.compile``, layer by layer.

Each of the repeated layers is compiled in place; everything around them stays as it is. So attention keeps its causal
path (a model compiled whole builds a mask of length × length), the names of weights stay, the loss in chunks and
generation run as before, and equal layers share one compilation. The second length makes lengths symbolic in the graph,
so that further lengths are not compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from train.records import UserError


def compile_layers(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compiles the repeated layers of ``model`` in place, when each is first called; returns how many there are.

    To be called before the model is wrapped or sharded, after activation checkpointing was set up. Raises UserError
    where no repeated layers are known of this model.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) or type(m).__name__ in names]
    if not layers:
        raise UserError("compile: this model has no repeated layers of transformers. Leave it out.")
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)
