"""Settings of the tests of what layers keep."""

from __future__ import annotations

import pytest

from train.extras.activations import recompute, tiling


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are offloaded too; tiles have few tokens."""
    monkeypatch.setattr(recompute, "MIN_OFFLOADED_BYTES", 1)
    monkeypatch.setattr(tiling, "MIN_TILE_TOKENS", 30)
