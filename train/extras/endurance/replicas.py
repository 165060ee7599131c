"""Data parallelism keeps equal weights on all ranks; a rank whose weights drift away from the others' is named."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from train.records import UserError, exchange

EVERY_STEPS = 100  # often enough to lose little, seldom enough to cost nothing
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # integers of as many bytes


class Replicas:
    """The weights that every rank holds as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._compared = model, 0

    def compare(self, step: int, is_saved: bool) -> None:
        """Raises UserError, on all ranks together, if one differs; looks before each save, and now and then."""
        if not is_saved and step - self._compared < EVERY_STEPS:
            return
        self._compared, digests = step, exchange(digest(self._model.parameters()))
        usual, count = Counter(digests).most_common(1)[0]
        if others := [rank for rank, own in enumerate(digests) if own != usual or 2 * count <= len(digests)]:
            than = "those of other ranks" if len(others) < len(digests) else "each other"
            raise UserError(
                f"step {step}: the weights of rank {', '.join(map(str, others))} differ from {than}, and must not: a "
                "device or its memory may be faulty, your code may treat ranks differently, or a step left parameters "
                "without a gradient (--find_unused_parameters). Nothing is saved; older checkpoints had equal weights."
            )


def digest(tensors: Iterable[Tensor]) -> int:
    """A number made of all bits: a sum of integers is exact, in whatever order a device adds."""
    sums = []
    for flat in (tensor.detach().contiguous().view(-1) for tensor in tensors):
        fits = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
        sums.append(flat.view(torch.int64 if fits else BITS[flat.element_size()]).sum())  # the wide one 30 times faster
    return int(torch.stack(sums).sum())
