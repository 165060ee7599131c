"""Measures the memory of a run: the peak of each phase of a step, what it consists of, and whether something leaks.

On CUDA the allocator's own counters are read where a phase begins: nothing is polled, and nothing waits for the
device. On a CPU there are no such counters; a :class:`train.extras.meter.tracker.StorageTracker` follows every operator
instead, which makes a step slower by a fifth and a very short one by more, so only few are followed. Elsewhere there
is the process's resident set.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from train.extras.activations.compilation import uncompiled
from train.extras.endurance.recovery import shape_of
from train.extras.meter.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    LOGITS,
    OPTIMIZER_STATE,
    PARAMETERS,
    WORKSPACE,
    Block,
    StorageTracker,
    held_by,
    tag_gradients,
)
from train.memory.predict import CUDA_GRANULE_BYTES
from train.outputs_log import gib
from train.records import MicroBatch
from train.runtime import DeviceMeter

TRACK_EVERY_STEPS, TRACKED_SHARE = 50, 0.005
"""On a CPU one of so many steps is followed, to see leaks, or fewer where that would cost a larger share of the time;
on CUDA what stays is counted anew so often."""

EXEMPT_STEPS = 2
"""The first steps make what then stays: optimizer state, libraries' workspaces, buffers made when first needed."""

SUSPICIOUS_STEPS, GROWING_STEPS = 3, 5
"""Steps of equal shapes, each of which ends with more memory than the one before, to suspect and to report a leak."""

LEAK_BYTES, LEAK_SHARE = 2**20, 0.001
"""A growth that is smaller, in all, is not reported: than so many bytes, than this share of what is allocated."""

SURVIVOR_BYTES = 2**16
"""On a CPU: storages that outlive their step matter from so many bytes per step on."""

CONFIRMING_STEPS = 3
"""On a CPU: steps that must leave something behind, all of it still there at the end, after one that did."""

_MAX_SIGNATURES = 64
_NAMED = 3
"""How many kinds of tensors a report of a leak names."""

ELSEWHERE = "elsewhere"
"""Between steps on CUDA: loading, saving, sampling."""

