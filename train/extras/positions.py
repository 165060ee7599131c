"""How many positions a model has."""

from __future__ import annotations

from torch import nn

LIMIT = "max_position_embeddings"  # transformers' name for it; -1: none


def skipped_positions(model: nn.Module) -> int:
    """How many rows of its table of positions a model never uses: RoBERTa's family counts from the padding's on."""
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    return max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)  # pyright: ignore
