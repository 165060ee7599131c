"""A broken ``train/step.py`` is noticed by several ranks, however they divide the work."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from divided_step import small_model
from faults.processes import in_ranks
from parallel_run import run_of
from test_launch import PARALLEL
from test_one_step import (
    CLIPPING,
    LEARNING_RATE,
    RECOVERING,
    ZERO_GRAD,
    Differences,
    Way,
    assert_noticed,
    differences,
    global_batches,
    micro_batches,
)

from train import extras
from train.config import Config
from train.launch import Launch, read_launch, shard_by_layer
from train.model import ModelWithLoss
from train.state import TrainingState
from train.step import Engine

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
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
@pytest.mark.parametrize(
    "launch",
    [pytest.param(name, marks=[pytest.mark.slow] * (name.startswith("deepspeed") or "," in name)) for name in LAUNCHES],
)
def test_a_broken_step_is_noticed_by_every_kind_of_parallelism(launch: str, tmp_path: Path) -> None:
    environment, blind_to = LAUNCHES[launch]
    if "deepspeed" in launch:
        pytest.importorskip("deepspeed", exc_type=ImportError)
    in_ranks(partial(_step_on_a_rank, tmp_path / "found.json"), tmp_path, environment)
    for found in json.loads((tmp_path / "found.json").read_text()):
        assert_noticed(found, blind_to, exact=1e-5)


def _step_on_a_rank(output: Path, rank: int) -> int:
    """Called in each of two processes; the first writes the differences, with recovery too where it can recover."""
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
            assert (type(engine) is Engine) == (launch.engine == "ddp" and launch.mp_size == 1)
            engine = way.engine(accelerator, run.config) if way else engine
            for examples in global_batches():
                mine = examples[launch.rank // launch.mp_size :: launch.dp_size]
                assert not engine.step(model, optimizer, micro_batches(mine, 2)).skipped

        return differences(take_steps, partial(state.whole_tensors, keep=True), plain, clips)

    recovers = launch == Launch(2, rank) and "endurance" in extras.join().by_name
    found = [found_by(way) for way in [None, *[RECOVERING] * recovers]]
    if rank == 0:
        output.write_text(json.dumps(found))
    return 0
