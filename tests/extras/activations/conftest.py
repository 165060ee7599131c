"""Settings of the tests of what layers keep."""

from __future__ import annotations

import pytest

from train.extras.activations import recompute, tiling


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are offloaded too, and take several pieces of pinned memory; tiles have few tokens."""
    monkeypatch.setattr(recompute, "MIN_OFFLOADED_BYTES", 1)
    monkeypatch.setattr(recompute, "PIECE_BYTES", 4096)
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 30)
