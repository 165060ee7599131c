"""A broken ``train/step.py`` is noticed where no weights are left to compare: its marks and errors are seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import causal_data, run_for
from test_one_step import CLIPPING, ERROR, BrokenStepError, broken, global_batches
from test_step import TinyModel, batch

from train.config import Config, to_values
from train.memory.predict import Job, Target
from train.memory.session import rehearse
from train.memory.trial import predict
from train.model import ModelWithLoss
from train.step import Engine

PHASES = ["forward", "backward", "clip", "optimizer"]


def test_a_broken_step_is_noticed_by_the_rehearsal() -> None:
    run = run_for(Config().changed(learning_rate=0.1))
    network, [[example, *_], _] = TinyModel(), global_batches()
    model, optimizer = run.accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
    marks: list[str] = []
    engine = Engine(run.accelerator, run.config, marks.append)
    data = causal_data(run.config, validation=[2])
    parts: Any = SimpleNamespace(model=model, optimizer=optimizer, engine=engine, data=data)
    rehearse(run, parts, [batch([example])])
    assert marks == PHASES
    with broken(ERROR), pytest.raises(BrokenStepError):
        rehearse(run, parts, [batch([example])])


def test_a_broken_step_is_noticed_by_the_prediction() -> None:
    """Clipping has memory of its own; numbers have none, and gradients that are left count in no first step."""
    fields = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
    values = {**to_values(Config()), "model_config": fields, "tokenizer": "bytes"}
    job = Job(values, Target("cpu"), vocab_size=300, micro_batch_size=1, length=8)
    assert list(predict(job).peak_bytes_by_phase) == PHASES
    with broken(CLIPPING):
        assert "clip" not in predict(job).peak_bytes_by_phase
    with broken(ERROR), pytest.raises(BrokenStepError):
        predict(job)
