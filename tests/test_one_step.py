"""Every way to make a step makes the one of ``train/step.py``: break that one, and each of them shows it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from faults.processes import in_ranks
from support import run_for
from test_distributed import FSDP2
from test_launch import PARALLEL
from test_step import TinyModel, batch, largest_difference, rows
from torch import Tensor, nn

import train.step
from train import extras
from train.config import Config, to_values
from train.launch import Launch, read_launch, shard_by_layer
from train.loss import ModelWithLoss
from train.records import MicroBatch
from train.state import TrainingState
from train.step import Engine, optimizer_step

Differences = dict[str, float]
CLIPPING, DIVISION, ZERO_GRAD, ERROR = "no clipping", "no division by the targets", "no zero_grad", "an error"
FAULTS = {
    CLIPPING: ("engine.clip(model)", "0.0"),
    DIVISION: ("engine.loss_scale / totals[0]", "engine.loss_scale"),
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


# One process


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


# Steps that leave no weights to compare: marks and errors show which step it is


PHASES = ["forward", "backward", "clip", "optimizer"]


def test_a_broken_step_is_noticed_by_the_rehearsal() -> None:
    rehearsal = pytest.importorskip("train.memory.rehearsal", reason="its extra is not here")
    run = run_for(Config().changed(learning_rate=0.1))
    network, [[example, *_], _] = TinyModel(), global_batches()
    model, optimizer = run.accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
    marks: list[str] = []
    data = SimpleNamespace(examples=SimpleNamespace(validation=[]), evaluation_batches=lambda run, examples: iter([]))
    engine = Engine(run.accelerator, run.config, marks.append)
    parts: Any = SimpleNamespace(model=model, optimizer=optimizer, engine=engine, data=data)
    rehearsal.rehearse(run, parts, [batch([example])])
    assert marks == PHASES
    with broken(ERROR), pytest.raises(BrokenStepError):
        rehearsal.rehearse(run, parts, [batch([example])])


def test_a_broken_step_is_noticed_by_the_prediction() -> None:
    """Clipping has memory of its own; numbers have none, and gradients that are left count in no first step."""
    memory = pytest.importorskip("train.memory.predict", reason="its extra is not here")
    fields = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    values = {**to_values(Config()), "model_config": fields, "tokenizer": "bytes"}
    job = memory.Job(values, memory.Target("cpu"), "causal_lm", vocab_size=300, micro_batch_size=1, length=8)
    assert list(memory.predict(job).peak_bytes_by_phase) == PHASES
    with broken(CLIPPING):
        assert "clip" not in memory.predict(job).peak_bytes_by_phase
    with broken(ERROR), pytest.raises(BrokenStepError):
        memory.predict(job)


# Several processes


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
# DeepSpeed clips while it updates, by a bound in its own settings, and sets gradients to zero there.
BY_DEEPSPEED = (CLIPPING, ZERO_GRAD)
LAUNCHES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "data parallel": ({}, ()),
    "tensor parallel": ({**PARALLEL, "PARALLELISM_CONFIG_TP_SIZE": "2"}, ()),
    "fsdp2, context parallel": ({**FSDP2, **PARALLEL, "PARALLELISM_CONFIG_CP_SIZE": "2"}, ()),
    "deepspeed": (DEEPSPEED, BY_DEEPSPEED),
    "deepspeed, ulysses": ({**DEEPSPEED, **PARALLEL, "PARALLELISM_CONFIG_SP_SIZE": "2"}, BY_DEEPSPEED),
}
"""What the launcher tells two processes, and the faults that cannot change the result."""


@pytest.mark.distributed
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_broken_step_is_noticed_by_every_kind_of_parallelism(launch: str, tmp_path: Path) -> None:
    environment, blind_to = LAUNCHES[launch]
    if environment:
        pytest.importorskip("train.extras.parallelism", reason="its extra is not here")
    if "deepspeed" in launch:
        pytest.importorskip("deepspeed", exc_type=ImportError)
    in_ranks(partial(_step_on_a_rank, tmp_path / "found.json"), tmp_path, environment)
    for found in json.loads((tmp_path / "found.json").read_text()):
        assert_noticed(found, blind_to, exact=1e-5)


def _step_on_a_rank(output: Path, rank: int) -> int:
    """Called in each of two processes; the first writes the differences, with recovery too where it can recover."""
    from extras.parallelism.divided_step import small_model
    from extras.parallelism.parallel_run import run_of

    torch.set_num_threads(1)
    launch = read_launch()
    config = Config().changed(max_grad_norm=None, micro_batch_size=2 // launch.dp_size, global_batch_size=4)
    run = run_of(config, launch)
    accelerator, clips = run.accelerator, launch.engine != "deepspeed"
    dtype = torch.float64 if clips else torch.float32
    plain = small_model("llama", attn_implementation="eager").to(dtype)  # Ulysses changes sdpa for all models

    def found_by(way: Way | None) -> Differences:
        with_loss = ModelWithLoss(network := small_model("llama").to(dtype))
        run.extras.each("change_loss", run, with_loss)
        shard_by_layer(accelerator, network)
        accelerator._models.clear()
        model, optimizer = accelerator.prepare(with_loss, torch.optim.SGD(network.parameters(), lr=LEARNING_RATE))
        state = run.extras.first("state", network, optimizer.optimizer, {}, None)
        state = state or TrainingState(network, optimizer, {})

        def take_steps(max_grad_norm: float | None) -> None:
            model.zero_grad()
            run.config = config.changed(max_grad_norm=max_grad_norm)
            engine = run.extras.pipe("wrap_step", run, Engine(accelerator, run.config))
            assert (type(engine) is Engine) == (launch.engine == "ddp" and launch.copies == 1)
            engine = way.engine(accelerator, run.config) if way else engine
            for examples in global_batches():
                mine = examples[launch.dp_rank :: launch.dp_size]
                assert not engine.step(model, optimizer, micro_batches(mine, 2)).skipped

        return differences(take_steps, partial(state.whole_tensors, keep=True), plain, clips)

    recovers = launch == Launch(2, rank) and "endurance" in extras.join().by_name
    found = [found_by(way) for way in [None, *[RECOVERING] * recovers]]
    if rank == 0:
        output.write_text(json.dumps(found))
    return 0
