"""Every way to make a step makes the one of ``train/step.py``: break that one, and each of them shows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from test_step import TinyModel, batch, largest_difference, rows
from torch import Tensor, nn

import train.step
from train.config import Config, Optimization
from train.loss import ModelWithLoss
from train.records import MicroBatch
from train.step import Engine

CLIPPING, DIVISION, ZERO_GRAD = "no clipping", "no division by the targets", "no zero_grad"


@dataclass(frozen=True)
class Way:
    """A way to make a step."""

    module: str
    name: str
    """Of the engine in ``module``."""
    micro_batches: int = 2
    """Of each step."""
    blind_to: tuple[str, ...] = ()
    """Faults that cannot change its result."""
    wraps: bool = False
    """Whether it is made around the plain engine."""

    def engine(self, accelerator: Accelerator, config: Config) -> Engine:
        made = getattr(pytest.importorskip(self.module, reason="its extra is not here"), self.name)
        return made(Engine(accelerator, config), lambda line: None) if self.wraps else made(accelerator, config)


WAYS = {
    "plain": Way("train.step", "Engine"),
    # It frees each gradient as it uses it, so that none is left to set to zero, and no norm of all is known to clip by.
    "in backward": Way("train.extras.optimizers.in_backward", "InBackward", 1, (CLIPPING, ZERO_GRAD)),
    "recovering": Way("train.extras.endurance.recovery", "Recovering", wraps=True),
}


def without_clipping(patch: pytest.MonkeyPatch) -> None:
    def norm_alone(engine: Engine, model: nn.Module) -> float:
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()

    patch.setattr(Engine, "clip", norm_alone)


def without_division(patch: pytest.MonkeyPatch) -> None:
    source, scale = inspect.getsource(train.step.optimizer_step), "engine.loss_scale / totals[0]"
    assert scale in source
    names = dict(vars(train.step))
    exec(source.replace(scale, "engine.loss_scale"), names)
    patch.setattr(train.step, "optimizer_step", names["optimizer_step"])


def without_zero_grad(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceleratedOptimizer, "zero_grad", lambda *args, **kwargs: None)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    CLIPPING: without_clipping,
    DIVISION: without_division,
    ZERO_GRAD: without_zero_grad,
}


def global_batches() -> list[list[Tensor]]:
    """The examples of two steps, because a gradient that is left over counts in the second."""
    examples = rows([9, 4, 6, 3, 7, 5, 2, 8])
    return [examples[:4], examples[4:]]


def config_of(way: Way, fault: str) -> Config:
    """A bound on the norm only where it is tested: it would hide a wrong number of targets."""
    is_clipped = fault == CLIPPING and CLIPPING not in way.blind_to
    return Config(optimization=Optimization(max_grad_norm=0.1 if is_clipped else None))


def expected_weights(max_grad_norm: float | None) -> dict[str, Tensor]:
    """Weights after the steps in a few lines of torch, without anything of the template's step."""
    torch.manual_seed(0)
    network = TinyModel().double()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    for examples in global_batches():
        losses = [nn.functional.cross_entropy(network(e[None, :-1])[0], e[1:], reduction="sum") for e in examples]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(len(e) - 1 for e in examples)).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
        optimizer.step()
    return network.state_dict()


def weights_after_steps(way: Way, config: Config) -> dict[str, Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    network = TinyModel().double()
    model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
    engine = way.engine(accelerator, config)
    for examples in global_batches():
        size = len(examples) // way.micro_batches
        micro_batches: list[MicroBatch] = [batch(examples[i : i + size]) for i in range(0, len(examples), size)]
        assert not engine.step(model, optimizer, micro_batches).skipped
    return network.state_dict()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_broken_step_is_noticed_in_every_way_to_make_it(
    way: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(WAYS[way], fault)
    expected = expected_weights(config.optimization.max_grad_norm)
    assert largest_difference(weights_after_steps(WAYS[way], config), expected) < 1e-12
    FAULTS[fault](monkeypatch)
    off = largest_difference(weights_after_steps(WAYS[way], config), expected)
    assert off < 1e-12 if fault in WAYS[way].blind_to else off > 1e-2


@pytest.mark.parametrize("way", WAYS)
def test_every_way_makes_its_steps_by_optimizer_step(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenStepError(Exception):
        pass

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise BrokenStepError

    monkeypatch.setattr(train.step, "optimizer_step", broken)
    with pytest.raises(BrokenStepError):
        weights_after_steps(WAYS[way], config_of(WAYS[way], ""))
