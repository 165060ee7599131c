"""The loss over a large vocabulary from an output embedding's input, some hundred tokens or more at a time; its terms.

With a large vocabulary the logits are the largest tensor of a step. Here only those of one chunk are ever there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from train.config import Config
from train.extras.device import product_dtype
from train.extras.losses import Options
from train.records import IGNORE
from train.tasks import Scores, cross_entropy

# fp32 logits of one chunk: little next to weights and activations, enough for large matrix products.
CHUNK_LOGITS_BYTES = 64 * 2**20
# A chunk reads the weight twice and adds to its gradient: some 16 bytes moved per element of it, for 6 operations per
# element and token. With fewer tokens a device that does 150 operations per byte would mostly wait.
MIN_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Objective:
    """For each target: (1 − ε) · −log p(label) + ε · mean of −log p over classes + z · log² Z, Z = Σ exp(logits)."""

    label_smoothing: float = 0.0  # ε (arXiv 1512.00567, section 7)
    z_loss: float = 0.0  # z; keeps logits from drifting (PaLM, arXiv 2204.02311, section 5, used 1e-4)
    scale: float = 1.0  # by which a model multiplies what its output embedding gives
    softcap: float = 0.0  # c, if it makes c · tanh(x / c) of that (Gemma 2, arXiv 2408.00118, section 2)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """() summed over the positions whose label is not IGNORE; the model has scaled and capped the logits."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # once for both terms
        loss = cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).masked_fill(labels == IGNORE, 0).square().sum()
        return loss


PLAIN = Objective()  # cross-entropy
How: TypeAlias = tuple[torch.dtype, Objective]  # the type of the matrix products, and what is summed


def objective_of(config: Config) -> Objective:
    own = config.of(Options)
    return Objective(own.label_smoothing, own.z_loss)


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_targets: int | None = None,
    objective: Objective = PLAIN,
) -> Tensor:
    """() what :meth:`Objective.loss_sum` says of the logits, which are never all there.

    For ``hidden`` (B, S, H), an output embedding of ``weight`` (V, H) and ``bias`` (V,), and ``labels`` (B, S).
    """
    hidden, labels = rows_to_compute(hidden, labels, num_targets)
    dtype = product_dtype(hidden)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    prepares = learns and dtype != torch.float16  # whose loss scale, known in backward alone, has to come first
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, (dtype, objective), prepares)  # type: ignore


