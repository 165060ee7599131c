"""An optimizer step that survives running out of memory: it goes back to its start and is made again in pieces.

The gradient of a step is a sum over the examples of its global batch, divided by a count that is known before the
first forward (``train.step``). So a micro-batch that did not fit can be split without changing the update.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.extras.host_memory import is_out_of_memory
from train.records import IGNORE, MicroBatch, StepOutcome, UserError, one_line
from train.step import Engine, MicroBatches, count, seed_generators

Measure: TypeAlias = tuple[str, Callable[[], bool]]  # what it does, for a person; does it, and tells if it could
Say: TypeAlias = Callable[[str], object]
FindMeasures: TypeAlias = Callable[[Any], Sequence[Measure | None]]


@dataclass(frozen=True)
class Fault:
    """Where memory ran out: text and numbers, because the exception itself would keep the activations alive."""

    phase: str  # forward, backward, clip or optimizer
    shape: tuple[int, int]  # (B, S) of the micro-batch at work
    where: str  # both, and the rank, for a person
    error: str  # the library's own words


class OutOfMemoryError(UserError):
    """A step that does not fit in memory, whatever was tried."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.weights_intact = fault, fault.phase in ("forward", "backward")
        advice = "Resume from the last checkpoint, with optimizer_offload or less optimizer state (adamw_8bit)"
        if self.weights_intact:
            advice = "It cannot be split. Try gradient_checkpointing, a smaller max_length or a smaller model"
        super().__init__(f"out of memory in {fault.where}. {advice}. The error was: {one_line(fault.error)}")


