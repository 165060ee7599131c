"""Errors of loss kernels that Triton's interpreter runs on the CPU, a line of JSON per case.

To be run as a script with ``TRITON_INTERPRET=1``, which Triton reads when it is first imported.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from typing import Any

import torch
from test_losses import by_definition, capped, error, full_sum, gradients
from torch import Tensor

from train.extras.losses.chunked import PLAIN, Objective
from train.extras.losses.fused import cce_sum, liger_sum
from train.records import IGNORE

OBJECTIVES = (PLAIN, Objective(0.1), Objective(0.0, 1e-2), Objective(0.1, 1e-2))
SCALES = (1.0, 2.0**16)


class Number(float):
    """A float as Triton's compiler hands it to a kernel, which its interpreter does not."""

    def to(self, dtype: Any) -> Number:
        return self


CAPPED = (Objective(softcap=Number(2.0)), Objective(0.1, 1e-2, softcap=Number(2.0)))


def example(num_rows: int, num_classes: int, hidden_size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """[hidden (N, H), weight (V, H), bias (V,)] that ``dtype`` holds exactly, and labels (N,), a third ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, hidden_size), (num_classes, hidden_size), (num_classes,))
    tensors = [(torch.randn(shape, generator=generator) / 2).to(dtype) for shape in shapes]
    labels = torch.randint(num_classes, (num_rows,), generator=generator)
    labels[::3] = IGNORE
    return tensors, labels


def usual(objective: Objective, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """() of all logits, multiplied in the type of the tensors, the rest in fp32."""
    if objective == PLAIN:
        return full_sum(hidden, weight, bias, labels)
    return objective.loss_sum(capped(torch.nn.functional.linear(hidden, weight, bias), objective), labels)


def measured(kernel: Any, objective: Objective, dtype: torch.dtype, scale: float, has_bias: bool) -> dict[str, Any]:
    """Relative errors of loss and gradients, by the kernel and by all logits in the same type."""
    size = (250, 500, 96) if kernel is cce_sum else (40, 300, 16)
    tensors, labels = example(*size, dtype)
    given: list[Tensor | None] = [*tensors[:2], tensors[2] if has_bias else None]
    wide: list[Tensor | None] = [None if t is None else t.double() for t in given]
    exact = gradients(partial(by_definition, objective=objective), wide, labels)
    options = {} if kernel is cce_sum else {"objective": objective}
    own = gradients(partial(kernel, **options), given, labels, scale=scale)
    of_logits = gradients(partial(usual, objective), given, labels, scale=scale)
    return {"own": error(own, exact), "usual": error(of_logits, exact)}


def main(name: str) -> None:
    import triton.language as tl  # type: ignore

    # The interpreter has none of CUDA's own functions.
    if name == "liger":
        from liger_kernel.ops import cross_entropy  # type: ignore

        cross_entropy.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
        cases = [*itertools.product([liger_sum], OBJECTIVES, [torch.float32, torch.bfloat16], SCALES, [False, True])]
        cases += itertools.product([liger_sum], CAPPED, [torch.float32], SCALES, [False, True])
    else:
        from cut_cross_entropy import tl_utils  # type: ignore

        tl_utils.tl_log1p = lambda x: tl.log(x + 1.0)
        cases = [*itertools.product([cce_sum], [PLAIN], [torch.float16], (1.0, 2.0**10), [False])]
    for kernel, objective, dtype, scale, has_bias in cases:
        case = f"{dtype}, {objective}, scale {scale}, {'with' if has_bias else 'no'} bias"
        print(json.dumps({"case": case, **measured(kernel, objective, dtype, scale, has_bias)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
