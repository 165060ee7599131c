"""AdamW whose moments take a byte each, block by block of 256 (arXiv 2110.02861), by bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit; parameters of fewer than 4,096 elements keep fp32 moments, as it chooses.

    Args:
        groups: parameters and their weight decay.
        settings: ``lr``, ``betas``, ``eps``.
    """
    from bitsandbytes.optim import AdamW8bit

    class EightBitAdamW(AdamW8bit):
        """Keeps the two tables of 256 values, which all parameters share, out of every parameter's state."""

        def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            state = self.state[p]
            if state["state1"].dtype == torch.uint8:
                tables = {name: self.name2qmap[name].to(p.device) for name in ("dynamic", "udynamic")}
                self.name2qmap.update(tables)
                state.update(qmap1=tables["dynamic"], qmap2=tables["udynamic"])
            super().update_step(group, p, gindex, pindex)
            for name in ("qmap1", "qmap2"):
                state.pop(name, None)

    return EightBitAdamW(groups, **settings)
