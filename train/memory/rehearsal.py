"""The most expensive step of a run, made before its first: what would fail in hour four fails in second ten."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from train.evaluation import reshard
from train.extras.endurance.recovery import PersistentBuffers, Start
from train.extras.parallelism.context import shared_sequences
from train.records import MicroBatch, StepOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from train.config import Optimization
    from train.records import Meter


def rehearse(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    step: Callable[..., StepOutcome],
    window: list[MicroBatch],
    evaluated: MicroBatch | None,
    config: Optimization,
    meter: Meter,
) -> None:
    """Makes one whole step, optimizer state included, and evaluates a batch; afterwards all is as it was.

    To be called on every rank before the first step, when the optimizer has no state yet. The update is a real one at
    a learning rate of zero, so no weight moves; then its state is dropped, and random state, buffers and loss scale
    are put back.

    Args:
        step: as the loop will call it.
        window: micro-batches of one step.
        evaluated: the largest batch that will be evaluated.
    """
    with _leaving_no_trace(accelerator, model, optimizer):
        # First the optimizer's state, which every step but the first finds there; and a first step whose gradients
        # overflow, as at the first loss scale they may, would not make it.
        _make_state(model, optimizer)
        window = _with_targets(window)
        with meter.step(window):
            step(accelerator, model, optimizer, window, config, False, meter.mark)
        if evaluated is not None:
            training = model.training
            model.eval()
            with torch.no_grad(), meter.evaluation(evaluated), shared_sequences(accelerator, evaluated) as part:
                part = part.to(accelerator.device)
                model(part.inputs, part.labels, scored=True)
            reshard(model)
            model.train(training)


def _with_targets(window: list[MicroBatch]) -> list[MicroBatch]:
    """``window``, where no example has a target with one target: memory does not depend on how many there are."""
    if any(batch.num_targets for batch in window):
        return window
    labels = window[0].labels.clone()
    labels.view(-1)[0] = 0
    return [replace(window[0], labels=labels, num_targets=1), *window[1:]]


@contextmanager
def _leaving_no_trace(accelerator: Accelerator, model: nn.Module, optimizer: AcceleratedOptimizer) -> Iterator[None]:
    start = Start(accelerator.device, PersistentBuffers(model))
    scaler = accelerator.scaler
    scale = scaler.state_dict() if scaler is not None else {}
    rates = [group["lr"] for group in optimizer.param_groups]
    training = model.training
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.optimizer.state.clear()
        optimizer.optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.load_state_dict(scale)
        model.train(training)
        start.restore()


def _make_state(model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad(set_to_none=True)
