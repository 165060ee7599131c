"""Losses summed over targets, computed inside the model's forward.

The sum, not the mean: an optimizer step divides once by the number of targets of its whole global batch. Inside the
forward: the logits never leave it, so nothing casts them to fp32 a second time, gathers them or keeps them alive.

With a large vocabulary the logits are the largest tensor of a step. ``chunked`` never holds all of them: the model's
output embedding answers with the loss instead of the logits, some hundred tokens or more at a time, and computes each
chunk's logits once more in backward.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from train.errors import UserError
from train.records import IGNORE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.parallel.vocabulary import VocabularyPart

CHUNK_LOGITS_BYTES = 64 * 2**20
"""fp32 logits of one chunk: little beside weights and activations, enough for large matrix products."""

MIN_CHUNK_TOKENS = 512
"""A chunk reads the weight three times and adds to its gradient: some 18 bytes moved per element of it, for 8
operations per element and token. With fewer tokens a device that does 150 operations per byte would mostly wait."""

MIN_CHUNKED_CLASSES = 4096
"""From here on ``auto`` chunks; below, a position's logits are smaller than what the layers keep of it."""


class Scores(NamedTuple):
    """What an evaluation needs of one batch."""

    loss_sums: Tensor
    """(B,) summed loss of each example."""
    predictions: Tensor
    """(B, S) or (B,) the most probable class of each position."""


class ModelWithLoss(nn.Module):
    """``model`` and the cross-entropy of its logits as one module, which is what gets prepared and called.

    ``chunked`` needs a model that :func:`obstacle_to_chunks` finds nothing against.
    """

    def __init__(self, model: nn.Module, chunked: bool = False) -> None:
        super().__init__()
        self.model = model
        self.chunked = False
        if chunked:
            self.work_in_chunks()

    def tie_weights(self) -> None:
        """Makes the weights one again that the model shares between layers, after these were put in one by one."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()  # pyright: ignore[reportCallIssue]

    def work_in_chunks(self) -> None:
        """From now on never holds all logits."""
        _AnsweringHead.adopt(_head_of(self.model))
        self.chunked = True

    def split_classes(self, mesh: DeviceMesh) -> None:
        """From now on each rank of ``mesh`` holds the weights, and computes the logits, of its part of the classes.

        For a loss in chunks alone; ``mesh`` has one dimension, and all its ranks call the model with the same batch.
        """
        from train.parallel.vocabulary import VocabularyPart

        assert self.chunked
        head = _head_of(self.model)
        head.part = VocabularyPart(len(head.weight), mesh)

    def forward(
        self, inputs: dict[str, Tensor], labels: Tensor, scored: bool = False, num_targets: int | None = None
    ) -> Tensor | Scores:
        """The summed loss (), or with ``scored`` each example's loss and predictions.

        Args:
            inputs: keyword arguments of the model, ``input_ids: (B, S)`` among them.
            labels: (B, S) or (B,), aligned with the logits (B, S, C) or (B, C).
            num_targets: how many labels are targets, where the caller knows. With chunks and few targets the logits
                of the other positions are then not computed; counting here would wait for the device.
        """
        if self.chunked:
            answer = partial(chunked_sum, labels=labels, num_targets=num_targets)
            if scored:
                answer = partial(chunked_scores, labels=labels)
            with _head_of(self.model).answering(answer):
                return logits_of(self.model(**inputs))
        logits = logits_of(self.model(**inputs))
        if not scored:
            return cross_entropy_sum(logits, labels)
        losses = cross_entropy(logits, labels).view(labels.shape)
        return Scores(losses.reshape(len(labels), -1).sum(1), logits.argmax(-1))


def logits_of(output: Any) -> Any:
    """The logits of a model's output: a tensor, a mapping or an object that has them."""
    if isinstance(output, Tensor | Scores):
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


# Without holding all logits


