"""Model and optimizer of a job, built as a run builds them: on fake tensors to predict, on real ones to measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers.initialization import no_init_weights

from train import extras
from train.config import Config
from train.launch import Launch, accelerator_options, init_gloo, resolve_precision, shard_by_layer
from train.memory import ranks
from train.memory.fakes import fake_adapters
from train.memory.predict import Job
from train.model import build_model
from train.optim import build_optimizer, parameter_groups
from train.outputs import Outputs
from train.records import Run, StopRequest
from train.tasks import load_task


class _Tokenizer:
    """The part of a tokenizer that the builder uses."""

    def __init__(self, job: Job) -> None:
        self._size = job.vocab_size
        self.bos_token_id, self.eos_token_id, self.pad_token_id = job.special_tokens

    def __len__(self) -> int:
        return self._size


class EightBitState(torch.optim.Optimizer):
    """Stands in for bitsandbytes' AdamW8bit, whose kernels need data: makes the state that it keeps, changes nothing.

    On a card the real kernels need no other memory. Its CPU kernels take about 20 bytes per element of the parameter at
    work, which is not counted.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Makes the state of parameters that have a gradient and no state."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None or self.state[parameter]:
                continue
            state, blocks = self.state[parameter], -(-parameter.numel() // 256)  # each has a scale
            is_small = parameter.numel() < 4096  # then its moments stay in fp32
            for moment in (1, 2):
                state[f"state{moment}"] = torch.zeros_like(parameter, dtype=torch.float32 if is_small else torch.uint8)
                if not is_small:
                    state[f"absmax{moment}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)


def run_of(job: Job, config: Config) -> Run:
    """A run of ``config`` as rank 0 of the job's ranks sees it, before anything is built; nothing is written."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    device = torch.device(job.target.device_type)
    ranks.leave()  # those of the prediction before
    precision, _ = resolve_precision(config.optimization.mixed_precision or "no", device)
    shards = job.sharding in ranks.SHARDED_WEIGHTS
    if shards:
        ranks.join(job.world_size, device.type, precision, offloads=job.sharding == "fsdp2_offload")
    world_size, engine = (job.world_size, "fsdp2") if shards else (1, "ddp")
    launch = Launch(world_size, engine=engine, precision=precision)
    if device.type == "cpu":
        init_gloo(launch)
    accelerator = Accelerator(mixed_precision=precision, **accelerator_options(launch, device))
    outputs = Outputs(config, accelerator, is_silent=True)
    config = config.changed(max_length=job.length)
    return Run(config, launch, accelerator, extras.join(), outputs, StopRequest(), is_planned=True)


def build(job: Job, run: Run, initialised: bool = False) -> tuple[nn.Module, AcceleratedOptimizer, nn.Module]:
    """Prepared model, prepared optimizer, and the network inside the model.

    If ``initialised``, with real weights; not for fake ones, as some initialisations repeat until the data is right.
    """
    labels = [str(number) for number in range(job.num_labels)]
    tokenizer: Any = _Tokenizer(job)
    with ExitStack() as stack:
        if not initialised:
            stack.enter_context(run.accelerator.device)
            stack.enter_context(no_init_weights())
            stack.enter_context(fake_adapters(run.config.get("adapter", "none")))
        with_loss = build_model(run, load_task(job.task), tokenizer, labels, has_weights=False)
        with_loss.tie_weights()  # left out with the initialisation
    shard_by_layer(run.accelerator, with_loss.model)
    optim = run.config.optimization
    if optim.optimizer == "adamw_8bit" and not initialised:
        optimizer: Any = EightBitState(parameter_groups(with_loss.model, optim), {})
    else:
        optimizer = build_optimizer(run, with_loss.model)
    model, optimizer = run.accelerator.prepare(with_loss, optimizer, device_placement=[initialised] * 2)
    return model, optimizer, with_loss.model
