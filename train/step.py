"""One optimizer step over a window of micro-batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from train.config import Optimization
from train.errors import UserError
from train.extras.parallelism.context import shared_sequences
from train.records import Mark, MicroBatch, StepOutcome, unmarked

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer


_NO_TARGETS = (
    "a whole global batch has no target: every label is masked, so there is nothing to learn from it. Look at the "
    "labels and at max_length."
)


Counts: TypeAlias = Sequence[int] | Tensor


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds all generators from (seed, step, rank), so that a step does not depend on what was drawn before it."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - for code of a fork that draws from numpy's global generator
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)  # a hundred times faster than asking every absent kind of device


def optimizer_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    window: Sequence[MicroBatch],
    config: Optimization,
    stop_requested: bool = False,
    mark: Mark = unmarked,
) -> StepOutcome:
    """Updates ``model`` by the gradient of Σ token losses ÷ N, N being the targets of the whole global batch.

    That holds for every micro-batch size, accumulation, padding and number of processes, and for a last window that
    is short. A gradient that is not finite never reaches the weights, on no rank.

    Args:
        model: prepared :class:`train.loss.ModelWithLoss`.
        window: this rank's micro-batches, as many as on every other rank.
        stop_requested: whether this rank was asked to stop; the outcome says whether any was.
        mark: told which phase of the step begins: forward, backward, clip, optimizer.

    Raises:
        UserError: the global batch has no target at all.
    """
    totals = count_targets(accelerator, window, stop_requested)
    loss_sum = accumulate_gradients(accelerator, model, window, totals[0], mark)
    return update(accelerator, model, optimizer, config, loss_sum, totals, mark)


def count_targets(accelerator: Accelerator, window: Sequence[MicroBatch], stop_requested: bool) -> Counts:
    """(targets, tokens, positions, stop requests) of the whole global batch.

    With several processes it is still on the device: reading it would wait for the device.
    """
    counts = [
        sum(b.num_targets for b in window),
        sum(b.num_tokens for b in window),
        sum(b.inputs["input_ids"].numel() for b in window),
        int(stop_requested),
    ]
    if accelerator.num_processes > 1:  # fp64 is exact for counts and keeps the precision of an fp64 model
        here = torch.tensor(counts, dtype=torch.float64, device=accelerator.device)
        return cast("Tensor", accelerator.reduce(here, reduction="sum")) / copies(accelerator)
    if not counts[0]:
        raise UserError(_NO_TARGETS)
    return counts


def parallel_sizes(accelerator: Accelerator) -> tuple[int, int, int]:
    """Ranks that share (tensors, contexts, sequences), see :class:`train.launch.Launch`."""
    sizes = accelerator.parallelism_config
    if sizes is None:
        return 1, 1, 1
    return sizes.tp_size or 1, sizes.cp_size or 1, sizes.sp_size or 1


def copies(accelerator: Accelerator) -> int:
    """Ranks that were handed the same examples."""
    return math.prod(parallel_sizes(accelerator))


def accumulate_gradients(
    accelerator: Accelerator, model: nn.Module, window: Sequence[MicroBatch], num_targets: float | Tensor, mark: Mark
) -> Tensor:
    """Forward and backward of each micro-batch; returns this rank's summed loss ()."""
    # accelerator.backward divides by the accumulation, and data parallelism by the processes: both are undone here.
    accelerator.gradient_accumulation_steps = len(window)
    accelerator.step = 0
    tensor_size = parallel_sizes(accelerator)[0]
    scale = len(window) * accelerator.num_processes / tensor_size / num_targets
    if not model.training:
        model.train()
    loss_sum = torch.zeros((), device=accelerator.device, dtype=torch.float32)
    for micro_batch in window:
        with accelerator.accumulate(model), shared_sequences(accelerator, micro_batch) as part:
            mark("forward")
            part = part.to(accelerator.device)
            loss = model(part.inputs, part.labels, num_targets=part.num_targets)
            mark("backward")
            accelerator.backward(loss * scale)
            loss_sum += loss.detach()
            del loss
    return loss_sum / tensor_size


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    config: Optimization,
    loss_sum: Tensor,
    totals: Counts,
    mark: Mark,
) -> StepOutcome:
    """Clips the accumulated gradients, steps the optimizer if they are finite, and frees them."""
    assert accelerator.sync_gradients  # true since the window's last micro-batch
    mark("clip")
    # The step's one wait for the device: whether to update has to be known here.
    norm = clip_gradients(accelerator, model, config).item()
    return apply_gradients(accelerator, optimizer, config, loss_sum, totals, norm, mark)


def apply_gradients(
    accelerator: Accelerator,
    optimizer: AcceleratedOptimizer,
    config: Optimization,
    loss_sum: Tensor,
    totals: Counts,
    norm: float,
    mark: Mark,
) -> StepOutcome:
    """Steps the optimizer by clipped gradients if their ``norm`` from before is finite, and frees them."""
    counts = read_counts(totals)
    mark("optimizer")
    # With a scaler the call is due either way: it leaves the weights alone and lowers the scale.
    if math.isfinite(norm) or accelerator.scaler is not None:
        optimizer.step()
    optimizer.zero_grad()
    return outcome_of(config, loss_sum, counts, norm, skipped=not math.isfinite(norm) or optimizer.step_was_skipped)


def read_counts(totals: Counts) -> list[int]:
    """What :func:`count_targets` gave, as numbers.

    Raises:
        UserError: the global batch has no target at all.
    """
    # Rounded up: a stop that only some of the ranks with the same examples were asked for is less than one.
    counts = [math.ceil(total) for total in (totals.tolist() if isinstance(totals, Tensor) else totals)]
    if not counts[0]:
        raise UserError(_NO_TARGETS)
    return counts


def outcome_of(config: Optimization, loss_sum: Tensor, counts: list[int], norm: float, skipped: bool) -> StepOutcome:
    """The outcome of a step with these :func:`read_counts` and the gradient's ``norm`` from before clipping."""
    return StepOutcome(
        loss_sum=loss_sum,
        num_targets=counts[0],
        num_tokens=counts[1],
        num_positions=counts[2],
        grad_norm=norm,
        clipped=not skipped and config.max_grad_norm is not None and norm > config.max_grad_norm,
        skipped=skipped,
        stop_requested=counts[3] > 0,
    )


def clip_gradients(accelerator: Accelerator, model: nn.Module, config: Optimization) -> Tensor:
    """Clips by norm or by value, as configured, and returns the norm () from before."""
    bound = math.inf if config.max_grad_norm is None else config.max_grad_norm
    order = float(config.grad_norm_type)
    norm = accelerator.clip_grad_norm_(model.parameters(), bound, norm_type=order)  # pyright: ignore[reportArgumentType]
    if config.max_grad_value is not None:
        accelerator.clip_grad_value_(model.parameters(), config.max_grad_value)
    assert isinstance(norm, Tensor)
    return norm
