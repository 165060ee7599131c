"""Data parallelism keeps equal weights on all ranks; a rank whose weights drift away from the others' is named."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from train.records import UserError, exchange

EVERY_STEPS = 100  # often enough to lose little, seldom enough to cost nothing


class Replicas:
    """The weights that every rank holds as a whole."""

    def __init__(self, model: nn.Module, num_processes: int) -> None:
        self._model, self._num_processes, self._compared = model, num_processes, 0

    def compare(self, step: int, is_saved: bool) -> None:
        """Raises UserError, on all ranks together, if one differs; looks before each save, and now and then."""
        if not is_saved and step - self._compared < EVERY_STEPS:
            return
        self._compared, digests = step, exchange(digest(list(self._model.parameters())), self._num_processes)
        usual, count = Counter(digests).most_common(1)[0]
        others = [rank for rank, own in enumerate(digests) if own != usual or 2 * count <= len(digests)]
        if others:
            raise UserError(
                f"step {step}: the weights of rank {', '.join(map(str, others))} differ from those of other ranks, and "
                "must not: a device or its memory may be faulty, or your code treats ranks differently. Nothing is "
                "saved; the newest checkpoint is from when all were equal."
            )


@torch.no_grad()
def digest(tensors: list[Tensor]) -> int:
    """A number made of all bits: a sum of integers is exact, in whatever order a device adds."""
    sums = []
    for tensor in tensors:
        there = tensor.contiguous()
        flat = (there.clone() if there.data_ptr() % 8 else there).view(-1).view(torch.uint8)
        whole = len(flat) // 8 * 8
        sums.append(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())
    return int(torch.stack(sums).sum())
