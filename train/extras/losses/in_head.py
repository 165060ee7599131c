"""The loss computed inside the output embedding, where hidden states and weight are, and which one a model gets."""

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
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
        terms = {"objective": self.objective} if self.objective != PLAIN else {}  # which cce does not know
        sums = {"chunked": chunked_sum, "cce": cce_sum, "liger": liger_sum}
        summed = partial(sums[self.kind], num_targets=num_targets, **terms)
        score, kept = partial(chunked_scores, softcap=self.objective.softcap), list[Any]()

        def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if (scale := self.objective.scale) != 1:
                hidden, bias = hidden * scale, bias if bias is None else bias * scale
            kept.append((score if scored else summed)(hidden, weight, bias, labels=labels))
            return kept[0].loss_sums if scored else kept[0]  # a tensor, which some models scale or cap like logits

        output = answered(model.model, inputs, answer)
        return kept[0] if scored else with_aux_loss(kept[0], output, labels, model.model)


def answered(model: nn.Module, inputs: Mapping[str, Any], answer: Callable[..., Tensor]) -> Any:
    """The output of ``model``, with ``answer(hidden (..., H), weight (V, H), bias (V,))`` in place of its logits."""
    with patch.object(_asked, "answer", answer, create=True):
        return model(**inputs)


def use_loss_in_head(model: ModelWithLoss, kind: str, objective: Objective = PLAIN) -> None:
    """Has ``model``, to which there is no :func:`obstacle_to_chunks`, use chunked, cce or liger from now on."""
    head_of(model.model).__class__ = LossHead
    model.loss_in_head = LossInHead(kind, objective)


def obstacle_to_chunks(model: nn.Module, objective: Objective = PLAIN) -> tuple[str | None, Objective]:
    """Why the loss of ``model`` cannot come from its output embedding, or None where it can: tried on eight tokens.

    If all that it does with logits is to scale or cap them, the second result is ``objective`` with how.
    """
    if type(head := head_of(model)) not in (nn.Linear, LossHead) or head._forward_hooks:
        return "its get_output_embeddings() returns no plain nn.Linear without hooks", objective
    found = [objective]

    def trial(twin: Any) -> str | None:
        head_of(twin).__class__ = LossHead
        inputs = inputs_on_trial(twin, head_of(twin).weight.new_zeros((1, 8), dtype=torch.long))
        points, how = torch.tensor([2.0**-20, -1.0, 3.0, -20.0, 2.0**30], device="cpu").double(), (1.0, 0.0)
        with suppress(Exception):  # a model may look at values, which are not there, in training alone
            how = _change_of(points.repeat(1, 8, 1), twin.train(), inputs)
        if how is None or how != _change_of(points[2].clone(), twin.eval(), inputs, how):  # a number, as a loss is
            return "it does more with its logits than to scale or cap them"
        found[0] = replace(objective, scale=how[0], softcap=how[1])
        return None

    return obstacle_on_trial(model, trial), found[0]


def _change_of(given: Tensor, twin: Any, inputs: dict[str, Any], how: Any = None) -> Any:
    """Scale and softcap, or ``how``, by which ``twin`` makes logits of those ``given``; None if it does more."""
    calls: list[Any] = []  # of its output embedding
    out = logits_of(output := answered(twin, inputs, lambda *head: (calls.append(head), given)[1]))
    more = [t for t in tree_leaves(output) if isinstance(t, Tensor) and not t.is_meta and t is not out]
    if len(calls) != 1 or given._version or (more and inputs["input_ids"].is_meta):
        return None  # such as in place, or with a loss that it makes of them
    if out is given:
        return 1.0, 0.0
    if how is None:
        low, *_, high = out[0, 0].tolist()  # of 2⁻²⁰ and 2³⁰
        scale = 1.0 if math.isclose(low, 2.0**-20, rel_tol=1e-6) else low * 2.0**20
        how = scale, high if high < 2.0**20 * scale else 0.0
    expected = how[1] * torch.tanh(given * (how[0] / how[1])) if how[1] else given * how[0]
    return how if torch.allclose(out.double(), expected, rtol=1e-6) else None


def choose_loss(
    asked: str, model: ModelWithLoss, place: Place, objective: Objective = PLAIN, installed: bool | None = None
) -> tuple[str, Objective, str | None]:
    """The loss that ``model`` will use, full, chunked, cce or liger, of what, and what it needs all logits for, if so.

    ``asked`` is one of these, or ``auto``: where the classes are many and the model allows it, the best that is there.
    Raises UserError if it does not work with this model or device, or its package is not ``installed`` (None: look).
    """
    classes = len(head.weight) if isinstance(head := head_of(model.model), nn.Linear) else 0
    if asked == "full" or (asked == "auto" and classes < MIN_CHUNKED_CLASSES):
        return "full", objective, None
    ce = model.loss_sum is cross_entropy_sum or isinstance(getattr(model.loss_sum, "__self__", 0), Objective)
    obstacle, objective = obstacle_to_chunks(model.model, objective) if ce else ("its task has its own loss", objective)
    if asked == "auto":
        return ("full" if obstacle else best_kernel(place, objective)), objective, obstacle
    if obstacle:
        raise UserError(f"loss: {asked} does not work with this model: {obstacle}. Use auto or full.")
    if obstacle := obstacle_to(asked, place, objective, installed):
        raise UserError(f"loss: {asked} {obstacle}.")
    return asked, objective, None


def place_of(model: nn.Module, device: torch.device, precision: str, is_replicated: bool = False) -> Place:
    """Where the loss of ``model`` is computed; ``precision`` is no, fp16 or bf16, as accelerate says."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, own)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Place(device.type, dtype, capability, is_replicated)


def describe_loss(kind: str, objective: Objective, asked: str, place: Place, obstacle: str | None = None) -> str:
    """A line about the loss that a run uses, why not in chunks, and about a faster one that is not installed."""
    ways = {"full": "all logits at once", "chunked": "never all logits, in chunks"}
    terms = [f"{name} {value:g}" for name, value in vars(objective).items() if value != getattr(PLAIN, name)]
    why = [f"which the model needs: {obstacle}"] if obstacle else []
    how = ", ".join([ways.get(kind, "never all logits, by its package"), *why, *terms])
    # In bf16 on an H200 chunks took up to 1.85 × the time of all logits, Liger up to 1.28 ×.
    is_slow = (kind, asked, place.dtype) == ("chunked", "auto", torch.bfloat16)
    if is_slow and obstacle_to("liger", place, objective, installed=True) is None:
        how += "; faster here: pip install '.[liger]'"
    return f"loss: {kind}{' (auto)' if asked == 'auto' else ''}, {how}"
