"""Memory on CUDA by the allocator's own counters: nothing is polled, and nothing waits for the device."""

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.extras.meter import tracker
from train.extras.meter.memory import Inventory, LeakWatch, Measured, MemoryMeter, describe
from train.extras.meter.tracker import ACTIVATIONS, GRADIENTS, KINDS, LOGITS, WORKSPACE
from train.records import MicroBatch

COUNT_EVERY_STEPS = 50  # parameters and optimizer state are counted again; and when more parameters have state
ELSEWHERE = "elsewhere"  # the phase between steps: loading, saving, sampling


class CudaMeter(MemoryMeter):
    """Reads the allocator's counters where a phase begins, and where the model's output embedding does.

    What was allocated when the output embedding began, beyond what the forward found, is activations; from there to
    the forward's end it is logits and loss. Gradients count as they are at the start of a phase: those that the first
    backward makes until its peak, and what it recomputes, are in the workspace, which is the rest.

    It resets the allocator's peaks, so ``torch.cuda.max_memory_allocated`` is no longer that of the run.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leaks = LeakWatch(self._allocated_bytes, lambda: list_tensors(self.device), on_cuda=True)
        self._reading = ELSEWHERE  # the phase to which the next reading belongs
        self._held: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._start_bytes = self._activations = self._logits = 0
        self._in_head = self._has_gradients = False
        self._states_counted, self._steps_since_count = -1, 0
        self._count_held()
        self._states_counted = -1  # once more when there are gradients
        self._stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        if isinstance(embedding := getattr(self.network, "get_output_embeddings", lambda: None)(), nn.Module):  # type: ignore
            embedding.register_forward_pre_hook(self._head_begins)

    def _begin(self, batches: Sequence[MicroBatch]) -> None:
        self._steps_since_count += self.phase == "forward"
        self._mark(self.phase)

    def _mark(self, phase: str) -> None:
        self._between()
        self._reading, self._in_head = phase, False
        self._has_gradients = any(p.grad is not None for p in self.network.parameters())
        if phase != "backward":  # which alone begins with what the forward made
            self._start_bytes = self._stats["allocated_bytes"]["all"]["current"]
            self._activations = self._logits = 0
        if phase == "clip":  # now every gradient is there
            self._count_held()

    def _end(self, completed: bool) -> None:
        if trained := (completed and self.phase != "evaluation"):  # the first step made the optimizer's state
            self._count_held()
        self._mark(ELSEWHERE)
        if trained:
            self.leaks.see(self.shapes)

    def _between(self) -> None:
        """Assigns the peak since the last reading to the phase that ends here, and resets it."""
        before, stats = self._stats, torch.cuda.memory_stats_as_nested_dict(self.device)  # kept on the host: no waiting
        torch.cuda.reset_peak_memory_stats(self.device)
        self._stats, allocated = stats, stats["allocated_bytes"]["all"]
        self._split(allocated["peak"] - self._start_bytes)
        peak, reserved = allocated["peak"], stats["reserved_bytes"]["all"]["peak"]
        retries, ooms = (stats[name] - before[name] for name in ("num_alloc_retries", "num_ooms"))
        self._add(Measured(peak, reserved, {self._reading: peak}, self._kinds(peak), retries, ooms))
        self._split(max(0, allocated["current"] - self._start_bytes))  # the next phase begins with what is left

    def _split(self, forward_bytes: int) -> None:
        """Of what the forward has allocated, the part before the output embedding is activations."""
        if self._in_head:
            self._logits = max(0, forward_bytes - self._activations)
        elif self._reading in ("forward", "evaluation"):
            self._activations = forward_bytes

    def _head_begins(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and self._reading in ("forward", "evaluation") and not self._in_head:
            self._between()
            self._in_head = True

    def _kinds(self, peak_bytes: int) -> dict[str, int]:
        sizes = {**self._held, ACTIVATIONS: self._activations, LOGITS: self._logits, WORKSPACE: peak_bytes}
        sizes[GRADIENTS] *= self._has_gradients
        for kind in KINDS:  # in this order; the last, workspace, is the rest
            sizes[kind] = min(sizes[kind], peak_bytes)
            peak_bytes -= sizes[kind]
        return sizes

    def _count_held(self) -> None:
        """Counts parameters, gradients and optimizer state, if that is due."""
        if len(self.optimizer.state) == self._states_counted and self._steps_since_count < COUNT_EVERY_STEPS:
            return
        counted = tracker.StorageTracker(self.device.type)
        tracker.tag_held(counted, self.network, self.optimizer)
        gradients = counted.bytes_by_kind[GRADIENTS] or self._held[GRADIENTS]  # at the end of a step there are none
        self._held = {**counted.bytes_by_kind, GRADIENTS: gradients}
        self._states_counted, self._steps_since_count = len(self.optimizer.state), 0

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["current"]


def list_tensors(device: torch.device) -> Inventory:
    """The live tensors on ``device``; looks at every object of the process, which takes a fraction of a second.

    Views of one storage count once. What only an autograd graph holds may have no Python object, and is then not seen.
    """
    found: dict[int, tuple[str, int]] = {}
    # not isinstance: a proxy may do anything when asked for its class
    for tensor in (candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)):
        # the storage's device: the fake tensors that torch.compile keeps name a card but hold no memory
        if (storage := tracker.storage_of(tensor)) is not None and storage.device.type == device.type:
            found.setdefault(storage._cdata, (describe(tensor.shape, tensor.dtype), storage.nbytes()))
    return Inventory(found.values())
