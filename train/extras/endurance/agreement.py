"""How ranks with whole models agree whether a step worked, and average their gradients without any allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
        self.size, self.rank = accelerator.num_processes, accelerator.process_index
        self._group = None
        if self.size > 1:
            timeout = accelerator.init_handler.timeout if accelerator.init_handler is not None else None
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

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

    def room_for(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """(bytes,) uint8, enough for :meth:`average`; gives zeros to parameters without a gradient."""
        if self.size == 1:
            return torch.empty(0, dtype=torch.uint8)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        packed = [b for b in buckets([p.grad for p in parameters if p.grad is not None]) if not _is_sent_directly(b)]
        size_bytes = max((sum(g.nbytes for g in bucket) for bucket in packed), default=0)
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def average(self, gradients: Sequence[Tensor], room: Tensor) -> None:
        """Sets each gradient to its mean over the ranks, without allocating on the device.

        Args:
            gradients: as many, and of the same shapes, on every rank.
            room: of :meth:`room_for`.
        """
        if self.size == 1:
            return
        for bucket in buckets(gradients):
            if _is_sent_directly(bucket):
                dist.all_reduce(bucket[0].div_(self.size))
                continue
            flat = room[: sum(g.nbytes for g in bucket)].view(bucket[0].dtype)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            parts = [piece.view(gradient.shape) for piece, gradient in zip(pieces, bucket, strict=True)]
            torch._foreach_copy_(parts, bucket)
            dist.all_reduce(flat.div_(self.size))
            torch._foreach_copy_(bucket, parts)


def buckets(gradients: Sequence[Tensor], size_bytes: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Gradients in groups of one dtype and at most ``size_bytes``; a larger one alone."""
    done: list[list[Tensor]] = []
    filling: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        bucket = filling.get(gradient.dtype, [])
        if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > size_bytes:
            done.append(bucket)
            bucket = []
        filling[gradient.dtype] = [*bucket, gradient]
    return [*done, *filling.values()]


def _is_sent_directly(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()