@torch.no_grad()
def chunked_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float = 0.0) -> Scores:
    """Each example's cross-entropy and predictions; arguments as of :func:`chunked_sum`."""
    flat, classes, dtype = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), product_dtype(hidden)
    losses = hidden.new_empty(classes.shape, dtype=torch.promote_types(dtype, torch.float32))
    predictions = torch.empty_like(classes)
    with torch.autocast(hidden.device.type, enabled=False):  # each operation names its type
        for rows, logits in logits_by_chunk(flat, weight.to(dtype), to_dtype(bias, dtype), softcap):
            losses[rows], predictions[rows] = cross_entropy(logits, classes[rows]), logits.argmax(-1)
            del logits
    return Scores(losses.view(len(labels), -1).sum(1), predictions.view(labels.shape))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """() the summed loss of hidden states (N, H).

    Either the gradients are prepared in forward and multiplied by the gradient from above in backward: three matrix
    products, as with all logits. Or backward computes the logits again: four, but the factor is there in time. As the
    head's backward is the first thing in backward, what is prepared is not held longer than it would be otherwise.
    """

    @staticmethod
    def forward(  # fixed by torch
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: How, prepares: bool
    ) -> Tensor:
        ctx.how, ctx.prepares, tensors = how, prepares, (hidden, weight, bias)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        wanted = ctx.needs_input_grad[:3] if prepares else (False, False, False)
        loss, gradients = _in_chunks(tensors, labels, how, wanted)
        ctx.save_for_backward(*(gradients if prepares else (*tensors, labels)))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        if ctx.prepares:
            # In place: a second backward raises. One-dimensional: else it is rounded to the gradient's type first.
            gradients = [None if g is None else g.mul_(grad_loss.unsqueeze(0)) for g in ctx.saved_tensors]
        else:
            *tensors, labels = ctx.saved_tensors
            _, gradients = _in_chunks(tensors, labels, ctx.how, ctx.needs_input_grad[:3], grad_loss)
        return *(to_dtype(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def _in_chunks(
    tensors: Sequence[Any], labels: Tensor, how: How, wanted: Sequence[bool], scale: Tensor | float = 1.0
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The summed loss () and the gradients that are ``wanted``, times ``scale`` () before anything is rounded.

    Both are for ``tensors``: hidden states (N, H), weight (V, H) and bias (V,) or None. The gradients of weight and
    bias come in fp32 or better, that of the hidden states in their own type.
    """
    (hidden, weight, bias), (dtype, objective) = tensors, how
    wide = torch.promote_types(dtype, torch.float32)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    ignored = labels == IGNORE
    classes, loss = labels.masked_fill(ignored, 0), torch.zeros((), dtype=wide, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):  # each operation names its type
        cast_weight = weight.to(dtype)
        for rows, logits in logits_by_chunk(hidden, cast_weight, to_dtype(bias, dtype), objective.softcap):
            losses, grad = _of_chunk(logits, classes[rows], objective, any(wanted))
            del logits  # before the next chunk's
            loss += losses.masked_fill_(ignored[rows], 0).sum()
            if grad is None:
                continue
            grad.mul_(scale).masked_fill_(ignored[rows].unsqueeze(1), 0)  # not 0 × NaN
            if of_bias is not None:
                of_bias += grad.sum(0)
            grad = grad.to(dtype)
            if of_hidden is not None:
                of_hidden[rows] = grad @ cast_weight
            if of_weight is not None and dtype == wide:
                of_weight.addmm_(grad.T, hidden[rows].to(dtype))  # without a second tensor of its size
            elif of_weight is not None:
                of_weight += grad.T @ hidden[rows].to(dtype)
            del grad
    return loss, (of_hidden, of_weight, of_bias)


def _of_chunk(logits: Tensor, classes: Tensor, objective: Objective, learns: bool) -> tuple[Tensor, Tensor | None]:
    """(C,) losses of all positions of ``logits`` (C, V), and if it ``learns`` the gradient (C, V) of their sum.

    Both in fp32 or better, also of the positions that are not targets.
    """
    smoothing, z_loss, num_classes = objective.label_smoothing, objective.z_loss, logits.shape[1]
    log_p = torch.log_softmax(logits, -1, torch.promote_types(logits.dtype, torch.float32))
    column = classes.unsqueeze(1)
    log_p_of_label = log_p.gather(1, column).squeeze(1)
    losses = (smoothing - 1) * log_p_of_label
    if smoothing:
        losses -= smoothing / num_classes * log_p.sum(1)
    log_z = logits.gather(1, column).squeeze(1).to(log_p.dtype) - log_p_of_label if z_loss else None
    if log_z is not None:
        losses += z_loss * log_z.square()
    if not learns:
        return losses, None
    grad = log_p.exp_()
    if log_z is not None:
        grad.mul_((1 + 2 * z_loss * log_z).unsqueeze(1))
    grad.scatter_add_(1, column, torch.full_like(column, smoothing - 1, dtype=grad.dtype))
    if smoothing:
        grad.sub_(smoothing / num_classes)
    if objective.softcap:
        grad.addcmul_(grad, logits.div_(objective.softcap).square_(), value=-1)  # times the derivative of the tanh
    return losses, grad


def rows_to_compute(hidden: Tensor, labels: Tensor, num_targets: int | None) -> tuple[Tensor, Tensor]:
    """Hidden states (N, H) and labels (N,): of all positions, or of the targets where they are known to be few."""
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if num_targets is not None and 2 * num_targets <= len(labels):  # else the copies cost more than they save
        targets = torch.nonzero_static(labels != IGNORE, size=num_targets).squeeze(1)
        hidden, labels = hidden.index_select(0, targets), labels.index_select(0, targets)
    return hidden, labels


def rows_by_chunk(num_rows: int, num_classes: int) -> Iterator[slice]:
    tokens = max(MIN_CHUNK_TOKENS, CHUNK_LOGITS_BYTES // (4 * num_classes))
    return (slice(start, start + tokens) for start in range(0, num_rows, tokens))


def logits_by_chunk(hidden: Tensor, weight: Tensor, bias: Any, softcap: float) -> Iterator[tuple[slice, Tensor]]:
    """Logits (C, V) of ``hidden`` (N, H), some rows at a time."""
    for rows in rows_by_chunk(len(hidden), len(weight)):
        logits = [F.linear(hidden[rows].to(weight.dtype), weight, bias)]
        if softcap:
            logits[0].div_(softcap).tanh_().mul_(softcap)
        yield rows, logits.pop()  # of which nothing is held here


def to_dtype(tensor: Tensor | None, dtype: torch.dtype | None) -> Any:
    """``tensor`` of another type, or the None that it is."""
    return None if tensor is None else tensor.to(dtype)
