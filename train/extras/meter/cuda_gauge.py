"""Memory on CUDA by the allocator's own counters: nothing is polled, and nothing waits for the device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from train.extras.meter.gauge import Gauge, Measured
from train.extras.meter.leaks import Inventory, LeakWatch, Shapes, describe
from train.extras.meter.tracker import (
    ACTIVATIONS,
    CUDA_GRANULE_BYTES,
    GRADIENTS,
    KINDS,
    LOGITS,
    WORKSPACE,
    StorageTracker,
    tag_held,
)
from train.records import MicroBatch

COUNT_EVERY_STEPS = 50
"""Parameters and optimizer state are counted again so often, and when the optimizer has state of more parameters."""

ELSEWHERE = "elsewhere"
"""The phase between steps: loading, saving, sampling."""


class CudaGauge(Gauge):
    """Reads the allocator's counters where a phase begins, and where the model's output embedding does.

    What was allocated when the output embedding began, beyond what the forward found, is activations; from there to
    the forward's end it is logits and loss. Gradients count as they are at the start of a phase: those that the first
    backward makes until its peak, and what it recomputes, are in the workspace, which is the rest.
    """

    def __init__(self, device: torch.device, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._device, self._network, self._optimizer = device, network, optimizer
        self._leaks = LeakWatch(on_cuda=True)
        self._phase = ELSEWHERE
        self._shapes: Shapes = ()
        self._measured = Measured()
        self._held: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._current_bytes = self._start_bytes = self._activations = self._logits = 0
        self._in_head = self._has_gradients = False
        self._count_held()
        self._states_counted = -1  # once more when there are gradients
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        self._retries, self._ooms = stats["num_alloc_retries"], stats["num_ooms"]
        embedding = getattr(network, "get_output_embeddings", lambda: None)()
        if isinstance(embedding, nn.Module):
            embedding.register_forward_pre_hook(self._head_begins)

    def begin(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        self._steps_since_count += phase == "forward"
        self._shapes = tuple(batch.shape for batch in batches)
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
        self._close()
        self._open(ELSEWHERE)
        if trained and self.leak is None:
            self.leak = self._leaks.see(self._shapes, self._allocated_bytes, lambda: list_tensors(self._device))
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

    def _close(self) -> None:
        """Assigns the peak since the last reading to the phase that ends here, and resets it."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)  # kept on the host: does not wait for the device
        torch.cuda.reset_peak_memory_stats(self._device)
        peak, self._current_bytes = (stats["allocated_bytes"]["all"][when] for when in ("peak", "current"))
        self._split(peak - self._start_bytes)
        measured = Measured(
            peak,
            stats["reserved_bytes"]["all"]["peak"],
            {self._phase: peak},
            self._kinds(peak),
            stats["num_alloc_retries"] - self._retries,
            stats["num_ooms"] - self._ooms,
        )
        self._measured = self._measured.merged(measured)
        self._retries, self._ooms = stats["num_alloc_retries"], stats["num_ooms"]
        self._split(max(0, self._current_bytes - self._start_bytes))  # the next phase begins with what is left

    def _split(self, forward_bytes: int) -> None:
        """Of what the forward has allocated, the part before the output embedding is activations."""
        if self._in_head:
            self._logits = max(0, forward_bytes - self._activations)
        elif self._phase in ("forward", "evaluation"):
            self._activations = forward_bytes

    def _head_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._phase not in ("forward", "evaluation") or self._in_head:
            return
        self._close()
        self._in_head = True

    def _kinds(self, peak_bytes: int) -> dict[str, int]:
        sizes: dict[str, int] = {
            **self._held,
            ACTIVATIONS: self._activations,
            LOGITS: self._logits,
            WORKSPACE: peak_bytes,
        }
        if not self._has_gradients:
            sizes[GRADIENTS] = 0
        for kind in KINDS:  # in this order; the last, workspace, is the rest
            sizes[kind] = min(sizes[kind], peak_bytes)
            peak_bytes -= sizes[kind]
        return sizes

    def _count_is_due(self) -> bool:
        return len(self._optimizer.state) != self._states_counted or self._steps_since_count >= COUNT_EVERY_STEPS

    def _count_held(self) -> None:
        tracker = StorageTracker(self._device.type, CUDA_GRANULE_BYTES)
        tag_held(tracker, self._network, self._optimizer)
        gradients = tracker.bytes_by_kind[GRADIENTS] or self._held[GRADIENTS]  # at the end of a step there are none
        self._held = {**tracker.bytes_by_kind, GRADIENTS: gradients}
        self._states_counted, self._steps_since_count = len(self._optimizer.state), 0

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["current"]


def list_tensors(device: torch.device) -> Inventory:
    """The live tensors on ``device``; looks at every object of the process, which takes a fraction of a second.

    Views of one storage count once. What only an autograd graph holds may have no Python object, and is then not seen.
    """
    found, storages = Inventory(), set()
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
            found[describe(candidate.shape, candidate.dtype), size] += 1
    return found
