"""Updates made during backward: no two gradients need to exist at once (arXiv 2306.09782 does so for SGD).

As soon as the gradient of a parameter is complete, the parameter is updated and the gradient freed. There is no
gradient to accumulate, and none to clip by the norm of all; so this is for one micro-batch a step, in one process.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from train.records import StepOutcome
from train.step import Engine, MicroBatches


class InBackward(Engine):
    """Uses each gradient in backward.

    A gradient that is not finite never reaches its weights, and after the first such gradient of a step no other
    weight of that step is updated; with a loss that is not finite, none is. Weights whose gradients came earlier in the
    same backward, and were finite, keep their update: the step counts as skipped, and is reported so.
    """

    def step(self, model: nn.Module, optimizer: Any, micro_batches: MicroBatches, stop: bool = False) -> StepOutcome:
        self._optimizer: Any = optimizer.optimizer
        return super().step(model, optimizer, micro_batches, stop)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        groups = self._optimizer.param_groups
        self._order = float(self.config.optimization.grad_norm_type)
        self._norms: list[Tensor] = []
        self._finite = torch.isfinite(loss.detach())  # () all gradients up to now; on the device
        handles = [p.register_post_accumulate_grad_hook(partial(self._use, g)) for g in groups for p in g["params"]]
        try:
            super().backward(loss, scale)
        finally:
            self._optimizer.param_groups = groups
            for handle in handles:
                handle.remove()

    def clip(self, model: nn.Module) -> float:
        """The norm of all gradients; the step's one wait for the device."""
        return torch.linalg.vector_norm(torch.stack(self._norms), self._order).item()

    def update(self, optimizer: AcceleratedOptimizer, norm: float) -> tuple[float, bool]:
        return norm, not math.isfinite(norm)

    @torch.no_grad()
    def _use(self, group: dict[str, Any], parameter: Tensor) -> None:
        gradient, max_value = cast("Tensor", parameter.grad), self.config.optimization.max_grad_value
        norm = torch.linalg.vector_norm(gradient, self._order, dtype=torch.promote_types(gradient.dtype, torch.float32))
        self._norms.append(norm.float())
        self._finite = self._finite & torch.isfinite(norm)
        if max_value is not None:
            gradient.clamp_(-max_value, max_value)
        optimizer = self._optimizer
        optimizer.param_groups = [{**group, "params": [parameter]}]
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # does nothing where found_inf is set
            optimizer.found_inf = (~self._finite).float()
            optimizer.step()
            del optimizer.found_inf
        elif bool(self._finite):  # this kind has to be asked from the host
            optimizer.step()
        parameter.grad = None
