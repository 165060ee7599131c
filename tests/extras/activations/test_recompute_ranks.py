"""Offloaded inputs and tiled MLPs on two CPU processes, under DDP and FSDP2: the updates of one process without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import ENVIRONMENT, FSDP2, forked

pytestmark = pytest.mark.distributed
WAYS = ("tiled", "all", "selective")


def steps(output: Path, micro_batch_size: int, processes: int, ways: str, engine: dict[str, str]) -> dict:
    words = ("tests/extras/activations/recompute_step.py", output, micro_batch_size, ways)
    done = forked(*words, processes=processes, env={**ENVIRONMENT, **engine})
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(output)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    found = steps(tmp_path_factory.mktemp("one") / "steps", 4, 1, "plain", {})
    return {name.removeprefix("plain."): value for name, value in found.items()}


@pytest.mark.parametrize("engine", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_two_ranks_make_the_update_of_one_that_keeps_everything(
    plain: dict[str, torch.Tensor], tmp_path: Path, engine: dict[str, str]
) -> None:
    """Accumulated, ragged, tied; with tiles alone, and with tiles, recomputation and offload."""
    found = steps(tmp_path / "two", 1, 2, ",".join(WAYS), engine)
    assert len(plain) > 20
    for way in WAYS:
        for name, value in plain.items():
            assert (found[f"{way}.{name}"] - value).abs().max().item() < 1e-10, (way, name)
