"""An optimizer step that survives running out of memory: it goes back to its start and makes itself again in pieces.

The gradient of a step is a sum over the examples of its global batch, divided by a count that is known before the
first forward (``train.step``). So a micro-batch that did not fit can be cut into pieces without changing the update.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Optimization
from train.errors import StepError
from train.memory.oom import is_out_of_memory
from train.records import IGNORE, Documents, Mark, MicroBatch, StepOutcome, unmarked
from train.step import Counts, accumulate_gradients, apply_gradients, clip_gradients, count_targets

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

T = TypeVar("T")
Measure: TypeAlias = tuple[str, Callable[[], bool]]
"""What it does, for a person to read, and a function that does it and returns whether it could."""

BUCKET_BYTES = 25 * 2**20
"""Small gradients travel together in buckets of this size, which is also that of DistributedDataParallel."""


@dataclass(frozen=True)
class Fault:
    """Where memory ran out: text and numbers, because the exception itself would keep the activations alive."""

    phase: str
    """forward, backward, clip or optimizer."""
    shape: tuple[int, int]
    """(B, S) of the micro-batch at work; after the last backward, of the step's largest."""
    error: str
    """The library's own words."""
    rank: int = 0

    def place(self, num_processes: int) -> str:
        """Phase, shape and, where there are several, rank."""
        batch_size, length = self.shape
        rank = f", rank {self.rank}" if num_processes > 1 else ""
        return f"{self.phase}, micro-batch of {batch_size:,} × {length:,}{rank}"


class OutOfMemoryError(StepError):
    """A step that does not fit in memory, whatever was tried.

    Attributes:
        fault: where it ended, with the words of the step's first error.
        weights_intact: whether weights, optimizer and random state are, on every rank, as they were before the step.
    """

    def __init__(self, fault: Fault, weights_intact: bool, num_processes: int = 1) -> None:
        self.fault, self.weights_intact = fault, weights_intact
        where = f"out of memory in {fault.place(num_processes)}"
        if fault.phase in ("forward", "backward"):
            where += ", which cannot be split"
            remedy = "Try gradient_checkpointing, a smaller max_length or a smaller model"
        else:
            remedy = "Try optimizer_offload, an optimizer with less state (adamw_8bit, adafactor), or several processes"
        state = (
            "Weights and optimizer are as before this step."
            if weights_intact
            else "Some weights may already be updated: go on from the last checkpoint, not from these."
        )
        words = " ".join(fault.error.split())
        super().__init__(f"{where}. {state} {remedy}. The first error was: {words[:500]}")


def can_recover(accelerator: Accelerator) -> bool:
    """Whether :class:`RecoveringStep` works here: one process, or data parallelism with whole models and gradients.

    Sharded models (FSDP, ZeRO, tensor parallelism) communicate within forward and backward, where a rank that fails
    leaves the others waiting. A compiled DistributedDataParallel and its communication hooks cannot be bypassed.
    """
    from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend

    if accelerator.distributed_type == DistributedType.NO:
        return True
    plain = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
    handler, compiler = accelerator.ddp_handler, accelerator.state.dynamo_plugin
    return (
        accelerator.distributed_type in plain
        and accelerator.parallelism_config is None
        and (compiler is None or compiler.backend == DynamoBackend.NO)
        and (handler is None or handler.comm_hook == DDPCommunicationHookType.NO)
    )


