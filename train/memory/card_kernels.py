"""What fake tensors do not show of kernels: their time, which attention runs, buffers inside them, libraries' losses.

Time is a roofline's (Williams, Waterman, Patterson 2009): each operator takes as long as its arithmetic or its traffic,
whichever is longer, at rates that real kernels reach. It ranks settings; it does not replace a measurement.

The rules are those of the sources. torch: ``sdp_utils.cpp`` for the choice among attention kernels, the backward
wrappers of each kernel for buffers that are freed again. Losses: Liger Kernel 0.8. On-chip memory is not counted.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp.autocast_mode import _cast
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import flop_registry

from train.extras import is_here
from train.extras.device import flash_lacks_backward
from train.extras.hardware import cpu_has_fast_bf16
from train.extras.meter.flops import attended
from train.extras.meter.tracker import tensors_in
from train.memory.predict import Target


def module_of(extra: str, name: str) -> Any:
    """The module ``name`` of an extra, or None if the extra is not here."""
    return import_module(f"train.extras.{extra}.{name}") if is_here(f"train.extras.{extra}") else None


def patched(module: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """Inside it, ``module`` has ``value`` under ``name``; does nothing for None."""
    return nullcontext() if module is None else patch.object(module, name, value)


attention, fused = module_of("long_sequences", "attention"), module_of("losses", "fused")
by_heads = module_of("long_sequences", "heads")
aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
CUDNN = torch.backends.cudnn.version() or 92400  # that of torch 2.14's wheels for CUDA 13; older ones ask only for 9.15
# Older ones are wrong for some lengths; the variable is torch's own.
CUDNN_FIRST = CUDNN > 91500 and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
# Shares of the published rates that large kernels reach, as steps on an H200 showed (docs/results/memory_accuracy-*):
REACHED_FLOPS, REACHED_ATTENTION_FLOPS, REACHED_BANDWIDTH = 0.7, 0.5, 0.65
REACHED_EFFICIENT_FLOPS = 0.2  # 2.5 times as long as flash (docs/results/attention_shapes-nvidia-h200.md)
REACHED_FP32_ATTENTION_FLOPS = 0.033  # of bf16's rate: CUTLASS multiplies three times in TF32, with or without TF32 on
LAUNCH_SECONDS = 1e-5  # least time of an operator: Python and autograd launching its kernel


@dataclass
class Costs:
    """Arithmetic and time of the operators of a step on a card with the given rates."""

    flops_per_second: dict[torch.dtype, float]  # published dense rates by type
    bytes_per_second: float
    flops: float = 0.0
    seconds: float = 0.0

    def count(self, func: Any, args: Any, kwargs: Any, result: Any, repeats: int = 1) -> None:
        if func.is_view or func.namespace not in ("aten", "torch_attn"):
            return
        inputs, outputs = tensors_in(args), tensors_in(result)
        is_between_devices = func is aten.copy_.default and len({t.device.type for t in inputs}) > 1
        if not outputs or outputs[0].device.type == "meta" or is_between_devices:  # the plan adds waiting for the host
            return
        flops, reached, formula, dtype = 0.0, REACHED_FLOPS, flop_registry.get(func.overloadpacket), outputs[0].dtype
        if func.namespace == "torch_attn" or (formula is not None and "_scaled_dot_product" in func._schema.name):
            given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False), **kwargs)
            flops, reached = _attention_flops(func._schema.name, given), REACHED_ATTENTION_FLOPS
            if dtype == torch.float32 and torch.bfloat16 in self.flops_per_second:  # since Ampere
                dtype, reached = torch.bfloat16, REACHED_FP32_ATTENTION_FLOPS
            elif dtype in HALF and "efficient" in func._schema.name:
                reached = REACHED_EFFICIENT_FLOPS
        elif formula is not None:
            flops = float(formula(*args, **kwargs, out_val=result))
        self.add(flops, sum(t.numel() * t.element_size() for t in (*inputs, *outputs)), dtype, repeats, reached)

    def add(self, flops: float, traffic: float, dtype: torch.dtype, repeats: int, reached: float) -> None:
        """Adds a kernel ``repeats`` times: in ``dtype`` at a share of its rate, moving ``traffic`` bytes."""
        rate = self.flops_per_second.get(dtype) or max(self.flops_per_second.values())
        computing, moving = flops / (rate * reached), traffic / (self.bytes_per_second * REACHED_BANDWIDTH)
        self.flops += flops * repeats
        self.seconds += max(LAUNCH_SECONDS, computing, moving) * repeats


def _attention_flops(name: str, given: dict[str, Any]) -> float:
    """Of the attention operator ``name`` with these arguments; torch 2.11's own formula refuses grouped queries.

    Sequences of different lengths, laid end to end, count as if all were as long as the longest.
    """
    size, value_size = given["query"].shape[-1], given["value"].shape[-1]
    left, right = given.get("window_size") or (-1, -1)
    seen = given["max_k"] if "max_k" in given else given["value"].shape[-2]
    seen = attended(seen, left + right + 1 if left >= 0 else None, given.get("is_causal") or right == 0)
    sizes = 3 * size + 2 * value_size if "backward" in name else size + value_size
    return 2.0 * (given["query"].numel() // size) * seen * sizes


def attention_kernel(
    card: Target, tensors: Sequence[Tensor], mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False
) -> str:
    """The kernel that ``scaled_dot_product_attention`` runs on ``card``: cudnn, flash, efficient or math.

    For query (B, H, S, D), key (B, H', T, D) and value (B, H', T, D'); H' below H: with ``enable_gqa``.
    """
    query, key, value = tensors
    sizes, capability = (query.shape[-1], value.shape[-1]), card.capability
    is_half, is_strided = query.dtype in HALF, any(t.stride(-1) != 1 for t in (*tensors, mask) if t is not None)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_plain_type = is_half or query.dtype == torch.float32
    # Math refuses heads that do not divide, with or without a card.
    if query.ndim != 4 or query.shape[1] % key.shape[1] or is_strided or not is_plain_type or capability > (12, 1):
        return "math"
    if is_half and card.prefers_cudnn and CUDNN_FIRST and _cudnn_takes(sizes, capability, trains):
        is_known_dropout = RELEASE < (2, 12) or dropout * 16 % 1 == 0  # cuDNN counts in sixteenths
        is_single = key.shape[2] == 1 or (dropout > 0 and query.shape[2] == 1)
        if is_known_dropout and not is_single and (mask is None or (mask.ndim in (2, 4) and not mask.requires_grad)):
            return "cudnn"
    lacks_backward = trains and flash_lacks_backward(capability, sizes[0], dropout)
    is_plain = mask is None and not (is_causal and query.shape[2] != key.shape[2])
    if is_half and capability >= (8, 0) and sizes[0] == sizes[1] <= 256 and is_plain and not lacks_backward:
        return "flash"
    has_tensor_cores = capability >= ((7, 0) if is_half else (8, 0))
    is_aligned = not has_tensor_cores or all(size % (8 if is_half else 4) == 0 for size in sizes)
    lacks_type = query.dtype == torch.bfloat16 and capability < (8, 0)
    lacks_heads = query.shape[1] != key.shape[1] and RELEASE < (2, 14)
    return "efficient" if is_aligned and not lacks_type and not lacks_heads else "math"


def _cudnn_takes(sizes: tuple[int, int], capability: tuple[int, int], trains: bool) -> bool:
    """Whether torch lets cuDNN attend with heads of these sizes, of query and value, on a card that prefers it."""
    widest, is_new = max(sizes), RELEASE >= (2, 14)
    always = widest <= 128 or sizes == (192, 128)  # the latter are DeepSeek's
    on_hopper = not is_new and capability == (9, 0) and widest <= 256
    since_then = is_new and CUDNN > 92200 and (sizes == (256, 256) or (widest <= 256 and not trains))
    return (always or on_hopper or since_then) and all(size % 8 == 0 for size in sizes)


@contextmanager
def card_attention(card: Target, asked: str | None = None) -> Iterator[set[str]]:
    """Inside it, ``scaled_dot_product_attention`` calls the kernel that would run on the card; yields those that ran.

    Packages of their own, ``asked`` for instead of sdpa, have operators that take all heads at once. A plain
    replacement of the function: where checkpointing recomputes, in the thread of the backward pass, neither a function
    mode nor ``sdpa_kernel`` reaches, and without a card torch's own choice is always math.
    """
    original, all_at_once = F.scaled_dot_product_attention, getattr(attention, "_attend_at_once", lambda *args: None)
    used: set[str] = set()

    def attend_at_once(*args: Any) -> Any:  # for all documents at once the operator gives the sizes without a card
        used.add("flash over lengths")
        return all_at_once(*args)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p=0.0, is_causal=False, **options: Any
    ) -> Tensor:
        if (device := query.device.type) not in ("cuda", "mps"):
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value, attn_mask = _cast((query, key, value, attn_mask), device, dtype)
        scale, tensors, kernel = options.get("scale"), (query, key, value), "math"  # MPS has no other that trains
        if device == "cuda":
            kernel = attention_kernel(card, tensors, attn_mask, dropout_p, is_causal)
        used.add(kernel)
        if kernel == "math":
            run = aten._scaled_dot_product_attention_math
            return run(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
        head_size, value_size = query.shape[-1], value.shape[-1]
        if kernel == "flash" and head_size % 8:
            scale = head_size**-0.5 if scale is None else scale
            query, key, value = (F.pad(t, (0, 8 - head_size % 8)) for t in tensors)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # torch turns it into one to add, of the query's type
                zero, never = (torch.full((), x, dtype=query.dtype, device=query.device) for x in (0.0, -torch.inf))
                attn_mask = torch.where(attn_mask, zero, never)
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        own = [] if kernel == "flash" else [attn_mask, grad]  # flash knows no mask
        run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        return run(query, key, value, *own, dropout_p, is_causal, scale=scale)[0][..., :value_size]

    with (
        patch.object(F, "scaled_dot_product_attention", attend),
        patched(attention, "_attend_at_once", attend_at_once),
        patched(by_heads if asked not in (None, "sdpa") else None, "BUFFER_BYTES", sys.maxsize),
    ):
        yield used


def temporary_bytes(func: Any, args: Any, result: Any) -> list[int]:
    """Buffers that the kernel of an operator takes from the allocator and frees before it returns."""
    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        query = args[1]
        rows, columns = min(query.shape[2], 128), min(args[2].shape[2], 512)
        return [query.numel() * query.element_size(), rows * columns * (6 if query.dtype in HALF else 4)]
    if name in ("aten::mm", "aten::addmm") and result.device.type == "cpu":
        # a processor without bf16 arithmetic sums in fp32 first
        return [result.numel() * 4 + 128] if result.dtype == torch.bfloat16 and not cpu_has_fast_bf16() else []
    if name == "torch_attn::_varlen_attn_backward":
        return _flash_backward(args[1], args[2], documents=args[6].numel() - 1)
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        return _flash_backward(args[1], args[2], divides=not args[10])
    if name == "aten::_scaled_dot_product_cudnn_attention_backward":  # bias and dropout
        return _flash_backward(args[1], args[2], divides=args[8] is None and not args[13], copies=0)
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        batch, heads, length, head_size = query.shape
        delta, rows = batch * heads * rounded_up(length, 32) * 4, batch * heads * rounded_up(length, 64)
        accumulator = rows * rounded_up(head_size, 64) * (4 if head_size <= 128 else 12)
        return [delta] if query.dtype == torch.float32 else [delta, accumulator]
    if name == "bitsandbytes::gemm_4bit":  # the weight and its scales as they were before they were quantised
        weights = args[2][0] * args[2][1]
        return [weights * args[0].element_size(), 4 * -(-weights // args[4])]
    if name == "aten::embedding_dense_backward" and result.device.type != "cpu":
        gradient, num_indices, num_embeddings = args[0], args[1].numel(), args[2]
        # To sort the indices; beyond 3,072 also partial sums per segment, an upper bound.
        segments = num_indices // 10 + min(num_indices, num_embeddings)
        return [num_indices * 8] * 5 + ([segments * gradient.shape[-1] * 4] if num_indices > 3072 else [])
    return []


def _flash_backward(query: Tensor, key: Tensor, documents: int = 0, divides: bool = True, copies: int = 2) -> list[int]:
    """softmax_d, the fp32 accumulator of dq, and dk and dv per query head where heads share them.

    For (B, H, S, D) and (B, H', S', D); or documents end to end, (T, H, D) and (T', H', D), each with 128 tokens spare.
    Where some heads are taken at a time, those of these alone, and their gradients; flash copies output and gradient.
    """
    heads, key_heads, head_size, size = query.shape[1], key.shape[1], query.shape[-1], query.element_size()
    at_once = by_heads.heads_at_once(query.numel(), heads, key_heads, size) if divides and by_heads else key_heads
    some = heads // key_heads * at_once
    rows = len(query) + 128 * documents if documents else len(query) * rounded_up(query.shape[2], 128)
    buffers = [rows * some * 4, rows * some * rounded_up(head_size, 32 if head_size <= 128 else 64) * 4]
    per_query, per_key = query.numel() // heads * size, key.numel() // key_heads * size
    if key_heads != heads:
        buffers += [per_key * some] * 2
    if at_once < key_heads:
        buffers += [per_query * some] * (1 + copies) + [per_key * at_once] * 2  # below, the sums of rows
        buffers += [query.numel() // heads // head_size * some * 4] if query.ndim == 4 and len(query) > 1 else []
    return buffers


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def library_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS's workspaces, which it keeps: one for the forward pass and one for autograd (``CublasHandlePool.cpp``)."""
    return 2 * (32 * 2**20 if capability == (9, 0) else 2 * 4096 * 1024 + 16 * 8 * 1024)


@contextmanager
def library_losses(capability: tuple[int, int], costs: Costs) -> Iterator[None]:
    """Inside it, ``liger`` needs the memory and time that it needs on a card of this capability.

    ``cce`` is taken to need as much memory; it takes a little less, as it never holds logits of some tokens.
    """

    def cce(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        _count_products(costs, hidden, weight, 1)  # it computes the logits twice
        return _Liger.apply(hidden, weight, bias, capability, costs)  # type: ignore

    with (
        patched(fused, "cut_cross_entropy", cce),
        patched(fused, "liger_cross_entropy", lambda *t, how: _Liger.apply(*t[:3], capability, costs)),
    ):
        yield


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, capability: Any, costs: Costs) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight and of_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_hidden else None
        losses = torch.zeros(len(hidden), device=hidden.device)
        # Logits of some tokens at once: about as many elements as the hidden states (N, H) have.
        share = -(-len(hidden) // -(-len(weight) // hidden.shape[1]))
        logits = hidden.new_empty(min(1 << (share - 1).bit_length(), len(hidden)), len(weight))
        # From Ampere on it adds a chunk's part of the weight's gradient in fp32 without a tensor of its size.
        if grad_weight is not None and (hidden.dtype == torch.float32 or capability < (8, 0)):
            torch.empty_like(weight).float()
        _count_products(costs, hidden, weight, 1 + of_hidden + (grad_weight is not None))
        del logits
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias.to(hidden.dtype) if grad_bias is not None else None)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        found = [g if needed else None for g, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)]
        return *found, None, None


def _count_products(costs: Costs, hidden: Tensor, weight: Tensor, number: int) -> None:
    """Adds ``number`` products of hidden states (N, H) and weight (V, H), which read both and write one of them."""
    traffic = (2 * hidden.numel() + 2 * weight.numel()) * hidden.element_size()
    costs.add(2 * len(weight) * hidden.numel(), traffic, hidden.dtype, number, REACHED_FLOPS)
