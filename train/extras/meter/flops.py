"""How well a run uses its devices: floating-point operations (FLOPs) per token, and model FLOPs utilization (MFU).

As in appendix B of PaLM (arXiv 2204.02311) a multiply-add is two operations and recomputed activations do not count, so
that a run does not look better for doing more work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from train.extras.weightless import without_weights

STRIDE = 64
"""A model is counted at one, two and three times so many tokens; linear attention works in chunks of so many."""

MAX_OPERATORS = 40_000
"""In one forward and backward, some 4 seconds. 24 layers take 7,000; more are of a model that loops over positions."""


def mfu(tokens_per_second: float, flops_per_token: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilization of devices with ``peak`` FLOP/s together, 0 to 1; None if a figure is unknown."""
    return None if flops_per_token is None or peak is None else tokens_per_second * flops_per_token / peak


def model_flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """FLOPs of forward and backward per token, counted operator by operator on the meta device.

    Matrix products count: those of the forward, and of the gradients that ``requires_grad`` of the weights asks for.
    Each position attends to all others of its sequence, also where a causal mask hides half of them (as in PaLM), or to
    its window. Of a mixture of experts, those a token is sent to count. The decoder of an encoder-decoder reads as many
    tokens as its encoder; tokens are those of the encoder.

    Args:
        model: before it is compiled, wrapped or sharded; on any device. Not changed.
        sequence_length: tokens that see each other, those of a document or of a packed row; 0 leaves attention out.

    Returns:
        None for a model that cannot be run without data, or that loops over positions.
    """
    # A polynomial of second degree in the length, read off three short ones: a second for 24 layers.
    unit = STRIDE if sequence_length == 0 else max(1, min(STRIDE, sequence_length // 3))  # no longer than positions go
    counts = _count_flops(model, [unit, 2 * unit, 3 * unit])
    if counts is None:
        return None
    one, two, three = counts
    quadratic = (three - 2 * two + one) / (2 * unit**2)
    linear = (two - one) / unit - 3 * unit * quadratic
    constant = one - unit * linear - unit**2 * quadratic  # such as the head of a classifier
    attended = _attended_length(getattr(model, "config", None), sequence_length)
    return linear + quadratic * attended + constant / max(sequence_length, 1)


def _attended_length(config: Any, sequence_length: int) -> float:
    """How many positions a token attends to, the mean of the layers with attention."""
    # ModernBERT's sliding_window is half of its window, local_attention the whole.
    window = getattr(config, "local_attention", None) or getattr(config, "sliding_window", None) or sequence_length
    chunk = getattr(config, "attention_chunk_size", None) or sequence_length
    lengths = {"full_attention": sequence_length, "sliding_attention": min(window, sequence_length)}
    lengths["chunked_attention"] = min(chunk, sequence_length)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = [lengths[kind] for kind in kinds if kind in lengths] or [sequence_length]
    return sum(found) / len(found)


class _FlopCounter(TorchDispatchMode):
    """Adds up torch's formulas without operators that backward repeats, which ``FlopCounterMode`` cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self._num_operators = 0
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._num_operators += 1
        if self._num_operators > MAX_OPERATORS:
            raise OverflowError
        formula = flop_registry.get(func.overloadpacket)
        is_repeated = self.in_backward and torch.is_grad_enabled()  # backward records nothing itself
        if formula is not None and not is_repeated:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _count_flops(model: nn.Module, lengths: Sequence[int]) -> list[int] | None:
    """FLOPs of forward and backward of one sequence of each length, attention between all pairs; None as above."""
    # Fake tensors are slower than meta tensors alone, but with them constants that a model makes are known.
    ways = [(nullcontext(), False), (FakeTensorMode(allow_non_fake_inputs=True), False)]
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        ways.append((nullcontext(), True))  # classifiers that look for the end of each text: all but their head
    for mode, is_body in ways:
        try:
            with mode:
                return _count(model, lengths, is_body)
        except OverflowError:  # too many operators
            return None
        except Exception:  # models fail in their own ways
            continue
    return None


def _count(model: nn.Module, lengths: Sequence[int], is_body: bool) -> list[int]:
    twin = without_weights(model, "meta", torch.float32).eval()  # without dropout and transformers' checkpointing
    for module in twin.modules():
        packed = getattr(getattr(module, "weight", None), "quant_state", None)
        if packed is not None:  # a layer in 4 bits counts as a linear one
            module.__class__, module.weight = nn.Linear, nn.Parameter(torch.empty(packed.shape, device="meta"), False)
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
        with _FlopCounter() as counter, torch.enable_grad():
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
