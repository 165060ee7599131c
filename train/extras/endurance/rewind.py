"""Going back to the start of a step: what to put back, and whether an update has written too much for that."""

from __future__ import annotations

import gc
import random

import numpy as np
import torch
from torch import Tensor, nn


def free_memory(device: torch.device) -> None:
    """Returns unused memory to the device. Call it outside ``except``: the exception keeps its activations alive."""
    gc.collect()  # frames of an exception that was caught and raised again on its way may form cycles
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers of a model that its checkpoints hold, such as BatchNorm's averages; most language models have none.

    Other buffers are constants, or every forward computes them.
    """
    owned = ((module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items())
    return [b for module, name, b in owned if b is not None and name not in module._non_persistent_buffers_set]


class Start:
    """The random state of Python, numpy, the host and ``device``, and persistent buffers, at the start of a step."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self._device, self._model = device, model
        self._python, self._numpy, self._host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
        self._buffers = [buffer.clone() for buffer in persistent_buffers(model)]

    def restore(self) -> None:
        """Sets them as they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.get_device_module(self._device).set_rng_state(self._on_device)
        with torch.no_grad():
            for buffer, value in zip(persistent_buffers(self._model), self._buffers, strict=True):
                buffer.copy_(value)


class Writes:
    """Tells whether an update has written to weights, optimizer state or gradients since this object was made.

    torch's optimizers write through operations that count each tensor's versions. The fused ones do not count those
    of weights; but Adam's counts its ``step`` before any weight of the same group is written. For others, and for
    optimizers from elsewhere, the answer is yes.

    Fused AdamW allocates state for one group of parameters at a time, and updates that group before the next: a fault
    in a later group comes too late for another try.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counted = type(optimizer).__module__.startswith("torch.optim.") and (
            isinstance(optimizer, torch.optim.Adam) or not any(g.get("fused") for g in optimizer.param_groups)
        )
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._had_state = {p for p, state in optimizer.state.items() if state}
        self._versions = {tensor: tensor._version for tensor in self._weights_and_state()}

    def _weights_and_state(self) -> list[Tensor]:
        states = self._optimizer.state.values()
        return [*self._weights, *(v for state in states for v in state.values() if isinstance(v, Tensor))]

    def gradient_versions(self) -> list[int]:
        """How often each gradient was written."""
        return [p.grad._version for p in self._weights if p.grad is not None]

    def to_weights_or_state(self) -> bool:
        """Whether a weight, or state that was there before or begun since, may have changed."""
        return not self._counted or any(t._version > self._versions.get(t, 0) for t in self._weights_and_state())

    def undone(self, gradient_versions: list[int]) -> bool:
        """Whether nothing is left of an update that failed: neither was written, nor gradients since those versions.

        Removes state that was begun and perhaps not finished: the optimizer would take it as complete.
        """
        if self.to_weights_or_state():
            return False
        for parameter in self._optimizer.state.keys() - self._had_state:
            del self._optimizer.state[parameter]
        return self.gradient_versions() == gradient_versions


def reset_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Forgets that gradients were unscaled, and keeps the scale."""
    if scaler is not None:
        scaler.update(new_scale=scaler.get_scale())
