"""Counts the floating-point operations of a model's forward and backward by torch's formulas, on shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

MAX_OPERATORS = 40_000
"""In one forward and backward, some 4 seconds. 24 layers take 7,000; more are of a model that loops over positions."""


class TooManyOperatorsError(Exception):
    """The forward and backward take more than :data:`MAX_OPERATORS`."""


class FlopCounter(TorchDispatchMode):
    """Adds up the formulas of ``torch.utils.flop_counter``, without operators that backward repeats.

    torch's ``FlopCounterMode`` cannot tell those from backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self._num_operators = 0
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise TooManyOperatorsError
        formula = flop_registry.get(func.overloadpacket)
        is_repeated = self.in_backward and torch.is_grad_enabled()  # backward records nothing itself
        if formula is not None and not is_repeated:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(model: nn.Module, lengths: Sequence[int]) -> list[int] | None:
    """FLOPs of forward and backward of one sequence of each length; ``model`` and all generators stay as they are.

    Attention is computed for all pairs of positions, experts for the tokens that are sent to them.

    Returns:
        None for a model that cannot be run without data, or takes more than :data:`MAX_OPERATORS`.
    """
    ways = [(nullcontext, False), (_fake_tensors, False)]
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        ways.append((nullcontext, True))  # classifiers that look for the end of each text: all but their head
    for mode, is_body in ways:
        try:
            with mode():
                return _count(model, lengths, is_body)
        except TooManyOperatorsError:
            return None
        except Exception:  # models fail in their own ways
            continue
    return None


def _fake_tensors() -> AbstractContextManager[Any]:
    """Slower than meta tensors alone, but here constants that a model makes are known."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def _count(model: nn.Module, lengths: Sequence[int], is_body: bool) -> list[int]:
    twin: Any = _without_weights(model).eval()  # dropout off, and checkpointing that transformers would do
    if hasattr(twin, "set_attn_implementation"):  # of transformers: products that torch has formulas for
        twin.set_attn_implementation("eager")
        twin.set_experts_implementation("batched_mm")
    part = twin.base_model if is_body else twin
    by_name = any(p.name == "input_ids" or p.kind is p.VAR_KEYWORD for p in signature(part.forward).parameters.values())
    both = getattr(getattr(twin, "config", None), "is_encoder_decoder", False)
    counts = []
    for length in lengths:
        ids = torch.zeros((1, length), dtype=torch.long, device="meta")
        named = {"input_ids": ids, "decoder_input_ids": ids} if both else {"input_ids": ids}
        with FlopCounter() as counter, torch.enable_grad():
            answer = _first_tensor(part(**named) if by_name else part(ids))
            if answer.requires_grad:
                counter.in_backward = True
                torch.autograd.backward(answer.sum())  # into gradients of the copy, which nobody reads
        counts.append(counter.flops)
    return counts


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
