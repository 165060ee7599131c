"""An output embedding that can return the loss instead of the logits, and which models allow that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from train.extras.losses.chunked import chunked_sum
from train.extras.weightless import without_weights
from train.loss import logits_of


def obstacle_to_chunks(model: nn.Module) -> str | None:
    """Why the loss of ``model`` cannot come from its output embedding, or None where it can.

    A model may scale or cap what its output embedding gives; then it has to compute its logits itself. This is tried on
    eight tokens with a copy without weights. So it costs little, leaves the model and all generators alone, and gives
    the same answer on every device and process, with fake weights too.
    """
    if type(head_of(model)) not in (nn.Linear, LossHead):
        return "its output embedding is not a plain nn.Linear"
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second to import
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        # What a prediction counts, and the device that it builds on, do not matter here.
        with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            return _trial(without_weights(model).eval())
    except Exception as error:  # models fail in their own ways
        return f"trying it failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _trial(model: Any) -> str | None:
    """What :func:`obstacle_to_chunks` finds by running ``model``, a copy without weights."""
    if hasattr(model, "set_attn_implementation"):  # of transformers: what every device has, and looks at no value
        model.set_attn_implementation("eager")
        model.set_experts_implementation("batched_mm")
    head, given = head_of(model), []
    ids = head.weight.new_zeros((1, 8), dtype=torch.long)

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.append(chunked_sum(hidden, weight, bias, ids))
        return given[-1]

    LossHead.adopt(head)
    with head.answering(answer):
        out = logits_of(model(input_ids=ids))
    return None if len(given) == 1 and out is given[0] else "it changes the logits after its output embedding"


def head_of(model: nn.Module) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()


Answer: TypeAlias = Callable[..., Any]
"""Computed from hidden states (..., H), weight (V, H) and bias (V,) of an output embedding, and where these are only
those of a part of the classes, ``part``."""


class LossHead(nn.Linear):
    """An output embedding that can be asked for something else than its logits.

    It is computed within this module's forward, where sharded weights are gathered. Asked by one thread, other
    callers of the model get logits as ever.
    """

    answers: dict[int, Answer]
    part: Any
    """Which classes this rank computes, or None for all; weight and bias are then sharded DTensors."""

    @classmethod
    def adopt(cls, head: nn.Linear) -> None:
        """Makes ``head`` one of these, with the same weights and hooks."""
        head.__class__ = cls
        assert isinstance(head, cls)
        head.answers = {}
        head.part = getattr(head, "part", None)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Gives this thread's callers ``answer`` while the context is open."""
        thread = threading.get_ident()
        self.answers[thread] = answer
        try:
            yield
        finally:
            del self.answers[thread]

    def forward(self, input: Tensor) -> Any:
        answer = self.answers.get(threading.get_ident())
        if (part := self.part) is None:
            return super().forward(input) if answer is None else answer(input, self.weight, self.bias)
        if answer is None:
            return part.all_logits(input, self.weight, self.bias)
        return answer(input, _local(self.weight), _local(self.bias), part=part)


def _local(parameter: Any) -> Any:
    """This rank's part of a sharded parameter."""
    return None if parameter is None else parameter.to_local()
