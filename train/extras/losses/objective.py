"""Terms of the training loss in addition to cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import Config
from train.extras.losses import Options
from train.model import ModelWithLoss
from train.records import IGNORE, UserError
from train.tasks import cross_entropy, cross_entropy_sum


@dataclass(frozen=True)
class Objective:
    """For each target: (1 − ε) · −log p(label) + ε · mean of −log p over classes + z · log² Z, Z = Σ exp(logits)."""

    label_smoothing: float = 0.0  # ε (arXiv 1512.00567, section 7)
    z_loss: float = 0.0  # z; keeps logits from drifting (PaLM, arXiv 2204.02311, section 5, used 1e-4)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """() summed over the positions whose label is not IGNORE."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # once for both terms
        loss = cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        if self.z_loss:
            log_z = logits.logsumexp(-1).masked_fill(labels == IGNORE, 0)
            loss = loss + self.z_loss * log_z.square().sum()
        return loss

    def set_in(self, model: ModelWithLoss) -> None:
        """Makes it the loss of the logits of ``model``; raises UserError where the task has a loss of its own."""
        if self != PLAIN and model.loss_sum is not cross_entropy_sum:
            raise UserError("label_smoothing and z_loss belong to cross-entropy; this task has another loss: use 0.")
        model.loss_sum = model.loss_sum if self == PLAIN else self.loss_sum


PLAIN = Objective()  # cross-entropy


def objective_of(config: Config) -> Objective:
    """That of a run."""
    own = config.of(Options)
    return Objective(own.label_smoothing, own.z_loss)
