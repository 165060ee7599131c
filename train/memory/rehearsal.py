"""The most expensive step of a run, made before its first: what would fail in hour four fails in second ten."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from train.evaluation import reshard
from train.records import MicroBatch, Run

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer

    from train.loop import Parts


def rehearse(run: Run, parts: Parts, micro_batches: list[MicroBatch]) -> None:
    """Makes one whole step, optimizer state included, and evaluates a batch; afterwards everything is as it was.

    To be called on every rank before the first step, when the optimizer has no state yet. The update is a real one at
    a learning rate of zero, so no weight moves; then its state is dropped, and random state, buffers and loss scale
    are restored.

    Args:
        micro_batches: of one step.
    """
    with _leaving_no_trace(run, parts.model, parts.optimizer):
        # First the optimizer's state, which every step but the first finds there; and a first step whose gradients
        # overflow, as at the first loss scale they may, would not make it.
        make_optimizer_state(run, parts.model, parts.optimizer)
        micro_batches = _with_targets(micro_batches)
        with run.extras.stepping(micro_batches):
            parts.engine.step(parts.model, parts.optimizer, micro_batches)
        evaluated = next(parts.data.evaluation_batches(run, parts.data.examples.validation), None)
        if evaluated is not None:
            parts.model.eval()
            parts.evaluator.score(evaluated)
            reshard(parts.model)
            parts.model.train()


def make_optimizer_state(run: Run, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Makes the optimizer's state by gradients of zeros: all together, or one parameter at a time, as a run will."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for some in [[parameter] for parameter in trained] if run.config.get("optimizer_in_backward") else [trained]:
        for parameter in some:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad(set_to_none=True)


def _with_targets(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """``micro_batches``; if no example has a target, with one: memory does not depend on how many there are."""
    if any(batch.num_targets for batch in micro_batches):
        return micro_batches
    labels = micro_batches[0].labels.clone()
    labels.view(-1)[0] = 0
    return [replace(micro_batches[0], labels=labels, num_targets=1), *micro_batches[1:]]


@contextmanager
def _leaving_no_trace(run: Run, model: nn.Module, optimizer: AcceleratedOptimizer) -> Iterator[None]:
    scaler, device = run.accelerator.scaler, run.accelerator.device
    scale = scaler.state_dict() if scaler is not None else {}
    rates = [group["lr"] for group in optimizer.param_groups]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.optimizer.state.clear()
        optimizer.optimizer.zero_grad(set_to_none=True)
        if scaler is not None:
            scaler.load_state_dict(scale)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
