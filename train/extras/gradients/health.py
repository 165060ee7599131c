"""Measures gradients and activations by layer in the steps that are due, and names what is wrong.

A layer is a block of the model (``model.layers.0``) or a module outside of blocks (``lm_head``). Each due step writes a
row ``health`` to ``metrics.jsonl``, with a list over layers for each of FIGURES. The gradient is that of the mean loss,
before clipping and without its loss scale. Its exponents tell what any loss scale would flush or overflow.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.extras.gradients.problems import problems_in
from train.figures import read_metrics
from train.records import Run, exchange

FIGURES = ("norms", "flushed", "overflowed", "flushed_scaled", "overflowed_scaled")
PIECE = 2**22  # elements that are counted at a time, because counting takes as much memory as they do
USUAL_SCALE = 2.0**16  # torch's first loss scale: what fp16 would do where a run has none
BINS, BIAS = 256, 127  # exponents of fp32; the first bin holds zeros, the last infinity and NaN
SMALLEST, LARGEST = -25, 16  # fp16 makes zero of what is below 2^-25, and infinity of what is 2^16 or above
ROWS = 64  # that a diagnosis looks back on, in addition to the first one


class Health:
    """Measures one run; ``network`` is the trained model, its weights whole or sharded."""

    def __init__(self, run: Run, network: nn.Module, every_steps: int) -> None:
        self._run, self._network, self._every_steps = run, network, every_steps
        self._weights: dict[str, list[nn.Parameter]] = {}
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                self._weights.setdefault(layer_of(name.rpartition(".")[0] or name), []).append(parameter)
        # What the log has of the run before it was resumed; only the main process tells of problems.
        rows = [row for row in read_metrics(run.outputs.metrics) if row.get("layers") == [*self._weights]]
        self._rows, self._told = [*rows[:1], *rows[1:][-ROWS:]], set()
        self._gradients: list[list[float]] = []  # of the step that is being made, by layer
        self._activations: dict[str, Tensor] | None = None  # () the largest so far, by layer; None: not measured now
        self._loss_scale, self._has_fp16 = None, False

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is measured: early ones more often, because that is where most runs go wrong."""
        return step > 0 and (step % self._every_steps == 0 or (step < self._every_steps and step & (step - 1) == 0))

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        self._gradients, self._activations = [], {}
        # A compiled layer would keep the hooks for ever.
        modules = () if self._run.config.get("compile") else self._network.named_modules()
        named = [(layer_of(name), module) for name, module in modules]
        hooks = [m.register_forward_hook(partial(self._see, layer)) for layer, m in named if layer in self._weights]
        try:
            yield
            if self._gradients:
                self._record(step)
        finally:
            self._activations = None
            for hook in hooks:
                hook.remove()

    def _see(self, layer: str, module: nn.Module, inputs: Any, output: Any) -> None:
        output, known = output[0] if isinstance(output, tuple) and output else output, self._activations
        # An output embedding may give the sum of losses.
        if known is not None and isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1:
            low, high = torch.aminmax(local(output))
            largest = torch.maximum(-low, high).float().nan_to_num(torch.finfo(torch.float32).max)
            known[layer] = torch.maximum(known.get(layer, largest), largest)
            self._has_fp16 = self._has_fp16 or output.dtype == torch.float16

    def see_gradient(self) -> None:
        """Called when the gradient is whole, and still multiplied by the loss scale."""
        if self._activations is not None:
            scaler = self._run.accelerator.scaler
            self._loss_scale = None if scaler is None else scaler.get_scale()  # the update may change it
            self._gradients = [gradient_of(weights, self._has_fp16) for weights in self._weights.values()]

    def _record(self, step: int) -> None:
        """Writes the row of a step, of all ranks together, and tells of each problem once."""
        run, seen = self._run, self._activations or {}
        own = [float(seen.get(name, -math.inf)) for name in self._weights]
        gradients, activations = zip(*exchange((self._gradients, own)), strict=True)  # by rank
        sizes = [sum(p.numel() * (1 + p.is_complex()) for p in weights) for weights in self._weights.values()]
        figures = figures_of(np.sum(gradients, axis=0).tolist(), sizes, self._loss_scale)
        figures["activations"] = [rounded(value) for value in np.max(activations, axis=0).tolist()]
        row = {"loss_scale": self._loss_scale, "fp16": self._has_fp16, "layers": list(self._weights), **figures}
        run.outputs.record(run, "health", step, row)
        self._rows = [*self._rows[:1], *self._rows[1:][-ROWS:], row]
        for problem in problems_in(self._rows):
            if problem.name not in self._told:
                self._told.add(problem.name)
                run.outputs.note(f"gradient health, step {step}: {problem}")


