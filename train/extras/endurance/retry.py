"""What it takes to make a step again: ranks that agree whether it worked, and its start to go back to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch._utils import _take_tensors

from train.step import seed_generators

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20  # small gradients travel together in buckets as large as DistributedDataParallel's


class Ranks:
    """The processes of a run; made by all of them together.

    They agree over a gloo group of their own: on the host, where nothing that failed elsewhere can be pending.
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

        There are as many gradients, and of the same shapes, on every rank; ``room`` is that of :func:`room_for`.
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


def persistent_buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers that a checkpoint holds, such as BatchNorm's averages; others are constants or computed each time."""
    owned = ((module, name, buffer) for module in modules for name, buffer in module._buffers.items())
    return [b for module, name, b in owned if b is not None and name not in module._non_persistent_buffers_set]


class Start:
    """What a step begins with: generators that :func:`train.step.seed_step` has seeded, and persistent buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._seed = modules, torch.initial_seed()  # a number: reading numpy's state is slow
        self._buffers = [buffer.clone() for buffer in persistent_buffers(modules)]

    def restore(self) -> None:
        """Sets them as they were."""
        seed_generators(self._seed)
        with torch.no_grad():
            for buffer, value in zip(persistent_buffers(self._modules), self._buffers, strict=True):
                buffer.copy_(value)


class Writes:
    """Tells whether an update has written to weights, optimizer state or gradients since this object was made.

    torch's optimizers write through operations that count each tensor's versions. The fused ones do not count those
    of weights; but Adam's counts its ``step`` before any weight of the same group is written. Of others, and of
    optimizers from elsewhere, it is assumed. Fused AdamW allocates state for one group of parameters at a time, and
    updates that group before the next: a fault in a later group comes too late for another try.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counted = type(optimizer).__module__.startswith("torch.optim.") and (
            isinstance(optimizer, torch.optim.Adam) or not any(g.get("fused") for g in optimizer.param_groups)
        )
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._had_state = {id(p) for p, state in optimizer.state.items() if state}  # hashing a tensor takes longer
        self._versions = self._weight_and_state_versions()

    def _weight_and_state_versions(self) -> int:
        """Of all weights and tensors of the state, how often they were written; state that is new adds nothing."""
        states = (v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        return sum(tensor._version for tensor in (*self._weights, *states))

    def gradient_versions(self) -> list[int]:
        """How often each gradient was written."""
        return [p.grad._version for p in self._weights if p.grad is not None]

    def to_weights_or_state(self) -> bool:
        """Whether a weight, or state that was there before or begun since, may have changed."""
        return not self._counted or self._weight_and_state_versions() > self._versions

    def undone(self, gradient_versions: list[int]) -> bool:
        """Whether nothing is left of an update that failed: neither was written, nor gradients since those versions.

        Removes state that was begun and perhaps not finished: the optimizer would take it as complete.
        """
        if self.to_weights_or_state():
            return False
        for parameter in [p for p in self._optimizer.state if id(p) not in self._had_state]:
            del self._optimizer.state[parameter]
        return self.gradient_versions() == gradient_versions


def reset_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Forgets that gradients were unscaled, and keeps the scale."""
    if scaler is not None:
        scaler.update(new_scale=scaler.get_scale())
