"""The optimizer step whose updates are made during backward: no two gradients need to exist at once.

:mod:`train.step` is the same step without it. As soon as the gradient of a parameter is complete, the parameter is
updated and the gradient freed (arXiv 2306.09782 does so for SGD). There is no gradient to accumulate, and none to clip
by the norm of all; so this is for one micro-batch a step, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from train.config import Optimization
from train.errors import UsageError
from train.records import Mark, MicroBatch, StepOutcome, unmarked
from train.step import count_targets, outcome_of, read_counts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


def optimizer_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    window: Sequence[MicroBatch],
    config: Optimization,
    stop_requested: bool = False,
    mark: Mark = unmarked,
) -> StepOutcome:
    """What :func:`train.step.optimizer_step` does, with each update made in backward.

    A gradient that is not finite never reaches its weights, and after the first such gradient of a step no other
    weight of that step is updated; with a loss that is not finite, none is. Weights whose gradients came earlier in the
    same backward, and were finite, keep their update: the step counts as skipped, and is so reported.

    Raises:
        UserError: the batch has no target at all.
        UsageError: the step has several micro-batches.
    """
    if len(window) != 1:
        raise UsageError(
            f"optimizer_in_backward: this step has {len(window)} micro-batches, whose gradients would have to be "
            "accumulated. Give gradient_accumulation_steps: 1, or leave optimizer_in_backward out."
        )
    counts = read_counts(count_targets(accelerator, window, stop_requested))
    accelerator.gradient_accumulation_steps = 1
    accelerator.step = 0
    if not model.training:
        model.train()
    updates = _Updates(optimizer.optimizer, config, accelerator.device)
    with accelerator.accumulate(model), updates.made_in_backward():
        mark("forward")
        batch = window[0].to(accelerator.device)
        loss = model(batch.inputs, batch.labels, num_targets=batch.num_targets)
        mark("backward")
        updates.are_fine = torch.isfinite(loss.detach())
        accelerator.backward(loss / counts[0])
    mark("optimizer")
    # The step's one wait for the device.
    norm, are_fine = torch.stack([updates.norm(), updates.are_fine.float()]).tolist()
    if not are_fine and math.isfinite(norm):
        norm = math.nan  # of a loss that is not finite the gradients may be, and mean nothing
    return outcome_of(config, loss.detach().float(), counts, norm, skipped=not are_fine)


class _Updates:
    """The updates of one step."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Optimization, device: torch.device) -> None:
        self._optimizer, self._max_value = optimizer, config.max_grad_value
        self._order, self._device = float(config.grad_norm_type), device
        self._norms: list[Tensor] = []
        self.are_fine = torch.ones((), dtype=torch.bool, device=device)
        """() whether the loss and all gradients up to now are finite; on the device."""

    @contextmanager
    def made_in_backward(self) -> Iterator[None]:
        """Inside it, each gradient is used and freed as soon as it is complete."""
        groups = self._optimizer.param_groups
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(group))
            for group in groups
            for parameter in group["params"]
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups
            for handle in handles:
                handle.remove()

    def norm(self) -> Tensor:
        """() of all gradients of the step, before they were clipped."""
        if not self._norms:
            return torch.zeros((), device=self._device)
        return torch.linalg.vector_norm(torch.stack(self._norms), self._order)

    def _hook(self, group: dict[str, Any]) -> Any:
        @torch.no_grad()
        def update(parameter: Tensor) -> None:
            gradient = cast("Tensor", parameter.grad)
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, self._order, dtype=dtype)
            self._norms.append(norm.float())
            self.are_fine = self.are_fine & torch.isfinite(norm)
            if self._max_value is not None:
                gradient.clamp_(-self._max_value, self._max_value)
            self._step(parameter, group)
            parameter.grad = None

        return update

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """The optimizer's own step, for one parameter."""
        optimizer = cast("Any", self._optimizer)
        optimizer.param_groups = [{**group, "params": [parameter]}]
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # leaves all as it is where the flag is up
            optimizer.found_inf = (~self.are_fine).float()
            optimizer.step()
            del optimizer.found_inf
        elif bool(self.are_fine):  # this kind has to be asked from the host
            optimizer.step()