def layer_of(path: str) -> str:
    """The block of a module: its path up to the first number; outside of blocks the module's own path."""
    parts = path.split(".")
    return ".".join(parts[: next((place for place, part in enumerate(parts, 1) if part.isdigit()), None)])


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return cast("DTensor", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def gradient_of(weights: Sequence[Tensor], is_fp16: bool) -> list[float]:
    """(BINS + 2,) of this rank's part: how many elements have each exponent, the sum of squares, and how many are lost.

    Lost is what fp16 arithmetic made zero before it became part of the gradient. Zeros that are right, of tokens or
    units that the batch does not use, fill a row or a column; lost ones have others next to them that are not zero.
    """
    counts, squares, lost = torch.zeros(BINS, dtype=torch.int64, device=local(weights[0]).device), 0.0, 0
    for weight in weights:
        gradient = local(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        for piece in gradient.flatten().split(PIECE):
            exponents = piece.float().view(torch.int32).bitwise_right_shift(23).bitwise_and_(BINS - 1)
            counts += torch.bincount(exponents, minlength=BINS)
        wide = torch.promote_types(gradient.dtype, torch.float32)  # fp64 stays, for no norm may narrow it
        squares += torch.linalg.vector_norm(gradient, dtype=wide).item() ** 2
        if is_fp16 and gradient.ndim > 1:
            held = (gradient != 0).flatten(1)
            lost += int(held.any(1).sum() * held.any(0).sum() - held.sum())
    return [*counts.tolist(), squares, lost]


def figures_of(table: list[list[float]], sizes: list[int], loss_scale: float | None) -> dict[str, Any]:
    """Figures of the whole gradient and, as lists, of the layers; None: not finite.

    ``table`` has by layer what :func:`gradient_of` gave, summed over ranks, who may hold copies; ``sizes`` are the
    elements of each layer; the gradient is multiplied by ``loss_scale``, a power of two.
    """
    present = 0 if loss_scale is None else round(math.log2(loss_scale))
    usual = round(math.log2(USUAL_SCALE)) if loss_scale is None else present
    found: dict[str, Any] = {name: [] for name in FIGURES}
    whole, total = [0.0] * BINS, 0.0
    for (*counts, squares, lost), size in zip(table, sizes, strict=True):
        copies, some = sum(counts) / size, max(1, sum(counts[1:]) + lost)
        whole, total = [a + b / copies for a, b in zip(whole, counts, strict=True)], total + squares / copies
        found["norms"].append(rounded(math.sqrt(squares / copies) / 2.0**present))
        for scale, name, more in ((0, "", lost), (usual, "_scaled", lost if loss_scale else 0)):
            zero = BIAS + present - scale  # the bin of 1.0 once the gradient has this scale
            found[f"flushed{name}"].append(rounded((sum(counts[1 : zero + SMALLEST]) + more) / some))
            found[f"overflowed{name}"].append(rounded(sum(counts[zero + LARGEST :]) / some))
    shares = {e - BIAS - present: rounded(count / sum(sizes)) for e, count in enumerate(whole) if count and e}
    norm = rounded(math.sqrt(total) / 2.0**present)
    return {"grad_norm": norm, "zeros": rounded(whole[0] / sum(sizes)), "exponents": shares, **found}


def rounded(value: float) -> float | None:
    """Four digits, or None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
