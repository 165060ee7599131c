"""What ``train.main.start`` makes, for scripts that test the step of several ranks without data and output folder."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from train import extras
from train.config import Config
from train.extras.hardware import init_gloo
from train.launch import Launch, accelerator_options
from train.records import Run, arithmetic_of

NEEDED = ("activations", "losses", "parallelism", "optimizers")
"""Extras that decide how a step is computed here; others would watch or guard it."""


def run_of(config: Config, launch: Launch) -> Run:
    """A run on CPUs in the precision of its weights; called before accelerate knows any state."""
    init_gloo(launch, timedelta(seconds=60))
    joined = extras.Extras({name: extra for name, extra in extras.join().by_name.items() if name in NEEDED})
    accelerator = Accelerator(
        gradient_accumulation_steps=arithmetic_of(config, launch.dp_size).accumulation_steps,
        mixed_precision="no",
        **accelerator_options(launch, torch.device("cpu")),
        **joined.merged("accelerator_options", config, launch),
    )
    outputs: Any = SimpleNamespace(note=lambda *lines: None)
    return Run(config, launch, accelerator, joined, outputs, [])
