"""Stands in for bitsandbytes' AdamW8bit in predictions: its kernels cannot run on tensors without data."""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 256
SMALLEST = 4096
"""Elements from which on a parameter's moments take 8 bits."""


class EightBitState(torch.optim.Optimizer):
    """An optimizer whose step makes the state that the real one keeps, and changes nothing.

    On a card the real kernels need no other memory. Its CPU kernels take about 20 bytes per element of the parameter at
    work, which is not counted.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Makes the state of parameters that have a gradient and no state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                is_small = parameter.numel() < SMALLEST
                dtype, state = torch.float32 if is_small else torch.uint8, self.state[parameter]
                for moment in (1, 2):
                    state[f"state{moment}"] = torch.zeros_like(parameter, dtype=dtype)
                    if not is_small:
                        blocks = -(-parameter.numel() // BLOCK)
                        state[f"absmax{moment}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
