"""Run under torchrun by tests: steps in fp64 of given micro-batches on each rank; prints the noise scale."""

from __future__ import annotations

import json
import os
import sys

import torch
from accelerate import Accelerator
from test_noise import examples_of
from test_step import TinyModel, batch

from train.config import Config, Optimization
from train.extras.gradients.noise import NoiseScale
from train.extras.hardware import init_gloo
from train.launch import accelerator_options, read_launch
from train.model import ModelWithLoss
from train.step import Engine, optimizer_step


def main(parts: list[list[list[int]]], lengths: list[int]) -> None:
    """``parts``: [rank][micro-batch] lists of examples."""
    launch = read_launch()
    init_gloo(launch)
    accelerator = Accelerator(**accelerator_options(launch, torch.device("cpu")))
    torch.manual_seed(0)
    network = TinyModel().double()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.0))
    mine, examples = parts[launch.rank], examples_of(lengths)
    noise = NoiseScale(model, launch.world_size)
    engine = Engine(accelerator, Config(optimization=Optimization(max_grad_norm=0.1)), noise.mark)
    micro_batches = [batch([examples[i] for i in ids]) for ids in mine]
    for _ in range(2):  # what a step leaves behind must not change the next
        noise.begin(micro_batches)
        optimizer_step(engine, model, optimizer, micro_batches)
    found = noise.examples()
    if accelerator.is_main_process:
        print("noise scale:", json.dumps(found))


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)