class RecoveringStep:
    """:func:`train.step.optimizer_step` that survives running out of memory.

    A fault in forward or backward takes this rank back to the step's start; the micro-batch that failed, and from
    then on every one of at least as many positions, is split in halves along the batch dimension. Where single
    examples do not fit, the measures are applied one after another. The update is that of a step without a fault,
    except that dropout draws differently for pieces.

    With several processes each rank computes its gradients without any collective. Then all ranks agree on whether
    every one has them, and only then are they averaged: a rank that fails alone keeps none of the others waiting for
    ever. This gives up the overlap of communication with backward.

    Args:
        say: told in one line what happened; called on the rank where it happened.
        measures: tried in order, by all ranks at once, where a micro-batch of one example does not fit.
    """

    def __init__(self, say: Callable[[str], None], measures: Sequence[Measure] = ()) -> None:
        self.recoveries = 0
        """Faults of this rank after which the step, or its update, was made again."""
        self._say, self._measures = say, list(measures)
        self._too_many: int | None = None  # the smallest number of positions that failed
        self._ranks: Ranks | None = None
        self._buffers: PersistentBuffers | None = None

    def __call__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        window: Sequence[MicroBatch],
        config: Optimization,
        stop_requested: bool = False,
        mark: Mark = unmarked,
    ) -> StepOutcome:
        """As :func:`train.step.optimizer_step`.

        Raises:
            OutOfMemoryError: the step does not fit; the same on every rank.
            UserError: the global batch has no target at all.
        """
        # Calling the module beneath DistributedDataParallel leaves its hooks and broadcasts quiet.
        network: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        if self._ranks is None or self._buffers is None:
            self._ranks, self._buffers = Ranks(accelerator), PersistentBuffers(network)
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            self._buffers.broadcast()
        step = _Step(
            accelerator=accelerator,
            network=network,
            optimizer=optimizer,
            window=window,
            config=config,
            totals=count_targets(accelerator, window, stop_requested),
            mark=mark,
            start=Start(accelerator.device, self._buffers),
            ranks=self._ranks,
            shared=[p for p in network.parameters() if p.requires_grad] if self._ranks.size > 1 else (),
        )
        loss_sum = self._gradients(step)
        return self._update(step, loss_sum)

    def _gradients(self, step: _Step) -> Tensor:
        """Leaves the averaged gradients in the parameters of every rank; returns this rank's summed loss ()."""
        gradients: _Gradients | Fault | None = None
        while True:
            if not isinstance(gradients, _Gradients):  # a rank that has them waits for the others
                gradients = self._gradients_of_this_rank(step)
            fault = gradients if isinstance(gradients, Fault) else None
            had = gradients.had if isinstance(gradients, _Gradients) else [False] * len(step.shared)
            failed, *used = step.ranks.any([fault is not None, *had])
            if isinstance(gradients, _Gradients) and not failed:
                step.ranks.average([p.grad for p in step.shared if p.grad is not None], gradients.room)
                for parameter, is_used in zip(step.shared, used, strict=True):
                    parameter.grad = parameter.grad if is_used else None
                return gradients.loss_sum
            if not self._apply_next_measure(step, fault):
                step.rewind()
                raise OutOfMemoryError(step.ranks.first(fault), weights_intact=True, num_processes=step.ranks.size)

    def _gradients_of_this_rank(self, step: _Step) -> _Gradients | Fault:
        first: Fault | None = None
        while True:
            result = step.accumulate(split(step.window, self._too_many))
            if isinstance(result, _Gradients):
                return result
            first = first or result
            step.rewind()
            batch_size, length = result.shape
            if batch_size == 1:
                return replace(result, error=first.error)
            # A piece of several examples has fewer positions than ever failed, so this number falls until it fits.
            self._too_many = batch_size * length
            self._recovered(
                result,
                "the step is made again, and micro-batches of this size or larger are made in halves from now on",
            )

    def _apply_next_measure(self, step: _Step, fault: Fault | None) -> bool:
        while self._measures:
            description, apply = self._measures.pop(0)
            if step.ranks.any([apply()])[0]:
                self._too_many = None  # what failed before may fit now
                if fault is not None:
                    self._recovered(fault, f"{description}, and the step is made again")
                return True
        return False

    def _update(self, step: _Step, loss_sum: Tensor) -> StepOutcome:
        writes = Writes(step.optimizer.optimizer)
        step.mark("clip")
        result = norm = self._once_more(
            step, "clip", writes, lambda: clip_gradients(step.accelerator, step.network, step.config).item()
        )
        wrote = False
        if not isinstance(norm, Fault):
            result = self._once_more(
                step,
                "optimizer",
                writes,
                lambda: apply_gradients(
                    step.accelerator, step.optimizer, step.config, loss_sum, step.totals, norm, step.mark
                ),
            )
            wrote = isinstance(result, StepOutcome) or writes.to_weights_or_state()
        fault = result if isinstance(result, Fault) else None
        failed, some_rank_wrote = step.ranks.any([fault is not None, wrote])
        if isinstance(result, StepOutcome) and not failed:
            return result
        step.rewind()
        reset_scaler(step.accelerator.scaler)
        raise OutOfMemoryError(step.ranks.first(fault), not some_rank_wrote, step.ranks.size)

    def _once_more(self, step: _Step, phase: str, writes: Writes, work: Callable[[], T]) -> T | Fault:
        """``work()``, and again if it ran out of memory before it had written anything."""
        gradients = writes.gradient_versions()
        result = step.guarded(phase, work)
        if not isinstance(result, Fault) or writes.to_weights_or_state():
            return result
        writes.forget_new_state()
        if writes.gradient_versions() != gradients:
            return result
        free_memory(step.accelerator.device)
        self._recovered(result, "nothing had been written yet, so it is tried once more")
        again = step.guarded(phase, work)
        if not isinstance(again, Fault):
            return again
        if not writes.to_weights_or_state():
            writes.forget_new_state()
        return result

    def _recovered(self, fault: Fault, remedy: str) -> None:
        self.recoveries += 1
        assert self._ranks is not None
        self._say(f"out of memory in {fault.place(self._ranks.size)}: {remedy}")


