"""How ranks with whole models agree whether a step worked, and average their gradients without any allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20
"""Small gradients travel together in buckets of this size, which is also that of DistributedDataParallel."""


class Ranks:
    """The processes of a run; made by all of them together.

    They agree over a gloo group of their own: the answer is needed on the host, and nothing that failed elsewhere can
    be pending there.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.size, self.rank, self._group = accelerator.num_processes, accelerator.process_index, None
        if self.size > 1:
            timeout = accelerator.init_handler.timeout if accelerator.init_handler is not None else None
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether some rank has it; as many flags on every rank."""
        if self._group is None:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        return [bool(vote) for vote in votes.tolist()]

    def first(self, own: T | None) -> T:
        """The value of the first rank that has one; at least one has."""
        everyone = [own]
        if self._group is not None:
            everyone = [None] * self.size
            dist.all_gather_object(everyone, own, group=self._group)
        return next(value for value in everyone if value is not None)

    def average(self, gradients: Sequence[Tensor], room: Tensor) -> None:
        """Sets each gradient to its mean over the ranks, without allocating on the device.

        Args:
            gradients: as many, and of the same shapes, on every rank.
            room: of :func:`room_for`.
        """
        for bucket, is_sent_directly in _buckets(gradients):
            if is_sent_directly:
                dist.all_reduce(bucket[0].div_(self.size))
                continue
            flat = room[: sum(g.nbytes for g in bucket)].view(bucket[0].dtype)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            parts = [piece.view(gradient.shape) for piece, gradient in zip(pieces, bucket, strict=True)]
            torch._foreach_copy_(parts, bucket)
            dist.all_reduce(flat.div_(self.size))
            torch._foreach_copy_(bucket, parts)


def room_for(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """(bytes,) uint8, enough for :meth:`Ranks.average`; gives zeros to parameters without a gradient."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    buckets = _buckets([p.grad for p in parameters if p.grad is not None])
    size_bytes = max((sum(g.nbytes for g in bucket) for bucket, directly in buckets if not directly), default=0)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], bool]]:
    """Gradients in groups of one dtype; a large one alone, which needs no copy to be sent."""
    for bucket in _take_tensors(gradients, BUCKET_BYTES):
        yield bucket, len(bucket) == 1 and bucket[0].is_contiguous()
