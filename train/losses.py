"""Losses summed over targets, computed inside the model's forward.

The sum, not the mean: an optimizer step divides once by the number of targets of its whole global batch. Inside the
forward: the logits never leave it, so nothing casts them to fp32 a second time, gathers them or keeps them alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.records import IGNORE


class Scores(NamedTuple):
    """What an evaluation needs of one batch."""

    loss_sums: Tensor
    """(B,) summed loss of each example."""
    predictions: Tensor
    """(B, S) or (B,) the most probable class of each position."""


class ModelWithLoss(nn.Module):
    """``model`` and the cross-entropy of its logits as one module, which is what gets prepared and called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, scored: bool = False) -> Tensor | Scores:
        """The summed loss (), or with ``scored`` each example's loss and predictions.

        Args:
            inputs: keyword arguments of the model, ``input_ids: (B, S)`` among them.
            labels: (B, S) or (B,), aligned with the logits (B, S, C) or (B, C).
        """
        logits = logits_of(self.model(**inputs))
        if not scored:
            return cross_entropy_sum(logits, labels)
        losses = cross_entropy(logits, labels).view(labels.shape)
        return Scores(losses.reshape(len(labels), -1).sum(1), logits.argmax(-1))


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: a tensor, a mapping or an object that has them."""
    if isinstance(output, Tensor):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of each position, flattened, in fp32 (fp64 for fp64 logits); 0 where the label is IGNORE."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE, reduction="none"
    )


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """() the sum of :func:`cross_entropy`."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORE, reduction="sum"
    )
