"""Cross-entropy over classes whose logits are spread over ranks: no rank ever sees those of another.

What has to be known of all classes is one number or two for each position: the largest logit, the sum of exponentials
and the logit of the label (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from train.records import IGNORE


class VocabularyPart:
    """The classes whose logits this rank computes: one of as many parts as there are ranks in ``mesh``."""

    def __init__(self, num_classes: int, mesh: DeviceMesh) -> None:
        self._mesh, self.num_classes = mesh, num_classes
        size = -(-num_classes // mesh.size())  # as DTensor cuts: the last part may be smaller
        self._first = min(mesh.get_local_rank() * size, num_classes)
        self._end = min(self._first + size, num_classes)

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) of ``labels``: the number within this part, 0 where it is not in it; and whether it is in it."""
        held = (labels >= self._first) & (labels < self._end)
        return (labels - self._first).masked_fill(~held, 0), held

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor``, now summed over the parts."""
        dist.all_reduce(tensor, group=self._mesh.get_group())
        return tensor

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(N,) −log p(label) from this part's logits (N, C), in fp32 or fp64; 0 where the label is IGNORE."""
        logits, largest, total = self._normalized(logits)
        classes, held = self.own(labels)
        of_label = logits.gather(1, classes.unsqueeze(1)).squeeze(1) - largest
        of_label = self.sum(of_label.masked_fill(~held, 0))
        return (total.log() - of_label).masked_fill(labels == IGNORE, 0)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """(N, C) log p of this part's classes, in fp32 or fp64."""
        logits, largest, total = self._normalized(logits)
        return logits - (largest + total.log()).unsqueeze(1)

    def argmax(self, logits: Tensor) -> Tensor:
        """(N,) the most probable class of all; of equal ones the first."""
        best, index = _wide(logits).max(1)
        candidate = torch.where(best == self._largest(best), index + self._first, self.num_classes)
        dist.all_reduce(candidate, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        return candidate

    def all_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., V) of all classes, on every rank, from ``hidden`` (..., H) and the whole, sharded ``weight``."""
        whole = DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)
        logits = F.linear(whole, weight, bias)
        assert isinstance(logits, DTensor)
        return logits.full_tensor()

    def _normalized(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits in full precision, the largest of all parts (N,), and Σ exp(logit − largest) (N,)."""
        logits = _wide(logits)
        largest = self._largest(logits.amax(1))
        return logits, largest, self.sum((logits - largest.unsqueeze(1)).exp_().sum(1))

    def _largest(self, values: Tensor) -> Tensor:
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        return largest


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
