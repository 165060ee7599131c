"""Run under torchrun by tests: fp64 steps of a small model that recomputes in several ways; rank 0 writes weights."""

from __future__ import annotations

import os
import sys
from typing import Any, cast

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from test_model import LLAMA, built
from test_recompute import LazyCopies, offloaded
from test_step import batch, rows

from train.batching import Rounds, without_targets
from train.config import Config, Optimization
from train.extras.activations import recompute, tiling
from train.extras.hardware import init_gloo
from train.launch import accelerator_options, read_launch, shard_by_layer
from train.model import ModelWithLoss
from train.records import BatchArithmetic
from train.state import TrainingState
from train.step import Engine, optimizer_step

TIED = {**LLAMA, "num_hidden_layers": 3, "tie_word_embeddings": True}
TILES: dict[str, Any] = {"tiled_mlp": True}
WAYS: dict[str, tuple[dict[str, Any], tuple[str, int] | None]] = {
    "plain": ({}, None),
    "tiled": (TILES, None),
    "all": (TILES, ("full", 1)),
    "selective": (TILES, ("selective", 2)),
}
"""Settings of the builder, and the checkpointing with which inputs rest elsewhere."""


def main(output: str, micro_batch_size: int, ways: list[str]) -> None:
    recompute.MIN_OFFLOADED_BYTES, recompute.PIECE_BYTES, tiling.MIN_TILE_TOKENS = 1, 4096, 2  # type: ignore
    launch = read_launch()
    init_gloo(launch)
    accelerator = Accelerator(**accelerator_options(launch, torch.device("cpu")))
    engine = Engine(accelerator, Config(optimization=Optimization(max_grad_norm=0.5)))
    lengths = [9, 2, 5, 7, 3, 3, 8, 1, 6]
    examples = rows(lengths)
    found: dict[str, torch.Tensor] = {}
    for way in ways:
        settings, checkpointing = WAYS[way]
        network, transfers = built(TIED, **settings).double(), LazyCopies()
        if checkpointing is not None:
            offloaded(network, transfers, *checkpointing)
        shard_by_layer(accelerator, network)
        accelerator._models.clear()
        model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
        norms = []
        for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [8]):  # the last window has fewer examples than there are ranks
            parts = Rounds().form(ids, [lengths[i] for i in ids], BatchArithmetic(micro_batch_size, 1, launch.dp_size))
            mine = [part[launch.rank // launch.mp_size] for part in parts]
            window = [batch([examples[i] for i in m]) if m else without_targets(batch([examples[0]])) for m in mine]
            outcome = optimizer_step(engine, model, optimizer, window)
            norms.append(outcome.grad_norm)
        assert bool(transfers.log) is (checkpointing is not None)
        unwrapped = cast("ModelWithLoss", accelerator.unwrap_model(model))
        weights = TrainingState(unwrapped.model, optimizer, {}).whole_tensors(keep=accelerator.is_main_process)
        found |= {f"{way}.{name}": value.clone() for name, value in weights.items()}
        found[f"{way}.norms"] = torch.tensor(norms, dtype=torch.float64)
    if accelerator.is_main_process:
        save_file(found, output)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","))
    sys.stdout.flush()
    os._exit(0)
