"""The gradient noise scale tr(Σ) ÷ |G|² of arXiv 1812.06162, from gradients that a step computes anyway.

G is the mean gradient of one target and Σ its covariance. The mean over n targets has E|g|² = |G|² + tr(Σ) ÷ n, so the
norms at two sizes give both (appendix A.1): the global batch, and the first micro-batch of a rank.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from train.records import MicroBatch, exchange

MEMORY = 0.95  # of the moving means of |G|² and tr(Σ), per step: about the last 20 steps


def estimated(ratio: float, n_small: float, n_big: float) -> tuple[float, float]:
    """Unbiased (|G|², tr(Σ)) ÷ |g_big|², from ``ratio`` = |g_small|² ÷ |g_big|² and the numbers of targets."""
    return (n_big - n_small * ratio) / (n_big - n_small), (ratio - 1) / (1 / n_small - 1 / n_big)


class NoiseScale:
    """Estimates it over the steps of a run; nothing is read from the device until :meth:`examples`.

    Each step counts in units of its own |g_big|²: the large gradients of the first steps do not hide later ones, and a
    loss scale does not matter. Steps whose first micro-batch was split, for want of memory, are left out.
    """

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        self._parameters, self._ranks = [p for p in model.parameters() if p.requires_grad], num_ranks
        self._counts: list[tuple[int, int, int]] = []  # per step: targets of the first micro-batch, targets, examples
        self._ratios: list[Tensor] = []  # per step: () norm after the first ÷ norm of all, as backward left them
        self._unknown = torch.full((), math.nan, device=self._parameters[0].device)
        self._means = [0.0] * 4  # moving: |G|², tr(Σ), targets and examples of a step

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        targets = [batch.num_targets for batch in micro_batches]
        self._counts.append((targets[0], sum(targets), sum(len(batch.example_ids) for batch in micro_batches)))
        self._ratios.append(self._unknown)
        self._first, self._left = None, len(micro_batches)

    def mark(self, phase: str) -> None:
        if phase == "forward":
            self._left -= 1
            if self._first is None and any(p.grad is not None for p in self._parameters):
                self._first = _norm(self._parameters)
        elif phase == "clip" and self._first is not None and self._left == 0:
            self._ratios[-1] = self._first / _norm(self._parameters)

    def examples(self) -> float | None:
        """The noise scale as a number of examples; None: no step since the last call tells. By all ranks together."""
        before, ratios = self._means, torch.stack([self._unknown, *self._ratios]).tolist()[1:]
        for step in zip(*exchange(list(zip(self._counts, ratios, strict=True))), strict=True):
            total, examples = (sum(counts[i] for counts, _ in step) for i in (1, 2))
            # A rank's gradient is that of its sum of losses × ranks ÷ total, until it is averaged over ranks.
            found = [
                estimated((ratio * total / (self._ranks * n)) ** 2, n, total)
                for (n, _, _), ratio in step
                if 0 < n < total and 0 < ratio < math.inf
            ]
            if found:
                new = *(sum(values) / len(found) for values in zip(*found, strict=True)), total, examples
                self._means = [MEMORY * a + (1 - MEMORY) * b for a, b in zip(self._means, new, strict=True)]
        self._counts, self._ratios = [], []
        squared, trace, targets, examples = self._means
        return max(trace, 0.0) / squared * examples / targets if squared > 0 and self._means is not before else None


def _norm(parameters: Sequence[Tensor]) -> Tensor:
    """() the norm of all gradients, summed at least in fp32."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2.0, torch.promote_types(gradients[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))