class Recovering(Engine):
    """Makes :func:`train.step.optimizer_step` again, on smaller micro-batches, when it runs out of memory.

    A fault in forward or backward takes this rank back to the step's start; the micro-batch that failed, and from then
    on every one with at least as many positions, is split in halves by rows, unless an example has several. Where these
    do not fit, measures are applied one after another. The update is that of a step without a fault, except that
    dropout draws differently for pieces. A fault in clipping or in the update ends the run.

    With several processes each rank computes its gradients without any collective. At the end of the last backward
    all ranks agree on whether every one has them, and only then are they averaged: a rank that fails alone keeps none
    of the others waiting for ever. ``find_measures`` is asked at the first step.
    """

    def __init__(self, engine: Engine, say: Say, find_measures: FindMeasures = lambda _: ()) -> None:
        super().__init__(engine.accelerator, engine.config, self._enter)
        self.recoveries, self._splits = 0, False  # faults of this rank after which the step was made again
        self._say, self._find_measures, self._tell = say, find_measures, engine.mark
        self._group = None  # on the host, where nothing that failed elsewhere can be pending
        if engine.accelerator.num_processes > 1:
            handler = engine.accelerator.init_handler
            self._group = dist.new_group(backend="gloo", timeout=handler.timeout if handler is not None else None)
        self._network: Any = None  # of the last step
        self._too_many: int | None = None  # the smallest number of positions that failed
        self._totals: list[int] | None = None  # of the step that is being made

    def step(self, model: nn.Module, optimizer: Any, micro_batches: MicroBatches, stop: bool = False) -> StepOutcome:
        """One step, made again as often as it takes; raises OutOfMemoryError where it does not fit."""
        # Calling the module beneath DistributedDataParallel leaves its hooks and broadcasts quiet.
        network: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        if network is not self._network:  # looked through once: short steps would notice
            self._network, self._shared = network, [p for p in network.parameters() if p.requires_grad]
            self._measures = list(filter(None, self._find_measures(network)))
            # Of the buffers that a checkpoint holds, such as BatchNorm's averages; others are constants.
            named = ((m, n, b) for m in network.modules() for n, b in m._buffers.items() if b is not None)
            self._owners: list[Any] = [(m, n) for m, n, _ in named if n not in m._non_persistent_buffers_set]
        buffers = [module._buffers[name] for module, name in self._owners]
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            for buffer in buffers:
                dist.broadcast(buffer, src=0)
        # What the step begins with: the generators, which seed_step has seeded, and the buffers.
        self._seed, self._buffers = torch.initial_seed(), [buffer.clone() for buffer in buffers]
        # A rank that makes its step again must not ask for the totals again: that is a collective.
        self._totals = super().total(count(micro_batches, stop))
        try:
            while True:
                pieces = split(micro_batches, self._too_many)
                self._phase, self._shape = "forward", pieces[0].shape
                try:
                    return super().step(self._network, optimizer, pieces, stop)
                except Exception as error:  # ends here: it keeps the activations alive
                    if not is_out_of_memory(error):
                        raise
                    rank = f", rank {self.accelerator.process_index}" if self._group is not None else ""
                    where = "{}, micro-batch of {:,} × {:,}{}".format(self._phase, *self._shape, rank)
                    fault = Fault(self._phase, self._shape, where, str(error) or type(error).__name__)
                if fault.phase not in ("forward", "backward"):  # once the ranks have averaged, none can go back alone
                    raise OutOfMemoryError(fault)
                self._rewind()
                self._prepare_another(fault)
        finally:
            self._totals = None

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._tell(phase)

    def total(self, counts: Sequence[float]) -> list[int]:
        return super().total(counts) if self._totals is None else self._totals

    def share(self, micro_batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        self._shape, self._splits = micro_batch.shape, len(micro_batch.labels) == micro_batch.shape[0] > 1
        return super().share(micro_batch)

    def backward(self, loss: Tensor, scale: float | Tensor) -> None:
        super().backward(loss, scale)
        if self.accelerator.sync_gradients:
            self._average()
            self._phase = "clip"

    def _average(self) -> None:
        """Waits until every rank has its gradients, and leaves their means in the parameters."""
        if self._group is None:
            return
        had, size = [p.grad is not None for p in self._shared], self.accelerator.num_processes
        # May run out: a fault of this backward. A collective wants them contiguous, fused kernels as the parameter.
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._shared]
        flat = [gradient.contiguous() for gradient in gradients]
        while (votes := self._any([False, *had]))[0]:  # a rank failed; then, of each parameter, who has a gradient
            self._apply_next_measure(None)
        for work in filter(None, [dist.all_reduce(each.div_(size), async_op=True) for each in flat]):
            work.wait()
        for parameter, gradient, reduced, is_used in zip(self._shared, gradients, flat, votes[1:], strict=True):
            parameter.grad = gradient.copy_(reduced) if is_used else None  # mostly the same tensor

    def _any(self, flags: list[bool]) -> list[bool]:
        """Of each flag, whether some rank has it; as many flags on every rank."""
        if self._group is None:
            return flags
        votes = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        return votes.bool().tolist()

    def _prepare_another(self, fault: Fault) -> None:
        if self._splits:  # this rank alone: the others wait for its vote
            # A piece of several examples has fewer positions than ever failed, so this number falls until it fits.
            self._too_many = math.prod(fault.shape)
            remedy = "the step is repeated, and from now on micro-batches of this size or larger are split in two"
            self._recovered(fault, remedy)
        else:
            self._any([True, *[False] * len(self._shared)])  # what the others ask at the end of their backward
            self._apply_next_measure(fault)

    def _apply_next_measure(self, fault: Fault | None) -> None:
        """By all ranks together, after a vote that failed; ``fault`` is this rank's, if it had one."""
        while self._measures:
            description, apply = self._measures.pop(0)
            if self._any([apply()])[0]:
                self._too_many = None  # what failed before may fit now
                if fault is not None:
                    self._recovered(fault, f"{description}, and the step is repeated")
                return
        self._rewind()
        everyone = [fault]
        if self._group is not None:
            everyone = [None] * self.accelerator.num_processes
            dist.all_gather_object(everyone, fault, group=self._group)
        raise OutOfMemoryError(next(known for known in everyone if known is not None))

    def _rewind(self) -> None:
        """Back to the start: no gradients, the random state and the persistent buffers of then."""
        for parameter in self._network.parameters():
            parameter.grad = None
        release_memory()  # collects garbage, too: frames of an exception that was raised again may form cycles
        seed_generators(self._seed)
        with torch.no_grad():
            for (module, name), value in zip(self._owners, self._buffers, strict=True):
                module._buffers[name].copy_(value)

    def _recovered(self, fault: Fault, remedy: str) -> None:
        self.recoveries += 1
        self._say(f"out of memory in {fault.where}: {remedy}")


def split(micro_batches: MicroBatches, too_many: int | None) -> list[MicroBatch]:
    """The examples, in their order, in micro-batches of fewer than ``too_many`` positions or of one example."""
    pieces: list[MicroBatch] = []
    for batch in micro_batches:
        fits = too_many is None or not len(batch.labels) == batch.shape[0] > 1 or math.prod(batch.shape) < too_many
        pieces += [batch] if fits else split(halves(batch), too_many)
    return pieces


def halves(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The first and the last examples of a batch on the host, the first half larger by one where B is odd.

    Inputs that are not B long go to both. Padding stays: a classifier finds the last token of a row by it.
    """
    batch_size, _ = batch.shape
    middle = (batch_size + 1) // 2
    share = batch.num_tokens * middle // batch_size  # of tokens only the sum is known

    def has_rows(value: Any) -> bool:
        return getattr(value, "ndim", 1) > 0 and hasattr(value, "__len__") and len(value) == batch_size

    def part(rows: slice, num_tokens: int) -> MicroBatch:
        labels = batch.labels[rows]
        inputs = {name: value[rows] if has_rows(value) else value for name, value in batch.inputs.items()}
        num_targets = int((labels != IGNORE).sum()) if batch.num_targets else 0
        return MicroBatch(inputs, labels, num_targets, batch.example_ids[rows], num_tokens)

    return part(slice(middle), share), part(slice(middle, None), batch.num_tokens - share)
