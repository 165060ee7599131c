"""Memory and arithmetic of libraries' losses on a card, for fake tensors, which their kernels do not accept.

Allocations and products follow the sources: Cut Cross-Entropy's with gradients summed in fp32 (Triton ≥ 3.2), Liger
Kernel's 0.8. A kernel's on-chip memory is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.loss import Objective
from train.memory.costs import Costs
from train.memory.optional import module_of, patched

fused = module_of("losses", "fused")

LIGER_FUSED_SUM_CAPABILITY = (8, 0)
"""From this capability on Liger adds a chunk's part of the weight's gradient in fp32 without a tensor of its size."""


@contextmanager
def library_losses(capability: tuple[int, int], costs: Costs | None) -> Iterator[None]:
    """Inside it, ``cce`` and ``liger`` need the memory and time that they need on a card of this capability."""

    def cut_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        return _CutCrossEntropy.apply(hidden, weight, bias, labels, costs)  # pyright: ignore

    def liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, objective: Objective) -> Tensor:
        return _Liger.apply(hidden, weight, bias, capability, costs)  # pyright: ignore

    with (
        patched(fused, "cut_cross_entropy", cut_cross_entropy),
        patched(fused, "liger_cross_entropy", liger),
    ):
        yield


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, costs: Costs | None
    ) -> Tensor:
        ctx.costs = costs
        log_z, mean_logits = (torch.empty(n, device=hidden.device) for n in (len(hidden), len(weight)))
        ctx.save_for_backward(hidden, weight, bias, labels, log_z, mean_logits)
        _count_products(costs, hidden, weight, 1)
        return torch.empty_like(log_z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, _, _, mean_logits = ctx.saved_tensors
        order = torch.argsort(mean_logits).to(torch.int32)
        sums = [
            torch.zeros_like(t, dtype=torch.float32) if needed else None
            for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        _count_products(ctx.costs, hidden, weight, 1 + sum(s is not None for s in sums[:2]))
        del order
        for place in (2, 1, 0):  # each is rounded while those after it are still there
            sums[place] = None if (total := sums[place]) is None else total.to(hidden.dtype)
        return *sums, None, None


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        capability: tuple[int, int],
        costs: Costs | None,
    ) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight and of_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_hidden else None
        losses = torch.zeros(len(hidden), device=hidden.device)
        logits = hidden.new_empty(liger_chunk_tokens(len(hidden), hidden.shape[1], len(weight)), len(weight))
        if grad_weight is not None and (hidden.dtype == torch.float32 or capability < LIGER_FUSED_SUM_CAPABILITY):
            torch.empty_like(weight).float()
        _count_products(costs, hidden, weight, 1 + of_hidden + (grad_weight is not None))
        del logits
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias.to(hidden.dtype) if grad_bias is not None else None)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        found = [g if needed else None for g, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)]
        return *found, None, None


def liger_chunk_tokens(num_tokens: int, width: int, num_classes: int) -> int:
    """Rows of logits that Liger Kernel holds at once: about as many elements as the hidden states (N, H) have."""
    share = -(-num_tokens // -(-num_classes // width))
    return min(1 << (share - 1).bit_length(), num_tokens)


def _count_products(costs: Costs | None, hidden: Tensor, weight: Tensor, number: int) -> None:
    """Adds ``number`` products of hidden states (N, H) and weight (V, H), which read both and write one of them."""
    if costs is not None:
        traffic = (2 * hidden.numel() + 2 * weight.numel()) * hidden.element_size()
        for _ in range(number):
            costs.add(2 * len(weight) * hidden.numel(), traffic, hidden.dtype)