Shapes: TypeAlias = tuple[tuple[int, int], ...]
"""(B, S) of each micro-batch of a step."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one step, or the most of several."""

    peak_bytes: int = 0
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    """At the peak."""
    peak_bytes_by_phase: dict[str, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0

    def merged(self, other: Measured) -> Measured:
        """The larger of each figure; counts are added."""
        larger = other if other.peak_bytes >= self.peak_bytes else self
        phases = {**self.peak_bytes_by_phase, **other.peak_bytes_by_phase}
        return Measured(
            peak_bytes=larger.peak_bytes,
            bytes_by_kind=larger.bytes_by_kind,
            peak_bytes_by_phase={p: max(size, self.peak_bytes_by_phase.get(p, 0)) for p, size in phases.items()},
            reserved_bytes=max(self.reserved_bytes, other.reserved_bytes),
            num_alloc_retries=self.num_alloc_retries + other.num_alloc_retries,
            num_ooms=self.num_ooms + other.num_ooms,
        )

    def figures(self) -> dict[str, Any]:
        """For a line of the log, without what there is not."""
        more = {
            "peak_reserved_bytes": self.reserved_bytes,
            "peak_bytes_by_phase": self.peak_bytes_by_phase,
            "bytes_by_kind": self.bytes_by_kind,
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
        }
        return {"peak_allocated_bytes": self.peak_bytes, **{name: value for name, value in more.items() if value}}


class Gauge(Protocol):
    """How one type of device is measured; ``begin`` and ``end`` alternate, ``mark`` comes between them."""

    leak: str | None
    """What leaks, in words, once it is known."""

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        """A step begins with the phase ``forward``, or the ``evaluation`` of one batch."""
        ...

    def mark(self, phase: str) -> None:
        """The step's next phase."""
        ...

    def end(self, completed: bool) -> Measured:
        """The figures of what just ended, by an exception if not ``completed``."""
        ...

    def between(self) -> Measured:
        """The figures since the last end."""
        ...


class MemoryMeter:
    """A :class:`train.records.Meter` that tells phases and kinds of memory apart, and leaks.

    It resets the allocator's peaks, so ``torch.cuda.max_memory_allocated`` no longer tells that of the run.

    Args:
        device: where the run trains.
        network: the model, as prepared but unwrapped.
        optimizer: over the parameters of ``network``.
        num_classes: C of the logits (..., C); None: logits count as activations on a CPU.
        say: told once, in a line, that memory leaks.

    Attributes:
        phase: the phase that is running, or was the last to run.
        last_shape: (B, S) of the largest micro-batch of the last step or evaluation.
        bytes_by_kind: at the peak of the last step or evaluation, also of one that failed.
    """

    def __init__(
        self,
        device: torch.device,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_classes: int | None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._device, self._say = device, say
        self._gauge: Gauge
        if device.type == "cuda":
            self._gauge = CudaGauge(device, network, optimizer)
        elif device.type == "cpu":
            self._gauge = TrackingGauge(network, optimizer, num_classes)
        else:
            self._gauge = ResidentGauge()
        self.phase = ""
        self.last_shape: tuple[int, int] | None = None
        self.bytes_by_kind: dict[str, int] = {}
        self._measuring = self._leak_told = False
        self._run = self._interval = Measured()

    def step(self, window: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Measures an optimizer step over ``window``."""
        return self._measured("forward", window)

    def evaluation(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Measures the evaluation of ``batch``."""
        return self._measured("evaluation", [batch])

    def mark(self, phase: str) -> None:
        """A phase of the step begins; ignored outside a step."""
        if self._measuring:
            self.phase = phase
            self._gauge.mark(phase)

    def interval(self) -> dict[str, Any]:
        """Bytes since the last call; names as of :meth:`summary`.

        On a CPU the peak of a step that was not followed is the smallest that was measured of a step at least as
        large: exact where a step of the same shapes was followed, never too small.
        """
        self._add(self._gauge.between())
        interval, self._interval = self._interval, Measured()
        return interval.figures()

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run, those that do not apply left out.

        peak_allocated_bytes; peak_reserved_bytes (CUDA); peak_bytes_by_phase and bytes_by_kind (at the peak), mappings;
        num_alloc_retries and num_ooms (CUDA); peak_resident_bytes of the process (CPU); memory_leak, a text.
        """
        self._add(self._gauge.between())
        figures = self._run.figures()
        if self._device.type == "cpu":
            figures["peak_resident_bytes"] = peak_resident_bytes()
        return figures if self._gauge.leak is None else {**figures, "memory_leak": self._gauge.leak}

    @contextmanager
    def _measured(self, phase: str, batches: Sequence[MicroBatch]) -> Iterator[None]:
        self.last_shape = max(map(shape_of, batches), key=lambda shape: shape[0] * shape[1], default=None)
        self.phase = phase
        self._gauge.begin(phase, batches)
        self._measuring, completed = True, False
        try:
            yield
            completed = True
        finally:
            self._measuring = False
            measured = self._gauge.end(completed)
            self.bytes_by_kind = measured.bytes_by_kind or self.bytes_by_kind
            self._add(measured)
        if self._gauge.leak is not None and not self._leak_told:
            self._leak_told = True
            self._say(self._gauge.leak)

    def _add(self, measured: Measured) -> None:
        self._interval, self._run = self._interval.merged(measured), self._run.merged(measured)


def peak_resident_bytes() -> int:
    """The most that this process had in memory, libraries and files included."""
    return DeviceMeter(torch.device("cpu")).summary()["peak_allocated_bytes"]


def tag_held(tracker: StorageTracker, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tells ``tracker`` what stays between steps: parameters and buffers, optimizer state, gradients if there are."""
    tracker.tag(PARAMETERS, held_by(network))
    tracker.tag(GRADIENTS, [p.grad for p in network.parameters()])
    tracker.tag(OPTIMIZER_STATE, [value for state in optimizer.state.values() for value in state.values()])


# ---- other devices ---------------------------------------------------------------------------------------------------


class ResidentGauge:
    """The process's largest resident set so far, whatever is asked."""

    leak: str | None = None

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        """Nothing to begin."""

    def mark(self, phase: str) -> None:
        """Phases are not told apart."""

    def end(self, completed: bool) -> Measured:
        return self.between()

    def between(self) -> Measured:
        return Measured(peak_resident_bytes())


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counters:
    """What the caching allocator counts: bytes now, and the most since the peaks were reset."""

    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int
    num_ooms: int


def read_counters(device: torch.device) -> Counters:
    """The allocator's counters, kept on the host: reading them does not wait for the device."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    allocated = stats["allocated_bytes"]["all"]
    return Counters(
        allocated["current"],
        allocated["peak"],
        stats["reserved_bytes"]["all"]["peak"],
        stats["num_alloc_retries"],
        stats["num_ooms"],
    )


class CudaGauge:
    """Reads the allocator's counters where a phase begins, and where the model's output embedding does.

    What was allocated when the output embedding began, beyond what the forward found, is activations; from there to
    the forward's end it is logits and loss. Gradients count as they are at the start of a phase: those that the first
    backward makes until its peak, and what it recomputes, are in the workspace, which is the rest.
    """

    def __init__(self, device: torch.device, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._device, self._network, self._optimizer = device, network, optimizer
        self.leak: str | None = None
        self._growth = GrowthWatch(device)
        self._phase = ELSEWHERE
        self._shapes: Shapes = ()
        self._measured = Measured()
        self._held = dict.fromkeys(KINDS, 0)
        self._current_bytes = self._start_bytes = self._activations = self._logits = 0
        self._in_head = self._has_gradients = False
        self._steps_since_count = 0
        self._count_held()
        self._states_counted = -1  # once more when there are gradients
        counters = read_counters(device)
        self._retries, self._ooms = counters.num_alloc_retries, counters.num_ooms
        embedding = getattr(network, "get_output_embeddings", lambda: None)()
        if isinstance(embedding, nn.Module):
            embedding.register_forward_pre_hook(self._head_begins)

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        self._steps_since_count += phase == "forward"
        self._shapes = tuple(map(shape_of, batches))
        self._close()  # what was between the steps
        self._open(phase)

    def mark(self, phase: str) -> None:
        self._close()
        self._open(phase)
        if phase == "clip" and self._count_is_due():  # now every gradient is there
            self._count_held()

    def end(self, completed: bool) -> Measured:
        trained = completed and self._phase != "evaluation"
        if trained and self._count_is_due():  # the first step made the optimizer's state
            self._count_held()
        counters = self._close()
        self._open(ELSEWHERE)
        if trained and self.leak is None:
            self.leak = self._growth.see(
                self._shapes, counters.allocated_bytes, lambda: read_counters(self._device).allocated_bytes
            )
        return self._take()

    def between(self) -> Measured:
        self._close()
        return self._take()

    def _take(self) -> Measured:
        measured, self._measured = self._measured, Measured()
        return measured

    def _open(self, phase: str) -> None:
        """``phase`` begins where :meth:`_close` has just reset the peaks."""
        self._phase, self._in_head = phase, False
        self._has_gradients = any(p.grad is not None for p in self._network.parameters())
        if phase != "backward":  # which alone begins with what the forward made
            self._start_bytes, self._activations, self._logits = self._current_bytes, 0, 0

    def _close(self) -> Counters:
        """Assigns the peak since the last reading to the phase that ends here, and resets it."""
        counters = read_counters(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._current_bytes = counters.allocated_bytes
        peak = counters.peak_allocated_bytes
        in_body = self._phase in ("forward", "evaluation") and not self._in_head
        if in_body:
            self._activations = peak - self._start_bytes
        elif self._in_head:
            self._logits = peak - self._start_bytes - self._activations
        self._measured = self._measured.merged(
            Measured(
                peak,
                self._kinds(peak),
                {self._phase: peak},
                counters.peak_reserved_bytes,
                counters.num_alloc_retries - self._retries,
                counters.num_ooms - self._ooms,
            )
        )
        self._retries, self._ooms = counters.num_alloc_retries, counters.num_ooms
        # what there was at the peak was that phase's; the next begins with what is left of it
        if in_body:
            self._activations = max(0, counters.allocated_bytes - self._start_bytes)
        elif self._in_head:
            self._logits = max(0, counters.allocated_bytes - self._start_bytes - self._activations)
        return counters

    def _head_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._phase not in ("forward", "evaluation") or self._in_head:
            return
        self._close()
        self._in_head = True

    def _kinds(self, peak_bytes: int) -> dict[str, int]:
        sizes = {
            PARAMETERS: self._held[PARAMETERS],
            OPTIMIZER_STATE: self._held[OPTIMIZER_STATE],
            GRADIENTS: self._held[GRADIENTS] if self._has_gradients else 0,
            ACTIVATIONS: self._activations,
            LOGITS: self._logits,
        }
        rest = peak_bytes
        for kind, size in sizes.items():
            sizes[kind] = min(size, rest)
            rest -= sizes[kind]
        return {**{kind: sizes.get(kind, 0) for kind in KINDS}, WORKSPACE: rest}

    def _count_is_due(self) -> bool:
        return len(self._optimizer.state) != self._states_counted or self._steps_since_count >= TRACK_EVERY_STEPS

    def _count_held(self) -> None:
        tracker = StorageTracker(self._device.type, CUDA_GRANULE_BYTES)
        tag_held(tracker, self._network, self._optimizer)
        gradients = tracker.bytes_by_kind[GRADIENTS] or self._held[GRADIENTS]  # at the end of a step there are none
        self._held = {**tracker.bytes_by_kind, GRADIENTS: gradients}
        self._states_counted, self._steps_since_count = len(self._optimizer.state), 0


@dataclass(frozen=True)
class TensorKind:
    """Tensors that look the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_graph: bool

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Census:
    """Tensors of a device that Python knows of; views of one storage count once."""

    num_tensors: Counter[TensorKind]
    num_bytes: Counter[TensorKind]


def census(device: torch.device) -> Census:
    """Counts the live tensors on ``device``; looks at every object of the process, which takes a fraction of a second.

    What only an autograd graph holds may have no Python object, and is then not seen.
    """
    found, storages = Census(Counter(), Counter()), set()
    for candidate in gc.get_objects():
        # not isinstance: a proxy may do anything when asked for its class
        if not issubclass(type(candidate), Tensor) or candidate.device.type != device.type:
            continue
        try:
            storage = candidate.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # a tensor without one
            continue
        if key not in storages:
            storages.add(key)
            kind = TensorKind(tuple(candidate.shape), candidate.dtype, candidate.grad_fn is not None)
            found.num_tensors[kind] += 1
            found.num_bytes[kind] += size
    return found


@dataclass
class _Growth:
    """What steps of equal shapes ended with, for as long as it grew from each to the next."""

    first_step: int
    first_bytes: int
    last_bytes: int
    num_steps: int = 0
    suspected_bytes: int = 0
    census: Census | None = None


class GrowthWatch:
    """Looks at the allocated bytes at the end of each step: between steps of equal shapes they should not grow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._growths: OrderedDict[Shapes, _Growth] = OrderedDict()

    def see(self, shapes: Shapes, allocated_bytes: int, current_bytes: Callable[[], int]) -> str | None:
        """The end of a step; returns what leaks once that is certain.

        Args:
            current_bytes: what is allocated when it is called, after garbage was collected.
        """
        self._step += 1
        if self._step <= EXEMPT_STEPS:
            return None
        growth = self._growths.pop(shapes, None)
        if growth is None or allocated_bytes <= growth.last_bytes:
            growth = _Growth(self._step, allocated_bytes, allocated_bytes)
        else:
            growth.last_bytes = allocated_bytes
            growth.num_steps += 1
        self._growths[shapes] = growth
        if len(self._growths) > _MAX_SIGNATURES:
            self._growths.popitem(last=False)
        if growth.num_steps == SUSPICIOUS_STEPS:
            growth.census, growth.suspected_bytes = census(self._device), allocated_bytes
        grown = growth.last_bytes - growth.first_bytes
        if growth.num_steps < GROWING_STEPS or grown < max(LEAK_BYTES, LEAK_SHARE * allocated_bytes):
            return None
        gc.collect()  # circles of objects are no leak
        if current_bytes() - growth.first_bytes < grown / 2:
            del self._growths[shapes]
            return None
        return self._text(growth)

    def _text(self, growth: _Growth) -> str:
        assert growth.census is not None
        before, now = growth.census, census(self._device)
        grown = growth.last_bytes - growth.suspected_bytes
        sizes = now.num_bytes - before.num_bytes
        in_graphs = grown - sum(size for kind, size in sizes.items() if not kind.has_graph)
        named = []
        for kind, size in sizes.most_common(_NAMED):
            more = now.num_tensors[kind] - before.num_tensors[kind]
            if more > 0 and size >= 0.01 * grown:
                named.append(f"{more} × {kind}")
        if in_graphs >= 0.01 * grown:
            named.append(f"{gib(in_graphs)} held by autograd graphs")
        num_steps = self._step - growth.first_step
        return _leak_text((growth.last_bytes - growth.first_bytes) / num_steps, num_steps, named)


def _leak_text(bytes_per_step: float, num_steps: int, named: Sequence[str]) -> str:
    return (
        f"memory leak: {gib(bytes_per_step)} more after each step, seen over {num_steps} steps. What grows: "
        f"{'; '.join(named)}. Look for what is kept from step to step: a list of tensors, or a loss or output kept "
        "without .detach() or .item(), which keeps its whole graph."
    )


# ---- CPU -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """What the memory of a step grows with."""

    phase: str
    """The first: forward, or evaluation."""
    positions: int
    """B · S of the largest micro-batch."""
    pairs: int
    """B · S² of the largest: scores of attention, dense masks."""
    padded: bool
    """Attention then needs a mask."""
    accumulates: bool
    """Gradients are there when a later micro-batch begins."""
    has_state: bool
    """The optimizer's, which the first update makes."""

    def covers(self, other: Extent) -> bool:
        """Whether a step of ``other``'s extent cannot need more."""
        mine, others = self._sizes(), other._sizes()
        return self.phase == other.phase and all(a >= b for a, b in zip(mine, others, strict=True))

    def _sizes(self) -> tuple[int, ...]:
        return self.positions, self.pairs, self.padded, self.accumulates, self.has_state


def extent_of(phase: str, batches: Sequence[MicroBatch], has_state: bool) -> Extent:
    """The extent of a step over ``batches``, or of the evaluation of one."""
    shapes = [shape_of(batch) for batch in batches]
    return Extent(
        phase=phase,
        positions=max((b * s for b, s in shapes), default=0),
        pairs=max((b * s * s for b, s in shapes), default=0),
        padded=any(batch.num_tokens < b * s for batch, (b, s) in zip(batches, shapes, strict=True)),
        accumulates=len(batches) > 1,
        has_state=has_state,
    )


class TrackingGauge:
    """Follows every operator of some steps on a CPU.

    A step's peak depends on its shapes alone, and does not shrink as they grow. So the first step that no followed
    one covers is followed, and the largest peak of those is that of the run. (Only a chunked loss also looks at how
    many positions are targets.) Besides, one of :data:`TRACK_EVERY_STEPS` steps is followed, and the next few where
    memory seems to leak.

    Micro-batches were made before the step and do not count.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, num_classes: int | None) -> None:
        self._network, self._optimizer, self._num_classes = network, optimizer, num_classes
        self.leak: str | None = None
        self._survivors = SurvivorWatch()
        self._followed: dict[Extent, Measured] = {}
        self._steps_since, self._track_every = 0, float(TRACK_EVERY_STEPS)
        self._began = self._usual_seconds = 0.0
        self._tracker: StorageTracker | None = None
        self._exit = ExitStack()
        self._extent = Extent("", 0, 0, False, False, False)
        self._seen: set[tuple[int, int]] = set()
        self._shapes: set[tuple[int, int]] = set()
        self._input_bytes = 0
        self._before: set[int] = set()

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        self._began = time.perf_counter()
        self._extent = extent_of(phase, batches, len(self._optimizer.state) > 0)
        self._shapes = set(map(shape_of, batches))
        self._steps_since += phase == "forward"
        if not self._is_due():
            return
        if phase == "forward":
            self._steps_since = 0
        tracker = StorageTracker("cpu", 1, self._num_classes)
        # operators may return views of what the batches hold: known from the start, it can be taken off in the end
        tracker.tag(WORKSPACE, [tensor for batch in batches for tensor in (*batch.inputs.values(), batch.labels)])
        self._input_bytes = tracker.live_bytes
        tag_held(tracker, self._network, self._optimizer)
        with ExitStack() as stack:
            for handle in tag_gradients(tracker, self._network.parameters()):
                stack.callback(handle.remove)
            tracker.mark(phase)
            tracker.reset_peak()
            stack.enter_context(uncompiled(self._network))
            stack.enter_context(tracker)
            self._exit = stack.pop_all()
        self._tracker, self._before = tracker, set(tracker.live)

    def mark(self, phase: str) -> None:
        if self._tracker is not None:
            self._tracker.mark(phase)

    def end(self, completed: bool) -> Measured:
        tracker, self._tracker = self._tracker, None
        is_settled, seconds = self._is_settled(), time.perf_counter() - self._began
        if completed and self._extent.phase == "forward":
            self._seen |= self._shapes
        if tracker is None:
            if self._extent.phase == "forward":
                self._usual_seconds = seconds
            covering = (m for extent, m in self._followed.items() if extent.covers(self._extent))
            return min(covering, key=lambda measured: measured.peak_bytes)
        self._exit.close()
        peak, inputs = tracker.peak, self._input_bytes
        measured = Measured(
            peak.num_bytes - inputs,
            {**peak.bytes_by_kind, WORKSPACE: peak.bytes_by_kind[WORKSPACE] - inputs},
            {phase: size - inputs for phase, size in tracker.peak_bytes_by_phase.items()},
        )
        if not completed:  # what it reached; the next step of this extent is followed again
            return measured
        before = self._followed.get(self._extent, measured)
        self._followed[self._extent] = max(before, measured, key=lambda each: each.peak_bytes)
        if is_settled and self._usual_seconds:
            extra = (seconds - self._usual_seconds) / self._usual_seconds
            self._track_every = max(TRACK_EVERY_STEPS, extra / TRACKED_SHARE)
        if is_settled and self.leak is None:
            tag_held(tracker, self._network, self._optimizer)  # a first update makes the optimizer's state
            self.leak = self._survivors.see(tracker, self._before)
        return measured

    def between(self) -> Measured:
        return Measured()

    def _is_settled(self) -> bool:
        """Whether this is a training step of shapes that were there before: what is cached for a shape, is."""
        return self._extent.phase == "forward" and self._shapes <= self._seen

    def _is_due(self) -> bool:
        """Whether the step that begins is to be followed."""
        if self._extent.phase == "forward":
            suspicious = self.leak is None and self._survivors.is_suspicious
            if (suspicious and self._is_settled()) or self._steps_since >= self._track_every:
                return True
        return not any(extent.covers(self._extent) for extent in self._followed)


@dataclass(frozen=True)
class _Left:
    """What a step left behind."""

    tracker: StorageTracker
    """Goes on telling what of it is still there."""
    storages: dict[int, int]
    """Address of each: its number in the tracker."""

    def alive(self) -> dict[int, Block]:
        """By address, what is still there."""
        found = {address: self.tracker.live.get(key) for address, key in self.storages.items()}
        return {address: block for address, block in found.items() if block is not None}

    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.alive().values())


class SurvivorWatch:
    """Looks at what was born in followed steps and outlived them: each should be gone when a later one ends.

    A storage is known by its identity: one that stays, or is replaced, is no leak. Only steps whose shapes were there
    before are shown to it, since something may be kept for each new shape.
    """

    def __init__(self) -> None:
        self._left: list[_Left] = []

    @property
    def is_suspicious(self) -> bool:
        """Whether the next step should be followed, to be certain."""
        return bool(self._left)

    def see(self, tracker: StorageTracker, before: set[int]) -> str | None:
        """The end of a followed step; returns what leaks once that is certain.

        Args:
            before: numbers of the storages that were there when the step began.
        """
        known = {address for left in self._left for address in left.alive()}
        held = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE)
        born: dict[int, int] = {}
        for key, block in list(tracker.live.items()):  # a copy: what is freed meanwhile leaves it
            reference = tracker._references.get(key)
            storage = reference() if reference is not None else None
            if key not in before and block.kind not in held and storage is not None:
                born[storage._cdata] = key
        left = _Left(tracker, {a: key for a, key in born.items() if a not in known})
        if left.num_bytes() < SURVIVOR_BYTES:
            self._left = []
            return None
        if any(earlier.num_bytes() < SURVIVOR_BYTES for earlier in self._left):
            self._left = []  # it only lives longer than a step
        self._left.append(left)
        if len(self._left) <= CONFIRMING_STEPS:
            return None
        gc.collect()  # circles of objects are no leak
        if any(each.num_bytes() < SURVIVOR_BYTES for each in self._left):
            self._left = []
            return None
        text = self._text()
        self._left = []
        return text

    def _text(self) -> str:
        blocks = [block for left in self._left for block in left.alive().values()]
        sizes: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for block in blocks:
            name = f"{block.shape} {str(block.dtype).removeprefix('torch.')} made in {block.phase}"
            sizes[name] += block.num_bytes
            numbers[name] += 1
        named = [f"{numbers[name]} × {name}" for name, _ in sizes.most_common(_NAMED)]
        if len(sizes) > _NAMED:
            named.append(f"{sum(numbers.values()) - sum(numbers[n] for n, _ in sizes.most_common(_NAMED))} others")
        return _leak_text(sizes.total() / len(self._left), len(self._left), named)
