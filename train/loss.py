"""Losses summed over targets, computed inside the model's forward.

The sum, not the mean: an optimizer step divides once by the number of targets of its whole global batch. Inside the
forward: the logits never leave it, so nothing casts them to fp32 a second time, gathers them or keeps them alive.

With a large vocabulary the logits are the largest tensor of a step. All losses but ``full`` never hold all of them: the
model's output embedding answers with the loss instead of the logits (:mod:`train.extras.losses.answering_head`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.cross_entropy import PLAIN, Objective, Scores, cross_entropy, cross_entropy_sum
from train.errors import UserError
from train.extras.losses.answering_head import AnsweringHead, head_of, logits_of, obstacle_to_chunks
from train.extras.losses.chunked import chunked_scores, chunked_sum
from train.extras.losses.fused import Place, best_kernel, cce_sum, cce_sums_in_fp32, liger_sum, obstacle_to, torch_sum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.extras.losses.answering_head import Answer

MIN_CHUNKED_CLASSES = 4096
"""From here on ``auto`` never holds all logits; below, a position's are smaller than what the layers keep of it."""


class ModelWithLoss(nn.Module):
    """``model`` and the loss of its logits as one module, which is what gets prepared and called.

    Args:
        loss: full, chunked, torch, cce or liger, as :func:`choose_loss` says; all but full need a model that
            :func:`train.extras.losses.answering_head.obstacle_to_chunks` finds nothing against.
        objective: what is minimised beside cross-entropy; torch and cce have none of it.
    """

    def __init__(self, model: nn.Module, loss: str = "full", objective: Objective = PLAIN) -> None:
        super().__init__()
        self.model = model
        self.loss, self.objective = loss, objective
        if self.chunked:
            AnsweringHead.adopt(head_of(model))

    @property
    def chunked(self) -> bool:
        """Whether never all logits are held."""
        return self.loss != "full"

    def tie_weights(self) -> None:
        """Makes the weights one again that the model shares between layers, after these were put in one by one."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()  # pyright: ignore[reportCallIssue]

    def work_in_chunks(self) -> None:
        """From now on never holds all logits."""
        AnsweringHead.adopt(head_of(self.model))
        self.loss = "chunked"

    def split_classes(self, mesh: DeviceMesh) -> None:
        """From now on each rank of ``mesh`` holds the weights, and computes the logits, of its part of the classes.

        For the loss ``chunked`` alone; ``mesh`` has one dimension, and all its ranks call the model with the same
        batch.
        """
        from train.extras.parallelism.vocabulary import VocabularyPart

        assert self.loss == "chunked"
        head = head_of(self.model)
        head.part = VocabularyPart(len(head.weight), mesh)

    def forward(
        self, inputs: dict[str, Tensor], labels: Tensor, scored: bool = False, num_targets: int | None = None
    ) -> Tensor | Scores:
        """The summed loss (), or with ``scored`` each example's cross-entropy and predictions.

        What is scored is plain cross-entropy, whatever the objective: its exponential is a perplexity.

        Args:
            inputs: keyword arguments of the model, ``input_ids: (B, S)`` among them.
            labels: (B, S) or (B,), aligned with the logits (B, S, C) or (B, C).
            num_targets: how many labels are targets, where the caller knows. With chunks and few targets the logits
                of the other positions are then not computed; counting here would wait for the device.
        """
        if self.chunked:
            answer = partial(chunked_scores, labels=labels) if scored else self._answer(labels, num_targets)
            with head_of(self.model).answering(answer):
                return logits_of(self.model(**inputs))
        logits = logits_of(self.model(**inputs))
        if not scored:
            return cross_entropy_sum(logits, labels, self.objective)
        losses = cross_entropy(logits, labels).view(labels.shape)
        return Scores(losses.reshape(len(labels), -1).sum(1), logits.argmax(-1))

    def _answer(self, labels: Tensor, num_targets: int | None) -> Answer:
        options = {"labels": labels, "num_targets": num_targets}
        match self.loss:
            case "torch":
                return partial(torch_sum, **options)
            case "cce":
                return partial(cce_sum, **options)
            case "liger":
                return partial(liger_sum, objective=self.objective, **options)
        return partial(chunked_sum, objective=self.objective, **options)


def choose_loss(
    asked: str, model: nn.Module, place: Place, objective: Objective = PLAIN, installed: bool | None = None
) -> str:
    """The loss that :class:`ModelWithLoss` is to work with: full, chunked, torch, cce or liger.

    Args:
        asked: one of these, or ``auto``: where the classes are many and the model allows it, the best that is there.
        installed: whether the package of the one that is asked for is; None: look.

    Raises:
        UserError: what is asked for does not work with this model, on this device or without its package.
    """
    head = head_of(model)
    if asked == "auto" and not (isinstance(head, nn.Linear) and len(head.weight) >= MIN_CHUNKED_CLASSES):
        return "full"
    if asked == "full":
        return "full"
    if obstacle := obstacle_to_chunks(model):
        if asked == "auto":
            return "full"
        raise UserError(f"loss: {asked} does not work with this model: {obstacle}. Use auto or full.")
    has_bias = head.bias is not None
    if asked == "auto":
        return best_kernel(place, has_bias, objective)
    if obstacle := obstacle_to(asked, place, has_bias, objective, installed):
        raise UserError(f"loss: {asked} {obstacle}.")
    return asked


def place_of(model: nn.Module, device: torch.device, precision: str, divides_classes: bool = False) -> Place:
    """Where the loss of ``model`` is computed.

    Args:
        precision: no, fp16 or bf16, as accelerate says.
        divides_classes: whether tensor parallelism divides the model.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, own)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Place(device.type, dtype, capability, divides_classes)


def describe_loss(model: ModelWithLoss, asked: str) -> str:
    """A line about the loss that a run takes."""
    how = {
        "full": "all logits at once",
        "chunked": "never all logits, in chunks",
        "torch": "never all logits, by torch's linear_cross_entropy",
        "cce": "never all logits, by Cut Cross-Entropy",
        "liger": "never all logits, by Liger Kernel",
    }[model.loss]
    if model.loss == "cce" and not cce_sums_in_fp32():
        how += " of a version that sums gradients in half precision (pip install '.[cce]' brings another)"
    terms = [f"{name} {value:g}" for name, value in vars(model.objective).items() if value]
    return f"loss: {model.loss}{' (auto)' if asked == 'auto' else ''}, {', '.join([how, *terms])}"