def use_chunks(asked: str, model: nn.Module) -> bool:
    """Whether :class:`ModelWithLoss` is to work in chunks.

    Args:
        asked: ``full``, ``chunked``, or ``auto``: chunks where the model allows it and its classes are many.

    Raises:
        UserError: ``chunked`` does not work with this model.
    """
    if asked == "chunked" and (obstacle := obstacle_to_chunks(model)):
        raise UserError(f"loss: chunked does not work with this model: {obstacle}. Use auto or full.")
    if asked == "auto":
        many = isinstance(head := _head_of(model), nn.Linear) and len(head.weight) >= MIN_CHUNKED_CLASSES
        return many and obstacle_to_chunks(model) is None
    return asked == "chunked"


def obstacle_to_chunks(model: nn.Module) -> str | None:
    """Why the loss of ``model`` cannot come from its output embedding, or None where it can.

    A model may scale or cap what its output embedding gives: that has to be left to the model. Tried on eight tokens
    with a copy that has no weights, so it costs little, leaves the model and all generators alone, and comes out the
    same on every device and process, with fake weights too.
    """
    if type(_head_of(model)) not in (nn.Linear, _AnsweringHead):
        return "it has no output embedding that is a plain nn.Linear"
    from torch._subclasses.fake_tensor import FakeTensorMode  # here: it takes a second to import

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _trial(without_weights(model).eval())
    except Exception as error:  # models fail in their own ways
        return f"trying it failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _trial(model: Any) -> str | None:
    """What :func:`obstacle_to_chunks` finds by running ``model``, a copy without weights."""
    if hasattr(model, "set_attn_implementation"):  # of transformers: what every device has, and looks at no value
        model.set_attn_implementation("eager")
        model.set_experts_implementation("batched_mm")
    head, given = _head_of(model), []
    ids = head.weight.new_zeros((1, 8), dtype=torch.long)

    def answer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.append(chunked_sum(hidden, weight, bias, ids))
        return given[-1]

    _AnsweringHead.adopt(head)
    with head.answering(answer):
        out = logits_of(model(input_ids=ids))
    return None if len(given) == 1 and out is given[0] else "it changes the logits after its output embedding"


def _head_of(model: nn.Module) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()


def without_weights(model: nn.Module) -> Any:
    """The same modules with fake tensors of the same shapes, tied where they were tied; within a FakeTensorMode."""
    twins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        if (scales := getattr(tensor, "quant_state", None)) is not None:  # of weights in 4 bits: kept as they are
            twins[id(tensor)].quant_state = twins[id(scales)] = scales
    return copy.deepcopy(model, twins)


Answer: TypeAlias = Callable[..., Any]
"""Computed from hidden states (..., H), weight (V, H) and bias (V,) of an output embedding, and where these are only
those of a part of the classes, ``part``."""


