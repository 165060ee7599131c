"""What costs a run speed without a word: waits for the device, fp32 products at full width."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from support import run_for
from test_losses import network
from test_step import TinyModel, batch, rows
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import Config, Optimization
from train.extras.activations.recompute import enable_checkpointing
from train.extras.losses.in_head import use_loss_in_head
from train.extras.meter.cards import peak_flops_per_second
from train.model import ModelWithLoss
from train.optim import build_optimizer
from train.records import MicroBatch
from train.step import Engine, optimizer_step

aten = torch.ops.aten
WAITS = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.is_nonzero,
    aten.equal,
    aten.unique_consecutive,
    aten._unique2,
)
"""Operators whose result the host has to know: on a GPU it waits for them."""


class Waits(TorchDispatchMode):
    """Counts operators that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed = func.overloadpacket in (aten.index, aten.index_put_, aten.index_put) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in WAITS or indexed:
            self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def window(size: int) -> list[MicroBatch]:
    return [batch(rows([9, 4]))] * size


def waits_of(network: nn.Module, size: int, loss: str = "full", **settings: Any) -> Counter[str]:
    run = run_for(Config(optimization=Optimization(**settings)))
    with_loss, optimizer = ModelWithLoss(network), build_optimizer(run, network)
    if loss != "full":
        use_loss_in_head(with_loss, loss)
    model, optimizer = run.accelerator.prepare(with_loss, optimizer)
    engine = Engine(run.accelerator, run.config)
    optimizer_step(engine, model, optimizer, window(1))  # the first makes the optimizer's state
    batches = window(size)
    with Waits() as waits:
        optimizer_step(engine, model, optimizer, batches)
    return waits.counts


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd", "max_grad_norm": None, "max_grad_value": 1.0}])
def test_a_step_waits_for_the_device_once_whatever_its_micro_batches(settings: dict[str, Any]) -> None:
    for size in (1, 4):
        assert waits_of(TinyModel(), size, **settings) == {"aten._local_scalar_dense": 1}


def test_a_loss_in_chunks_and_checkpointing_do_not_wait_but_transformers_does_once_a_forward() -> None:
    """It reads from positions that nobody gave whether sequences are packed."""
    for size in (1, 3):
        model = network("llama", torch.float32)
        enable_checkpointing(model, "full")
        assert waits_of(model, size, loss="chunked") == {"aten._local_scalar_dense": 1 + size}


def test_this_test_sees_waits() -> None:
    with Waits() as waits:
        x = torch.tensor([0.0, 1.0])
        x.sum().item()
        x[x > 0]
        bool((x > 0).any())
    assert waits.counts["aten._local_scalar_dense"] == 2
    assert waits.counts["aten.index"] + waits.counts["aten.nonzero"] >= 1


class WaitsInClip(Engine):
    """From the first forward to the gradient's norm a wait for the card is an error."""

    def clip(self, model: nn.Module) -> float:
        torch.cuda.set_sync_debug_mode("default")
        return super().clip(model)


@pytest.mark.gpu
def test_micro_batches_do_not_wait_for_the_card() -> None:
    accelerator = Accelerator()
    network = TinyModel()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
    batches = [micro_batch.pin_memory() for micro_batch in window(3)]
    engine = WaitsInClip(accelerator, Config())
    optimizer_step(engine, model, optimizer, batches)  # libraries start up
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer_step(engine, model, optimizer, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rate_of_tf32_is_that_of_the_data_sheets() -> None:
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops_per_second("NVIDIA GeForce RTX 4090", "tf32") == pytest.approx(82.6e12)
    assert peak_flops_per_second("Tesla V100-SXM2-16GB", "tf32") is None
