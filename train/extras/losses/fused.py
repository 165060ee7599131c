"""The loss over a large vocabulary by the kernels of libraries, each where it is right.

``cce`` is Cut Cross-Entropy (arXiv 2411.09009), which keeps no logits outside the chip; ``liger`` Liger Kernel's fused
loss (arXiv 2410.10989). What each cannot do is in :func:`obstacle_to`. Arguments as of ``chunked_sum``.
"""

import inspect
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.extras.device import product_dtype
from train.extras.losses.chunked import PLAIN, Objective, rows_to_compute, to_dtype
from train.records import IGNORE

PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}


class Place(NamedTuple):
    """Where a loss is computed, as far as that decides which."""

    device_type: str
    dtype: torch.dtype  # of the matrix products
    capability: tuple[int, int] = (0, 0)  # CUDA's compute capability
    is_replicated: bool = False  # whether ranks compute the same loss (tensor parallelism)


def obstacle_to(kernel: str, place: Place, objective: Objective = PLAIN, installed: bool | None = None) -> str | None:
    """Why ``kernel``, whose package is ``installed`` (None: look), cannot compute the loss here; None where it can."""
    if kernel == "chunked":
        return None
    is_cce, kind, instead = kernel == "cce", place.device_type, "use chunked or auto"
    is_half = place.dtype in (torch.bfloat16, torch.float16)
    rounds = kernel == "liger" and place.dtype == torch.float16
    cases = (
        (place.is_replicated, f"may round its sums differently on each rank of tensor parallelism: {instead}"),
        (kind != "cuda", f"runs only on CUDA devices, and this is a {kind} device: {instead}"),
        (is_cce and place.capability < (8, 0), f"needs a GPU of compute capability 8.0 (Ampere) or newer: {instead}"),
        (is_cce and not is_half, f"multiplies only in bf16 or fp16: give --mixed_precision bf16, or {instead}"),
        (is_cce and objective != PLAIN, f"does not support scaling, capping, smoothing and z-loss here: {instead}"),
        (rounds, "rounds gradients to fp16 before loss scaling can save the small ones: use bf16, or chunked or auto"),
    )
    if obstacle := next((why for is_so, why in cases if is_so), None):
        return obstacle
    is_there = _is_installed(kernel) if installed is None else installed
    return None if is_there else f"is not installed, or too old: pip install '.[{kernel}]' adds it; or {instead}"


def _is_installed(kernel: str) -> bool:
    is_there = all(find_spec(name) is not None for name in (PACKAGES[kernel], "triton"))
    if not is_there or kernel != "cce":
        return is_there
    from cut_cross_entropy import linear_cross_entropy  # type: ignore

    # 25.1, as on the package index, sums gradients in half precision.
    return "accum_c_fp32" in inspect.signature(linear_cross_entropy).parameters


def best_kernel(place: Place, objective: Objective = PLAIN) -> str:
    """The best that is there, by memory and time in arXiv 2411.09009, table 1."""
    return next(kernel for kernel in ("cce", "liger", "chunked") if obstacle_to(kernel, place, objective) is None)


def _sum(
    kernel: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, num_targets: int | None = None
) -> Tensor:
    """() the sum of what ``kernel`` gives for hidden states (N, H), weight and bias in their type, and labels (N,)."""
    hidden, labels = rows_to_compute(hidden, labels, num_targets or None)  # Liger divides by the number of rows
    dtype = product_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # each operation names its type
        losses = kernel(hidden.to(dtype), weight.to(dtype), to_dtype(bias, dtype), labels)
        return losses.to(torch.promote_types(dtype, torch.float32)).sum()


def cce_sum(*tensors: Any, **options: Any) -> Tensor:
    return _sum(cut_cross_entropy, *tensors, **options)


def cut_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """(N,) losses of hidden states (N, H) and labels (N,), all in half precision, by the package.

    By position: so the gradient from above, loss scaling included, is applied before anything is rounded.
    """
    from cut_cross_entropy import linear_cross_entropy  # type: ignore

    # The weight's gradient is complete and both are summed in fp32, or with Kahan's compensation before Triton 3.2.
    options: dict[str, Any] = {"ignore_index": IGNORE, "reduction": "none", "impl": "cce_kahan_full_c"}
    return linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


def liger_sum(hidden: Tensor, weight: Tensor, *rest: Any, objective: Objective = PLAIN, **options: Any) -> Tensor:
    """() the summed loss by Liger Kernel, which prepares gradients in forward: not for fp16."""
    if weight.requires_grad and not hidden.requires_grad and torch.is_grad_enabled():
        hidden = hidden.detach().requires_grad_()  # it prepares no gradient at all where the input needs none
    return _sum(partial(liger_cross_entropy, how=objective), hidden, weight, *rest, **options)


def liger_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: Objective) -> Tensor:
    """() the summed loss of hidden states (N, H) and labels (N,) by the package."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore

    terms = {"lse_square_scale": how.z_loss, "label_smoothing": how.label_smoothing, "softcap": how.softcap or None}
    exact = {"ignore_index": IGNORE, "reduction": "sum", "accum_dtype": torch.float32}
    return LigerFusedLinearCrossEntropyLoss(**terms, **exact)(weight, hidden, labels, bias)
