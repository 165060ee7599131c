"""Run by ``test_deepspeed.py`` under torchrun: optimizer steps with or without DeepSpeed; writes outcomes and weights.

The last window is shorter than the others and gives one of two ranks no example, one gradient is not finite, and the
learning rate changes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from parallel_run import run_of
from safetensors.torch import save_file
from test_step import TinyModel, batch, rows
from torch import Tensor

from train.batching import Rounds, without_targets
from train.config import Config, Optimization
from train.launch import read_launch
from train.model import ModelWithLoss
from train.records import BatchArithmetic, MicroBatch
from train.state import TrainingState
from train.step import Engine, optimizer_step

LENGTHS = [9, 2, 5, 7, 3, 3, 8, 1, 6]
WINDOWS = ([0, 1, 2, 3], [4, 5, 6, 7], [1, 3, 5, 7], [8])
NOT_FINITE = 2
"""The window whose gradient is made not finite, on the last rank."""
OPTIMIZATION = Optimization(micro_batch_size=1, global_batch_size=4, max_grad_norm=0.5, learning_rate=1.0)


class Poisoned(TinyModel):
    """Multiplies its logits by ``factor``."""

    factor = 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.factor


def main(output: str, engine: str) -> None:
    if engine != "plain":
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO_STAGE=engine[-1])
    launch = read_launch()
    run = run_of(Config(optimization=OPTIMIZATION), launch)
    accelerator = run.accelerator
    torch.manual_seed(0)
    network = Poisoned()
    with_loss = ModelWithLoss(network)
    run.extras.each("change_loss", run, with_loss)
    built = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    model, optimizer = accelerator.prepare(with_loss, built)
    state = run.extras.first("state", network, optimizer.optimizer, {}, None) or TrainingState(network, built, {})
    steps = run.extras.pipe("wrap_step", run, Engine(accelerator, run.config))
    assert (type(steps) is Engine) == (type(state) is TrainingState) == (engine == "plain")

    outcomes = []
    examples = rows(LENGTHS)
    for number, ids in enumerate(WINDOWS):
        parts = Rounds().form(ids, [LENGTHS[i] for i in ids], BatchArithmetic(1, 1, launch.world_size))
        window = [micro_batch(examples, part[launch.rank]) for part in parts]
        for group in optimizer.param_groups:
            group["lr"] = 1.0 / (number + 1)
        network.factor = float("nan") if number == NOT_FINITE and launch.rank == launch.world_size - 1 else 1.0
        outcome = optimizer_step(steps, model, optimizer, window, stop_requested=launch.rank == number == 1)
        plain = replace(outcome, loss_sum=torch.zeros(()), grad_norm=float(outcome.grad_norm))
        outcomes.append({**vars(plain), "loss_sum": outcome.loss_sum.item()})
    weights = state.whole_tensors(keep=accelerator.is_main_process)
    Path(f"{output}-{launch.rank}.json").write_text(json.dumps(outcomes))
    if accelerator.is_main_process:
        save_file({name: t.contiguous() for name, t in weights.items()}, f"{output}.safetensors")


def micro_batch(examples: list[Tensor], ids: list[int]) -> MicroBatch:
    return batch([examples[i] for i in ids]) if ids else without_targets(batch([examples[0]]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
