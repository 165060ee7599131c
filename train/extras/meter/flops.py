"""Counts the FLOPs of a model's forward and backward by torch's formulas, without weights or data."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MAX_OPERATORS = 40_000
"""In one forward and backward, some 4 seconds. A model of 24 layers has 7,000; more are of one that loops over
positions."""


class OperatorsExceededError(Exception):
    """The forward and backward take more than :data:`MAX_OPERATORS`."""


class ModelFlops(TorchDispatchMode):
    """Adds up ``torch.utils.flop_counter``'s formulas, without those of operators that backward repeats.

    ``FlopCounterMode`` itself cannot tell recomputation from backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self._num_operators = 0
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise OperatorsExceededError
        formula = flop_registry.get(func.overloadpacket)
        is_recomputed = self.in_backward and torch.is_grad_enabled()  # only what is recomputed records gradients there
        if formula is not None and not is_recomputed:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(model: nn.Module, lengths: Iterable[int]) -> list[int]:
    """FLOPs of forward and backward of one sequence of each length; ``model`` and the generators stay as they are.

    Attention is computed for all pairs of positions, experts for the tokens that are sent to them.

    Raises:
        Exception: of any type, where the model cannot be run without data.
    """
    twin: Any = _without_weights(model).eval()  # dropout and transformers' checkpointing off
    if hasattr(twin, "set_attn_implementation"):  # of transformers: products that torch has formulas for
        twin.set_attn_implementation("eager")
        twin.set_experts_implementation("batched_mm")
    counts = []
    for length in lengths:
        try:
            counts.append(_count(twin, twin, length))
        except NotImplementedError:  # some classifiers look for the end of each text; the body does not
            counts.append(_count(twin.base_model, twin, length))
    return counts


def _count(module: Any, model: Any, length: int) -> int:
    """FLOPs of ``module``, which is ``model`` or its body, with (1, length) tokens."""
    ids = torch.zeros((1, length), dtype=torch.long, device="meta")
    more = {"decoder_input_ids": ids} if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else {}
    known = inspect.signature(module.forward).parameters.values()
    with ModelFlops() as counter, torch.enable_grad():
        if any(parameter.name == "input_ids" or parameter.kind is parameter.VAR_KEYWORD for parameter in known):
            output = module(input_ids=ids, **more)
        else:
            output = module(ids)
        answer = _first_tensor(output)
        if answer.requires_grad:
            counter.in_backward = True
            torch.autograd.backward(answer.sum())
    model.zero_grad()
    return counter.flops


def _first_tensor(output: Any) -> Tensor:
    """Logits, or hidden states: the first tensor of real numbers in a model's output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else getattr(output, "__dict__", {}).values() or output
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes but no data, tied where they were tied; frozen ones stay frozen.

    Real numbers become fp32, as counts do not depend on it; layers in 4 bits (bitsandbytes) become linear ones.
    """
    twins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        packed = getattr(tensor, "quant_state", None)
        dtype = torch.float32 if packed is not None or tensor.is_floating_point() else tensor.dtype
        twin = torch.empty(tensor.shape if packed is None else packed.shape, dtype=dtype, device="meta")
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        twins[id(packed)] = packed  # not copied
    copied = copy.deepcopy(model, twins)
    for original, module in zip(model.modules(), copied.modules(), strict=True):
        if getattr(getattr(original, "weight", None), "quant_state", None) is not None:
            module.__class__ = nn.Linear
    return copied
