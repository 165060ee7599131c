"""The loss computed inside the model's output embedding, where the hidden states and the weight are."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from train.extras.losses.chunked import Head, chunked_scores, head_sum
from train.extras.losses.fused import cce_sum, liger_sum, torch_sum
from train.extras.losses.loss_head import Answer, LossHead, head_of
from train.loss import ModelWithLoss, Scores, logits_of


def use_loss_in_head(model: ModelWithLoss, kind: str) -> None:
    """From now on ``model`` computes its loss without holding all logits.

    Args:
        kind: chunked, torch, cce or liger; the model is one that
            :func:`train.extras.losses.loss_head.obstacle_to_chunks` finds nothing against.
    """
    LossHead.adopt(head_of(model.model))
    model.loss_in_head = LossInHead(kind)


class LossInHead:
    """What :class:`train.loss.ModelWithLoss` calls in place of taking the loss of the logits."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(
        self, model: ModelWithLoss, inputs: dict[str, Any], labels: Tensor, scored: bool, num_targets: int | None
    ) -> Tensor | Scores:
        answer: Answer = partial(chunked_scores, labels=labels)
        if not scored:
            answer = partial(self._training_loss(model), labels=labels, num_targets=num_targets)
        with head_of(model.model).answering(answer):
            return logits_of(model.model(**inputs))

    def _training_loss(self, model: ModelWithLoss) -> Answer:
        if self.kind in ("torch", "cce"):
            return torch_sum if self.kind == "torch" else cce_sum
        return partial(liger_sum if self.kind == "liger" else _in_chunks, objective=model.objective)


def _in_chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, part: Any = None, **rest: Any) -> Tensor:
    return head_sum(hidden, Head(weight, bias, part), **rest)
