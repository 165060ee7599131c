"""Run under torchrun by tests: a few optimizer steps in fp64 as the launcher shards them, weights written by rank 0."""

from __future__ import annotations

import os
import sys
from typing import cast

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from test_step import TinyModel, batch, rows

from train.batching import Rounds, without_targets
from train.config import Config, Optimization
from train.extras.hardware import init_gloo
from train.launch import accelerator_options, read_launch
from train.model import ModelWithLoss
from train.records import BatchArithmetic
from train.state import TrainingState
from train.step import Engine, optimizer_step


def main(output: str, micro_batch_size: int) -> None:
    launch = read_launch()
    init_gloo(launch)
    accelerator = Accelerator(**accelerator_options(launch, torch.device("cpu")))
    torch.manual_seed(accelerator.process_index)  # ranks start from different weights: the first one's must count
    network = TinyModel().double()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
    engine = Engine(accelerator, Config(optimization=Optimization(max_grad_norm=0.5)))
    lengths = [9, 2, 5, 7, 3, 3, 8, 1, 6]
    examples = rows(lengths)
    norms = []
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [8]):  # the last window has fewer examples than there are ranks
        parts = Rounds().form(ids, [lengths[i] for i in ids], BatchArithmetic(micro_batch_size, 1, launch.dp_size))
        mine = [part[launch.rank // launch.mp_size] for part in parts]
        window = [batch([examples[i] for i in m]) if m else without_targets(batch([examples[0]])) for m in mine]
        outcome = optimizer_step(engine, model, optimizer, window)
        norms.append(outcome.grad_norm)
        assert outcome.num_targets == sum(lengths[i] for i in ids)
        assert outcome.clipped
    network = cast("ModelWithLoss", accelerator.unwrap_model(model)).model
    weights = TrainingState(network, optimizer, {}).whole_tensors(keep=accelerator.is_main_process)
    if accelerator.is_main_process:
        save_file({**weights, "norms": torch.tensor(norms, dtype=torch.float64)}, output)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
