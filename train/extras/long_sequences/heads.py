"""Attention's backward pass, some heads at a time where sequences are long.

For it the kernels of flash attention and cuDNN take buffers of their own: the gradient of the queries in fp32 and,
where query heads share keys and values, the gradients of those for each query head. With 32 heads of 128 these are 32
KiB a token. No head needs another's, so the same kernel can be called for some of them after the others. This is done
within torch's operators for CUDA, and so for all that call them: packed rows, compiled layers, context parallelism.
"""

import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 2**29  # of one call, about: the heads of so many tokens keep any card busy
LIBRARY = torch.library.Library("aten", "IMPL")  # what is registered lasts as long as this
# Where the heads are; and the arguments (share of dropout; bias, cuts of a nested tensor) that only all heads can have.
OPERATORS = {"_flash_attention_backward": (-2, (10,)), "_cudnn_attention_backward": (1, (8, 9, 13))}


@cache
def divide_attention() -> None:
    """From now on the operators of this process take some heads at a time where all would take large buffers."""
    for name, places in OPERATORS.items() if torch.version.cuda else ():  # AMD's kernels take no such buffers
        own = partial(by_heads, torch.library.get_kernel(f"aten::{name}", "CUDA"), *places)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there was a kernel, which the new one calls
            LIBRARY.impl(name, own, "CUDA", with_keyset=True, allow_override=True)


def by_heads(kernel: Any, dim: int, of_all: Sequence[int], keys: Any, *given: Any, **options: Any) -> Sequence[Tensor]:
    """The gradients of query, key and value, which ``kernel`` makes of what is ``given``.

    That is: the gradient of the output, query, key, value and output, with heads in dimension ``dim``; the logarithms
    of the softmax's sums, (B, H, S) or (H, T); and more, with which at the places ``of_all`` nothing is divided.
    """
    _, query, key, value, _, sums, *more = given
    heads = key.shape[dim]
    step = heads_at_once(query.numel(), query.shape[dim], heads, key.element_size())
    if step == heads or value.shape[dim] != heads or any(isinstance(given[p], Tensor) or given[p] for p in of_all):
        return kernel.call_boxed(keys, *given, **options)
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]

    def some(first: int, tensor: Tensor, dim: int = dim) -> Tensor:
        """The heads that belong to those of the key from ``first`` on."""
        shared = tensor.shape[dim] // heads
        return tensor.narrow(dim, first * shared, min(step, heads - first) * shared)

    for first in range(0, heads, step):
        tensors = [*(some(first, t) for t in given[:5]), some(first, sums, query.ndim - 3).contiguous()]
        torch._foreach_copy_([some(first, t) for t in gradients], kernel.call_boxed(keys, *tensors, *more, **options))
    return gradients


def heads_at_once(elements: int, query_heads: int, heads: int, bytes_of_each: int) -> int:
    """How many of the ``heads`` of the keys are taken at a time, by the size of the queries."""
    buffers = elements * (4 + 2 * bytes_of_each if query_heads > heads else 4)
    return -(-heads // min(heads, max(1, -(-buffers // BUFFER_BYTES))))
