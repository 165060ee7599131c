"""The loss computed inside the output embedding, where hidden states and weight are, and which one a model gets."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from train.extras.losses.chunked import PLAIN, Objective, chunked_scores, chunked_sum
from train.extras.losses.fused import Place, best_kernel, cce_sum, liger_sum, obstacle_to
from train.extras.weightless import inputs_on_trial, obstacle_on_trial
from train.model import ModelWithLoss, logits_of, with_aux_loss
from train.records import UserError
from train.tasks import Scores, cross_entropy_scores, cross_entropy_sum

# From here on auto never holds all logits; below, a position's are smaller than what the layers keep of it.
MIN_CHUNKED_CLASSES = 4096
_asked = threading.local()  # its ``answer``: see :func:`answered`


def head_of(model: nn.Module) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()  # type: ignore


class LossHead(nn.Linear):
    """An output embedding that gives ``_asked.answer``, in place of its logits: where sharded weights are gathered."""

    def forward(self, input: Tensor) -> Any:
        answer = getattr(_asked, "answer", None)
        return super().forward(input) if answer is None else answer(input, self.weight, self.bias)


@dataclass(frozen=True)
class LossInHead:
    """What :class:`train.model.ModelWithLoss` calls in place of taking the loss of the logits."""

    kind: str
    objective: Objective = PLAIN

    def __call__(
        self, model: ModelWithLoss, inputs: dict[str, Any], labels: Tensor, scored: bool, num_targets: int | None
    ) -> Tensor | Scores:
        if scored and model.scores is not cross_entropy_scores:  # the task's, of all logits
            return model.scores(logits_of(model.model(**inputs)), labels)
        kept: list[Scores] = []

        def score(*tensors: Any) -> Tensor:
            kept.append(chunked_scores(*tensors, labels=labels))
            return kept[-1].loss_sums  # a tensor, because some models still handle what they take for logits

        kinds = {"chunked": chunked_sum, "cce": cce_sum, "liger": liger_sum}
        terms = {"objective": self.objective} if self.objective != PLAIN else {}  # which cce does not know
        summed = partial(kinds[self.kind], labels=labels, num_targets=num_targets, **terms)
        output = answered(model.model, inputs, score if scored else summed)
        return kept[-1] if scored else with_aux_loss(logits_of(output), output, labels, model.model)


def answered(model: nn.Module, inputs: Mapping[str, Any], answer: Callable[..., Tensor]) -> Any:
    """The output of ``model``, with ``answer(hidden (..., H), weight (V, H), bias (V,))`` in place of its logits."""
    with patch.object(_asked, "answer", answer, create=True):
        return model(**inputs)


def use_loss_in_head(model: ModelWithLoss, kind: str, objective: Objective = PLAIN) -> None:
    """Has ``model``, to which there is no :func:`obstacle_to_chunks`, use chunked, cce or liger from now on."""
    head_of(model.model).__class__ = LossHead
    model.loss_in_head = LossInHead(kind, objective)


@dataclass(eq=False)
class _Watch(TorchFunctionMode):
    """Notices whether anything is computed with a tensor that was ``given`` in place of logits."""

    given: list[Tensor] = field(default_factory=list)
    is_used: bool = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        versions = [t._version for t in self.given]
        found = func(*args, **(kwargs or {}))
        # .float() of the fp32 that it is already; not what changes it in place
        is_same = any(found is t and t._version == v for t, v in zip(self.given, versions, strict=False))
        computes = not is_same and (isinstance(found, Tensor) or getattr(func, "__name__", "") != "__get__")  # a shape
        self.is_used |= computes and any(leaf is t for t in self.given for leaf in tree_leaves((args, kwargs)))
        return found


def obstacle_to_chunks(model: nn.Module) -> str | None:
    """Why the loss of ``model`` cannot come from its output embedding, or None where it can: tried on eight tokens.

    A model may scale or cap its logits, or make a loss of its own of them: then it has to compute them.
    """
    if type(head_of(model)) not in (nn.Linear, LossHead):
        return "its get_output_embeddings() returns no plain nn.Linear"

    def trial(twin: Any) -> str | None:
        head, watch = head_of(twin), _Watch()
        head.__class__, ids = LossHead, head.weight.new_zeros((1, 8), dtype=torch.long)

        def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            watch.given.append(cross_entropy_sum(nn.functional.linear(hidden, weight, bias), ids))
            return watch.given[-1]

        with patch.object(_asked, "answer", answer, create=True), watch:
            out = logits_of(twin(**inputs_on_trial(twin, ids)))
            if len(watch.given) != 1 or out is not watch.given[0]:
                return "it changes the logits after its output embedding"
            with suppress(Exception):  # a model may look at values, which are not there, in training alone
                twin.train()(**inputs_on_trial(twin, ids))
        return "it computes with its logits, such as a loss of its own" if watch.is_used else None

    return obstacle_on_trial(model, trial)


def choose_loss(
    asked: str, model: ModelWithLoss, place: Place, objective: Objective = PLAIN, installed: bool | None = None
) -> tuple[str, str | None]:
    """The loss that ``model`` will use, full, chunked, cce or liger, and what it needs all logits for, if it does.

    ``asked`` is one of these, or ``auto``: where the classes are many and the model allows it, the best that is there.
    Raises UserError if it does not work with this model or device, or its package is not ``installed`` (None: look).
    """
    classes = len(head.weight) if isinstance(head := head_of(model.model), nn.Linear) else 0
    if asked == "full" or (asked == "auto" and classes < MIN_CHUNKED_CLASSES):
        return "full", None
    own = model.loss_sum is not cross_entropy_sum and not isinstance(getattr(model.loss_sum, "__self__", 0), Objective)
    obstacle = "its task has a loss of its own" if own else obstacle_to_chunks(model.model)
    if asked == "auto":
        return ("full" if obstacle else best_kernel(place, objective)), obstacle
    if obstacle:
        raise UserError(f"loss: {asked} does not work with this model: {obstacle}. Use auto or full.")
    if obstacle := obstacle_to(asked, place, objective, installed):
        raise UserError(f"loss: {asked} {obstacle}.")
    return asked, None


def place_of(model: nn.Module, device: torch.device, precision: str, is_replicated: bool = False) -> Place:
    """Where the loss of ``model`` is computed; ``precision`` is no, fp16 or bf16, as accelerate says."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, own)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Place(device.type, dtype, capability, is_replicated)


def describe_loss(kind: str, objective: Objective, asked: str, place: Place, obstacle: str | None = None) -> str:
    """A line about the loss that a run uses, why not in chunks, and about a faster one that is not installed."""
    ways = {"full": "all logits at once", "chunked": "never all logits, in chunks"}
    terms = [f"{name} {value:g}" for name, value in vars(objective).items() if value]
    why = [f"which the model needs: {obstacle}"] if obstacle else []
    how = ", ".join([ways.get(kind, "never all logits, by its package"), *why, *terms])
    # In bf16 on an H200 chunks took up to 1.85 × the time of all logits, Liger up to 1.28 ×.
    is_slow = (kind, asked, place.dtype) == ("chunked", "auto", torch.bfloat16)
    if is_slow and obstacle_to("liger", place, objective, installed=True) is None:
        how += "; faster here: pip install '.[liger]'"
    return f"loss: {kind}{' (auto)' if asked == 'auto' else ''}, {how}"
