"""The one optimizer step. Every mode calls it; some pass an :class:`Engine` of their own."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from train.config import Config
from train.records import MicroBatch, StepOutcome, UserError

MicroBatches: TypeAlias = Sequence[MicroBatch]  # this rank's part of a step
Mark: TypeAlias = Callable[[str], object]  # told which phase of a step begins: forward, backward, clip or optimizer


class Engine:
    """How a step computes gradients and uses them: here, as in accelerate's guide. Extras subclass it."""

    mp_size = 1  # ranks that get the same examples
    loss_share = 1.0  # the share of a rank's loss sum that counts: ranks that share tensors compute the same loss

    def __init__(self, accelerator: Accelerator, config: Config, mark: Mark = lambda phase: None) -> None:
        self.accelerator, self.config, self.mark = accelerator, config, mark

    @property
    def loss_factor(self) -> float:
        """Undoes gradient averaging: accelerate's over micro-batches, data parallelism's over ranks."""
        return self.accelerator.gradient_accumulation_steps * self.accelerator.num_processes

    def total(self, counts: Sequence[float]) -> list[int]:
        """(4,) ``counts`` of all ranks: targets, tokens, positions and stop requests of the global batch."""
        if self.accelerator.num_processes > 1:
            here = torch.tensor(counts, dtype=torch.float64, device=self.accelerator.device)  # exact for counts
            counts = (cast("Tensor", self.accelerator.reduce(here, reduction="sum")) / self.mp_size).tolist()
        # Rounded up: if only some of the ranks that share examples were asked to stop, their sum is less than 1.
        return [math.ceil(total) for total in counts]

    def share(self, micro_batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        """This rank's part of a micro-batch whose sequences are divided among ranks; surrounds forward and backward."""
        return nullcontext(micro_batch)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        """Adds the gradient of ``loss`` × ``scale``; the last one of a step also averages over ranks."""
        self.accelerator.backward(loss * scale)

    def clip(self, model: nn.Module) -> float:
        """Clips the gradient; returns its global norm before clipping. One process waits for the device only here."""
        optim, accelerator = self.config.optimization, self.accelerator
        bound = 3e38 if optim.max_grad_norm is None else optim.max_grad_norm  # inf would give inf / inf = NaN
        parameters = list(model.parameters())
        norm: Any = accelerator.clip_grad_norm_(parameters, bound, norm_type=float(optim.grad_norm_type))  # type: ignore
        if optim.max_grad_value is not None:
            # Not accelerate's, which rejects FSDP2 and would unscale the gradients a second time.
            nn.utils.clip_grad_value_(parameters, optim.max_grad_value)
        return getattr(norm, "full_tensor", lambda: norm)().item()  # else FSDP2's inf norm covers one shard

    def update(self, optimizer: AcceleratedOptimizer, norm: float) -> tuple[float, bool]:
        """Steps unless the norm is not finite; returns the norm, and whether the step was skipped."""
        # A loss scaler needs the call either way: it leaves the weights alone and lowers the scale.
        if math.isfinite(norm) or self.accelerator.scaler is not None:
            optimizer.step()
        return norm, not math.isfinite(norm) or optimizer.step_was_skipped

    def step(self, model: nn.Module, optimizer: Any, micro_batches: MicroBatches, stop: bool = False) -> StepOutcome:
        """One step, as the loop makes it: :func:`optimizer_step`, or what guards it."""
        return optimizer_step(self, model, optimizer, micro_batches, stop)


def optimizer_step(
    engine: Engine, model: nn.Module, optimizer: Any, micro_batches: MicroBatches, stop_requested: bool = False
) -> StepOutcome:
    """Updates ``model`` by the gradient of the global batch: Σ token losses ÷ the number of its targets.

    That holds for every micro-batch size, accumulation, padding and number of ranks, and for a short last step. A
    gradient that is not finite never reaches the weights, on any rank.

    ``model``: a prepared :class:`train.model.ModelWithLoss`; ``micro_batches``: this rank's part of the batch, as many
    as on every other rank. The outcome says if any rank has ``stop_requested``. UserError if the batch has no target.
    """
    accelerator, mark = engine.accelerator, engine.mark
    # How many targets the gradient is divided by is known before the first forward, on every rank.
    targets, tokens, positions, stops = engine.total(count(micro_batches, stop_requested))
    if not targets:
        raise UserError("an entire global batch has no targets: all labels are masked. Check labels and max_length.")
    # A step accumulates over the micro-batches that it has: the last one of an epoch may have fewer.
    accelerator.gradient_accumulation_steps, accelerator.step = len(micro_batches), 0
    scale, loss_sum = engine.loss_factor / targets, torch.zeros((), device=accelerator.device)
    for micro_batch in micro_batches:
        counted = float(micro_batch.num_targets > 0)  # 0 where a rank computes another's example, to stay in step
        # Gradients of all but the last micro-batch stay on this rank: accumulate() leaves them unsynchronised.
        with accelerator.accumulate(model), engine.share(micro_batch) as part:
            mark("forward")
            part = part.to(accelerator.device)
            loss = model(part.inputs, part.labels, num_targets=part.num_targets)
            mark("backward")
            # An infinite loss can have finite gradients: 0 × inf makes them NaN, so the step is skipped.
            engine.backward(loss, counted * (scale + 0 * loss.detach()))
        # The graph is released before clipping and the update.
        loss_sum.add_(loss.detach(), alpha=engine.loss_share * counted)  # so nothing is allocated after the update
        del loss, part
    # The gradient is complete: its norm, equal on all ranks, decides whether the step is skipped.
    mark("clip")
    norm = engine.clip(model)
    mark("optimizer")
    norm, skipped = engine.update(optimizer, norm)
    optimizer.zero_grad()
    clipped = not skipped and norm > (engine.config.optimization.max_grad_norm or math.inf)
    return StepOutcome(loss_sum, targets, tokens, positions, norm, clipped, skipped, stops > 0)


def count(micro_batches: MicroBatches, stop_requested: bool) -> list[int]:
    """(targets, tokens, positions, stop requests) of this rank."""
    rows = [(b.num_targets, b.num_tokens, math.prod(b.shape)) for b in micro_batches]
    return [*map(sum, zip((0, 0, 0), *rows, strict=True)), int(stop_requested)]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds all generators from (seed, step, rank), so that a step does not depend on what was drawn before it."""
    seed_generators(int(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=7).hexdigest(), 16))


def seed_generators(value: int) -> None:
    """Seeds those of Python, numpy and torch, of all devices."""
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - for code of a fork that draws from numpy's global generator
    # Asking every absent kind of device takes a hundred times as long.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(value)
