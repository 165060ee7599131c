"""What is minimised at each position, from logits that are all there.

Sums, not means: an optimizer step divides once by the number of targets of its whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from train.records import IGNORE


@dataclass(frozen=True)
class Objective:
    """Terms of the training loss beside cross-entropy, for each target: (1 − ε) · −log p(label) + ε · the mean of
    −log p over the classes + z · log² Z, Z being the sum of the exponentials of the logits."""

    label_smoothing: float = 0.0
    """ε (arXiv 1512.00567, section 7)."""
    z_loss: float = 0.0
    """z; it keeps logits from drifting (PaLM, arXiv 2204.02311, section 5, took 1e-4)."""


PLAIN = Objective()


class Scores(NamedTuple):
    """What an evaluation needs of one batch."""

    loss_sums: Tensor
    """(B,) summed cross-entropy of each example."""
    predictions: Tensor
    """(B, S) or (B,) the most probable class of each position."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which losses of logits of type ``dtype`` are computed: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of each position, flattened, in fp32 (fp64 for fp64 logits); 0 where the label is IGNORE."""
    logits, labels = _rows(logits, labels)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")


def cross_entropy_sum(logits: Tensor, labels: Tensor, objective: Objective = PLAIN) -> Tensor:
    """() the summed loss of the positions whose label is not IGNORE; what :func:`cross_entropy` gives where plain."""
    logits, labels = _rows(logits, labels)
    loss = F.cross_entropy(
        logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=objective.label_smoothing
    )
    if objective.z_loss:
        log_z = logits.logsumexp(-1).masked_fill(labels == IGNORE, 0)
        loss = loss + objective.z_loss * log_z.square().sum()
    return loss


def _rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.to(wide_dtype(logits.dtype))
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
