"""Losses summed over targets, computed inside the model's forward.

The sum, not the mean: an optimizer step divides once by the number of targets of its whole global batch. Inside the
forward: the logits never leave it, so nothing casts them to fp32 a second time, gathers them or keeps them alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.records import IGNORE

if TYPE_CHECKING:
    from train.tasks import Task


class Scores(NamedTuple):
    """What an evaluation needs of one batch."""

    loss_sums: Tensor  # (B,) summed cross-entropy of each example
    predictions: Tensor  # (B, S) or (B,) the most probable class of each position


class ModelWithLoss(nn.Module):
    """``model`` and the loss of its logits (its task's, or cross-entropy) as the module that is prepared."""

    def __init__(self, model: nn.Module, task: type[Task] | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss_sum = task.loss_sum if task else cross_entropy_sum
        self.scores = task.scores if task else cross_entropy_scores
        # Set by an extra: in place of forward, called with this module and forward's arguments, without all logits.
        self.loss_in_head: Callable[..., Any] | None = None

    def tie_weights(self) -> None:
        """Ties weights that the model shares between layers, after these were put in one by one."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()  # pyright: ignore[reportCallIssue]

    def forward(
        self, inputs: dict[str, Any], labels: Tensor, scored: bool = False, num_targets: int | None = None
    ) -> Tensor | Scores:
        """The summed loss (); ``scored``: each example's plain cross-entropy, and predictions.

        ``inputs`` are keyword arguments of the model; ``labels`` (B, S) or (B,) are aligned with its logits. A caller
        who knows how many labels are targets says so: counting them here would wait for the device.
        """
        if self.loss_in_head is not None:
            return self.loss_in_head(self, inputs, labels, scored, num_targets)
        logits = logits_of(output := self.model(**inputs))
        if scored:
            return self.scores(logits, labels)
        return balanced(self.loss_sum(logits, labels), output, labels, self.model)


def logits_of(output: Any) -> Any:
    """The logits of a model's output: a tensor, a mapping or an object that has them."""
    if isinstance(output, Tensor | Scores):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits


def balanced(loss_sum: Tensor, output: Any, labels: Tensor, model: Any) -> Tensor:
    """``loss_sum`` and, for each target, the load balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4).

    As in transformers, a model computes it where its configuration has ``output_router_logits: true``.
    """
    if (balance := getattr(output, "aux_loss", None)) is None:
        return loss_sum
    config = model.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", None) or getattr(config, "aux_loss_coef", 0.0)
    return loss_sum + weight * balance * (labels != IGNORE).sum()


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """−log p(label) of each position, flattened, in fp32 (fp64 for fp64 logits); 0 where the label is IGNORE."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    return F.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORE, **{"reduction": "none", **options})


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """() the summed loss of the positions whose label is not IGNORE."""
    return cross_entropy(logits, labels, reduction="sum")


def cross_entropy_scores(logits: Tensor, labels: Tensor) -> Scores:
    """Each example's summed cross-entropy and predictions."""
    losses = cross_entropy(logits, labels).view(labels.shape)
    return Scores(losses.reshape(len(labels), -1).sum(1), logits.argmax(-1))
