"""Which loss a model gets, by what it allows and what this machine has."""

from __future__ import annotations

import torch
from torch import nn

from train.extras.losses.fused import Place, best_kernel, cce_sums_in_fp32, obstacle_to
from train.extras.losses.in_head import head_of, obstacle_to_chunks
from train.loss import ModelWithLoss, Objective, cross_entropy_scores, cross_entropy_sum
from train.records import UserError
from train.tasks import Task

MIN_CHUNKED_CLASSES = 4096
"""From here on ``auto`` never holds all logits; below, a position's are smaller than what the layers keep of it."""


def choose_loss(asked: str, model: ModelWithLoss, place: Place, installed: bool | None = None) -> str:
    """The loss that ``model`` will use: full, chunked, torch, cce or liger.

    ``asked`` is one of these, or ``auto``: where the classes are many and the model allows it, the best that is there.

    Raises:
        UserError: what is asked for does not work with this model, on this device or without its package, of which
            ``installed`` says whether it is there (None: look).
    """
    head = head_of(model.model)
    many = isinstance(head, nn.Linear) and len(head.weight) >= MIN_CHUNKED_CLASSES
    if asked == "full" or (asked == "auto" and not many):
        return "full"
    if obstacle := obstacle_to_loss_in_head(model):
        if asked == "auto":
            return "full"
        raise UserError(f"loss: {asked} does not work with this model: {obstacle}. Use auto or full.")
    has_bias = head.bias is not None
    if asked == "auto":
        return best_kernel(place, has_bias, model.objective)
    if obstacle := obstacle_to(asked, place, has_bias, model.objective, installed):
        raise UserError(f"loss: {asked} {obstacle}.")
    return asked


def obstacle_to_loss_in_head(model: ModelWithLoss) -> str | None:
    """Why the output embedding of ``model`` cannot compute loss and scores, or None where it can."""
    if model.loss_sum not in (cross_entropy_sum, Task.loss_sum):
        return "its task has a loss of its own"
    if model.scores not in (cross_entropy_scores, Task.scores):
        return "its task has scores of its own"
    return obstacle_to_chunks(model.model)


def place_of(model: nn.Module, device: torch.device, precision: str, divides_classes: bool = False) -> Place:
    """Where the loss of ``model`` is computed; ``precision`` is no, fp16 or bf16, as accelerate says."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, own)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Place(device.type, dtype, capability, divides_classes)


def describe_loss(kind: str, objective: Objective, asked: str) -> str:
    """A line about the loss that a run uses."""
    names = {"torch": "torch's linear_cross_entropy", "cce": "Cut Cross-Entropy", "liger": "Liger Kernel"}
    how = "all logits at once" if kind == "full" else "never all logits, in chunks"
    if kind in names:
        how = f"never all logits, by {names[kind]}"
    if kind == "cce" and not cce_sums_in_fp32():
        how += " of a version that sums gradients in half precision (pip install '.[cce]' brings another)"
    terms = [f"{name} {value:g}" for name, value in vars(objective).items() if value]
    return f"loss: {kind}{' (auto)' if asked == 'auto' else ''}, {', '.join([how, *terms])}"