class _AnsweringHead(nn.Linear):
    """An output embedding that can be asked for something else than its logits.

    It is computed within this module's forward, where sharded weights are gathered. Asked by one thread, other
    callers of the model get logits as ever.
    """

    answers: dict[int, Answer]
    part: VocabularyPart | None
    """Which classes this rank computes, where it does not compute all; weight and bias are then sharded DTensors."""

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


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_targets: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """() what :func:`cross_entropy_sum` says of the logits, which are never all there.

    Args:
        hidden: (B, S, H) what the output embedding is given.
        weight: (V, H) of the output embedding.
        bias: (V,) of the output embedding, if it has one.
        labels: (B, S).
        num_targets: how many labels are targets; None: not known.
        part: the classes that ``weight`` and ``bias`` are for, where these are not all.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if num_targets is not None and 2 * num_targets <= len(labels):  # else the copies cost more than they save
        targets = torch.nonzero_static(labels != IGNORE, size=num_targets).squeeze(1)
        hidden, labels = hidden.index_select(0, targets), labels.index_select(0, targets)
    one_chunk = len(labels) <= _tokens_per_chunk(len(weight))  # nothing to save by computing it twice
    if part is None and one_chunk:
        return cross_entropy_sum(F.linear(hidden, weight, bias), labels)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, part).sum()  # pyright: ignore


@torch.no_grad()
def chunked_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, part: VocabularyPart | None = None
) -> Scores:
    """Each example's loss and predictions; arguments as of :func:`chunked_sum`."""
    flat, targets, dtype = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), _product_dtype(hidden)
    losses = hidden.new_empty(targets.shape, dtype=_wide(dtype))
    predictions = torch.empty_like(targets)
    with _own_dtypes(hidden.device):
        for rows, logits in logits_by_chunk(flat, weight.to(dtype), _to(bias, dtype)):
            losses[rows] = (part.cross_entropy if part else cross_entropy)(logits, targets[rows])
            predictions[rows] = part.argmax(logits) if part else logits.argmax(-1)
            del logits
    return Scores(losses.view(len(labels), -1).sum(1), predictions.view(labels.shape))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """−log p(label) (N,) of hidden states (N, H); backward computes the logits again.

    Gradients are not prepared in forward, which would spare that: the gradient from above has to be applied before
    anything is rounded to half precision, or loss scaling would come too late.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, part: VocabularyPart | None
    ) -> Tensor:
        ctx.dtype = dtype = _product_dtype(hidden)
        ctx.part = part
        ctx.save_for_backward(hidden, weight, bias, labels)
        losses = hidden.new_empty(len(hidden), dtype=_wide(dtype))
        with _own_dtypes(hidden.device):
            for rows, logits in logits_by_chunk(hidden, weight.to(dtype), _to(bias, dtype)):
                losses[rows] = (part.cross_entropy if part else cross_entropy)(logits, labels[rows])
                del logits  # before the next chunk's
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, labels = ctx.saved_tensors
        dtype, wide, part = ctx.dtype, _wide(ctx.dtype), ctx.part
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if of_bias else None
        ignored = labels == IGNORE
        scales = grad_losses.masked_fill(ignored, 0).unsqueeze(1)
        classes, held = labels.masked_fill(ignored, 0), None
        if part is not None:
            classes, held = part.own(classes)
        classes = classes.unsqueeze(1)
        of_label = scales if held is None else scales * held.unsqueeze(1)
        with _own_dtypes(hidden.device):
            cast_weight = weight.to(dtype)
            for rows, logits in logits_by_chunk(hidden, cast_weight, _to(bias, dtype)):
                grad = part.softmax(logits) if part else torch.softmax(logits, -1, dtype=wide)
                grad.mul_(scales[rows])
                del logits
                grad.scatter_add_(1, classes[rows], -of_label[rows])
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = grad @ cast_weight
                if grad_weight is not None and dtype == wide:
                    grad_weight.addmm_(grad.T, hidden[rows].to(dtype))  # without a second tensor of its size
                elif grad_weight is not None:
                    grad_weight += grad.T @ hidden[rows].to(dtype)
                del grad
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        if part is not None and grad_hidden is not None:
            part.sum(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None


def _tokens_per_chunk(num_classes: int) -> int:
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS_BYTES // (4 * num_classes))


def rows_by_chunk(num_rows: int, num_classes: int) -> list[slice]:
    """The chunks that ``num_rows`` positions are cut into."""
    tokens = _tokens_per_chunk(num_classes)
    return [slice(start, start + tokens) for start in range(0, num_rows, tokens)]


def logits_by_chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Logits (C, V) of ``hidden`` (N, H), some rows at a time."""
    for rows in rows_by_chunk(len(hidden), len(weight)):
        yield rows, F.linear(hidden[rows].to(weight.dtype), weight, bias)


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """In which autocast, or else no autocast, would multiply ``hidden``."""
    device = hidden.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast and hidden.dtype != torch.float64 else hidden.dtype


def _own_dtypes(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast: which type each operation works in is said."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
