"""Every way to make a step makes the one of ``train/step.py``: break that one, and each of them shows it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from test_step import TinyModel, batch, largest_difference, rows
from torch import Tensor, nn

import train.step
from train.config import Config
from train.model import ModelWithLoss
from train.records import MicroBatch
from train.step import Engine, optimizer_step

Differences = dict[str, float]
CLIPPING, DIVISION, ZERO_GRAD, ERROR = "no clipping", "no division by the targets", "no zero_grad", "an error"
FAULTS = {
    CLIPPING: ("engine.clip(model)", "0.0"),
    DIVISION: ("engine.loss_factor / targets", "engine.loss_factor"),
    ZERO_GRAD: ("optimizer.zero_grad()", "pass"),
    ERROR: ('mark("forward")', "raise BrokenStepError"),
}
"""By what a line of the step is replaced."""
LEARNING_RATE = 0.1


class BrokenStepError(Exception):
    """Raised by a broken step."""


def broken(fault: str) -> Any:
    """While the context is open, the step is a broken one."""
    source, (line, other) = inspect.getsource(optimizer_step), FAULTS[fault]
    assert source.count(line) == 1
    names = {**vars(train.step), "BrokenStepError": BrokenStepError}
    exec(source.replace(line, other), names)
    return patch.object(train.step, "optimizer_step", names["optimizer_step"])


def global_batches() -> list[list[Tensor]]:
    """The examples of two steps, because a gradient that is left over counts in the second."""
    examples = [row.clamp(1) for row in rows([9, 4, 6, 3, 7, 5, 2, 8])]  # 0 is padding, which is not trained
    return [examples[:4], examples[4:]]


def micro_batches(examples: list[Tensor], number: int) -> list[MicroBatch]:
    size = len(examples) // number
    return [batch(examples[i : i + size]) for i in range(0, len(examples), size)]


def expected_weights(network: nn.Module, max_grad_norm: float | None) -> dict[str, Tensor]:
    """Weights after the steps in a few lines of torch, without anything of the template's step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    for examples in global_batches():
        logits = [network(example[None, :-1]) for example in examples]
        logits = [getattr(x, "logits", x)[0] for x in logits]
        losses = [nn.functional.cross_entropy(x, e[1:], reduction="sum") for x, e in zip(logits, examples, strict=True)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(len(e) - 1 for e in examples)).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
        optimizer.step()
    return network.state_dict()


def differences(
    take_steps: Callable[[float | None], None], weights: Callable[[], dict[str, Tensor]], plain: nn.Module, clips: bool
) -> Differences:
    """How far weights are from the expected ones: after real steps, and by fault; infinite for an error.

    Args:
        take_steps: called with ``max_grad_norm``.
        weights: the weights that it has reached; each fault begins where the one before it ended.
        plain: a model of the same kind.
        clips: whether the norm can be bounded.
    """
    found: Differences = {}
    bound = 0.1 if clips else None
    # Clipping would hide a wrong number of targets.
    steps = (("", bound), ("", None), (CLIPPING, bound), (ZERO_GRAD, None), (ERROR, None), (DIVISION, None))
    for fault, max_grad_norm in steps:
        plain.load_state_dict(weights())
        with broken(fault) if fault else nullcontext():
            try:
                take_steps(max_grad_norm)
                off = largest_difference(expected_weights(plain, max_grad_norm), weights())
                found[fault] = max(off, found.get(fault, 0.0))
            except BrokenStepError:
                found[fault] = math.inf
    return found


def assert_noticed(found: Differences, blind_to: tuple[str, ...] = (), exact: float = 1e-12) -> None:
    """The real step is right; every fault but some, which cannot change the result, makes it wrong."""
    assert {fault for fault, difference in found.items() if difference > exact} == set(FAULTS) - set(blind_to), found
    assert all(not exact < difference < 1e-2 for difference in found.values()), found


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


RECOVERING = Way("train.extras.endurance.recovery", "Recovering", wraps=True)
WAYS = {
    "plain": Way("train.step", "Engine"),
    # It frees each gradient as it uses it, so that none is left to set to zero, and no norm of all is known to clip by.
    "in backward": Way("train.extras.optimizers.in_backward", "InBackward", 1, (CLIPPING, ZERO_GRAD)),
    "recovering": RECOVERING,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_broken_step_is_noticed_in_every_way_to_make_it(way: Way) -> None:
    torch.manual_seed(0)
    accelerator, network = Accelerator(cpu=True), TinyModel().double()
    model, optimizer = accelerator.prepare(
        ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    )

    def take_steps(max_grad_norm: float | None) -> None:
        optimizer.optimizer.zero_grad()  # what a broken step has left
        engine = way.engine(accelerator, Config().changed(max_grad_norm=max_grad_norm))
        for examples in global_batches():
            assert not engine.step(model, optimizer, micro_batches(examples, way.micro_batches)).skipped

    found = differences(take_steps, network.state_dict, TinyModel().double(), CLIPPING not in way.blind_to)
    assert_noticed(found, way.blind_to)