@dataclass(frozen=True)
class _Gradients:
    """What a rank has after its last backward, beside the gradients themselves."""

    loss_sum: Tensor
    """()"""
    had: list[bool]
    """Of each shared parameter, whether this rank's examples gave it a gradient; the others got zeros."""
    room: Tensor
    """(bytes,) uint8: where gradients are packed to be averaged, allocated while failing is still possible."""


@dataclass(frozen=True)
class _Step:
    """One step on one rank."""

    accelerator: Accelerator
    network: nn.Module
    optimizer: AcceleratedOptimizer
    window: Sequence[MicroBatch]
    config: Optimization
    totals: Counts
    mark: Mark
    start: Start
    ranks: Ranks
    shared: Sequence[nn.Parameter]
    """Parameters whose gradients are averaged over the ranks: none in a single process."""

    def accumulate(self, pieces: Sequence[MicroBatch]) -> _Gradients | Fault:
        """Forward and backward of this rank's part of the global batch, cut into ``pieces``."""
        where = _Where(self.mark)
        try:
            loss_sum = accumulate_gradients(self.accelerator, self.network, pieces, self.totals[0], where)
            had = [p.grad is not None for p in self.shared]
            return _Gradients(loss_sum, had, self.ranks.room_for(self.shared, self.accelerator.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return Fault(where.phase, shape_of(pieces[max(where.forwards, 1) - 1]), _words(error), self.ranks.rank)

    def guarded(self, phase: str, work: Callable[[], T]) -> T | Fault:
        """``work()``, or where memory ran out."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            largest = max(map(shape_of, self.window), key=lambda shape: shape[0] * shape[1])
            return Fault(phase, largest, _words(error), self.ranks.rank)

    def rewind(self) -> None:
        """Back to the start: no gradients, the random state and the persistent buffers of then."""
        for parameter in self.network.parameters():
            parameter.grad = None
        free_memory(self.accelerator.device)
        self.start.restore()


class _Where:
    """Hands marks on, and remembers the last."""

    def __init__(self, mark: Mark) -> None:
        self.phase, self.forwards = "forward", 0
        self._mark = mark

    def __call__(self, phase: str) -> None:
        self.phase = phase
        self.forwards += phase == "forward"
        self._mark(phase)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def free_memory(device: torch.device) -> None:
    """Gives back what nobody uses. An exception being handled keeps its activations: call this outside ``except``."""
    gc.collect()  # frames of an exception that was caught and raised again on its way may form circles
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def shape_of(batch: MicroBatch) -> tuple[int, int]:
    """(B, S)"""
    batch_size, length = batch.inputs["input_ids"].shape
    return batch_size, length


def split(window: Sequence[MicroBatch], too_many: int | None) -> list[MicroBatch]:
    """The same examples in the same order, in micro-batches of fewer than ``too_many`` positions or of one example."""
    pieces: list[MicroBatch] = []
    for batch in window:
        batch_size, length = shape_of(batch)
        if too_many is None or batch_size == 1 or batch_size * length < too_many:
            pieces.append(batch)
        else:
            pieces += split(halves(batch), too_many)
    return pieces


def halves(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The first and the last examples of a batch on the host, the first half larger by one where B is odd.

    Inputs whose first dimension is not B belong to the whole and go to both. Padding stays: a classifier finds the
    last token of a row by it.
    """
    batch_size, _ = shape_of(batch)
    middle = (batch_size + 1) // 2
    ids, share = batch.example_ids, batch.num_tokens * middle // batch_size  # of tokens only the sum is known

    def part(rows: slice, example_ids: tuple[int, ...], num_tokens: int) -> MicroBatch:
        labels = batch.labels[rows]
        return MicroBatch(
            inputs={k: v[rows] if v.ndim and len(v) == batch_size else v for k, v in batch.inputs.items()},
            labels=labels,
            num_targets=int((labels != IGNORE).sum()),
            example_ids=example_ids,
            num_tokens=num_tokens,
            documents=batch.documents and Documents.of(batch.documents.lengths[rows]),
        )

    return (
        part(slice(middle), ids[:middle], share),
        part(slice(middle, None), ids[middle:], batch.num_tokens - share),
    )


class PersistentBuffers:
    """The buffers of a model that its checkpoints hold, such as BatchNorm's averages; most language models have none.

    Other buffers are constants, or are computed anew by each forward.
    """

    def __init__(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_buffers()]
        saved = model.state_dict().keys() if names else ()
        self._places = [
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names if name in saved
        ]

    def tensors(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._places]

    def broadcast(self) -> None:
        """Rank 0's to all ranks, as DistributedDataParallel does before a step's first forward."""
        for tensor in self.tensors():
            dist.broadcast(tensor, src=0)


class Start:
    """The random state of Python, numpy, the host and ``device``, and persistent buffers, at the start of a step."""

    def __init__(self, device: torch.device, buffers: PersistentBuffers) -> None:
        self._device, self._buffers = device, buffers
        self._python, self._numpy, self._host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
        self._values = [tensor.clone() for tensor in buffers.tensors()]

    def restore(self) -> None:
        """Sets them as they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device)
        with torch.no_grad():
            for tensor, value in zip(self._buffers.tensors(), self._values, strict=True):
                tensor.copy_(value)


class Writes:
    """Tells whether an update has written to weights, optimizer state or gradients since this was made.

    The optimizers of torch write through operations that count each tensor's versions. The fused ones do not count
    those of weights; but Adam's counts its ``step`` before any weight of the same group is written. For others, and
    for optimizers from elsewhere, the answer is yes.

    Fused AdamW allocates state for one group of parameters at a time, and updates that group before the next: a fault
    in a later group comes too late to try again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counted = type(optimizer).__module__.startswith("torch.optim.") and (
            isinstance(optimizer, torch.optim.Adam) or not any(g.get("fused") for g in optimizer.param_groups)
        )
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._had_state = [p for p, state in optimizer.state.items() if state]
        self._tensors = self._weights_and_state()
        self._versions = [tensor._version for tensor in self._tensors]

    def _weights_and_state(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [*self._weights, *(v for state in states for v in state.values() if isinstance(v, Tensor))]

    def gradient_versions(self) -> list[int]:
        """How often each gradient was written."""
        return [p.grad._version for p in self._weights if p.grad is not None]

    def to_weights_or_state(self) -> bool:
        if not self._counted or [tensor._version for tensor in self._tensors] != self._versions:
            return True
        known = set(map(id, self._tensors))
        return any(tensor._version > 0 for tensor in self._weights_and_state() if id(tensor) not in known)

    def forget_new_state(self) -> None:
        """Removes state that was begun, perhaps not finished: the optimizer would take it for whole."""
        for parameter in self._optimizer.state.keys() - set(self._had_state):
            del self._optimizer.state[parameter]


def reset_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Forgets that gradients were unscaled, and keeps the scale."""
    if scaler is not None:
        scaler.update(new_scale=scaler.get_scale())


class Ranks:
    """The processes of a run with whole models: how they agree, and how they share gradients.

    They agree over a gloo group of their own: an answer is needed on the host, and nothing that failed elsewhere can
    be pending there. Made by all ranks together.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.size, self.rank = accelerator.num_processes, accelerator.process_index
        self._group = None
        if self.size > 1:
            timeout = accelerator.init_handler.timeout if accelerator.init_handler is not None else None
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether some rank has it; as many flags on every rank."""
        if self._group is None:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        return [bool(vote) for vote in votes.tolist()]

    def first(self, fault: Fault | None) -> Fault:
        """The same fault on every rank, where at least one has one."""
        everyone = [fault]
        if self._group is not None:
            everyone = [None] * self.size
            dist.all_gather_object(everyone, fault, group=self._group)
        return next(f for f in everyone if f is not None)

    def room_for(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """(bytes,) uint8, enough for :meth:`average`; zeros for gradients that are missing."""
        if self.size == 1:
            return torch.empty(0, dtype=torch.uint8)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        packed = [b for b in buckets([p.grad for p in parameters if p.grad is not None]) if not _is_sent_as_it_is(b)]
        size_bytes = max((sum(g.nbytes for g in bucket) for bucket in packed), default=0)
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def average(self, gradients: Sequence[Tensor], room: Tensor) -> None:
        """Sets each gradient to its mean over the ranks, without allocating on the device.

        Args:
            gradients: as many, and of the same shapes, on every rank.
            room: of :meth:`room_for`.
        """
        if self.size == 1:
            return
        for bucket in buckets(gradients):
            if _is_sent_as_it_is(bucket):
                dist.all_reduce(bucket[0].div_(self.size))
                continue
            flat = room[: sum(g.nbytes for g in bucket)].view(bucket[0].dtype)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            parts = [piece.view(gradient.shape) for piece, gradient in zip(pieces, bucket, strict=True)]
            torch._foreach_copy_(parts, bucket)
            dist.all_reduce(flat.div_(self.size))
            torch._foreach_copy_(bucket, parts)


def buckets(gradients: Sequence[Tensor], size_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Gradients in groups of one dtype and at most ``size_bytes``; a larger one alone."""
    done: list[list[Tensor]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = filling.get(gradient.dtype, [])
        if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > size_bytes:
            done.append(bucket)
            bucket = []
        filling[gradient.dtype] = [*bucket, gradient]
    return [*done, *filling.values()]


def _is_sent_as_it_is(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()
