"""Context parallelism: which rank holds which positions, what is refused, and two gloo ranks against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from test_distributed import torchrun
from test_launch import sizes
from test_tensor_parallel import environment, model

from train.config import Config, from_values
from train.context_parallel import check_model, part_of, positions_of
from train.errors import UsageError, UserError
from train.launch import check_launch, read_launch
from train.records import IGNORE, MicroBatch

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def test_each_rank_holds_an_early_and_a_late_piece() -> None:
    assert positions_of(12, 0, 3).tolist() == [0, 1, 10, 11]
    assert positions_of(12, 2, 3).tolist() == [4, 5, 6, 7]
    work = [sum(position + 1 for position in positions_of(64, rank, 4).tolist()) for rank in range(4)]
    assert len(set(work)) == 1  # positions that each attends to


def test_the_parts_make_the_batch_whatever_its_length() -> None:
    ids = torch.arange(1, 15).view(2, 7)
    labels = torch.where(ids == 14, IGNORE, ids + 100)
    batch = MicroBatch({"input_ids": ids}, labels, 13, (4, 9), 13)
    parts = [part_of(batch, rank, 2) for rank in range(2)]
    assert [part.labels.shape for part in parts] == [(2, 4), (2, 4)]  # filled up from 7 to 8
    assert sum(part.num_targets for part in parts) == 13
    assert all(part.example_ids == (4, 9) for part in parts)
    seen = {}
    for part in parts:
        positions = part.inputs["position_ids"]
        assert positions.shape == (1, 4)
        for column, position in enumerate(positions[0].tolist()):
            seen[position] = (part.inputs["input_ids"][:, column].tolist(), part.labels[:, column].tolist())
    assert sorted(seen) == list(range(8))
    assert [seen[p][0] for p in range(7)] == ids.T.tolist()
    assert [seen[p][1] for p in range(7)] == labels.T.tolist()
    assert seen[7] == ([0, 0], [IGNORE, IGNORE])


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("mistral", {"sliding_window": 16}, "mistral cannot divide .* does not see all earlier positions"),
        ("gemma3_text", {"head_dim": 8}, "does not see all earlier positions .sliding_attention"),
        ("gpt_neox", {}, "not every layer has a causal self_attn"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout is 0\.1, not 0"),
        ("llama", {"attn_implementation": "eager"}, "attn_implementation is eager, not sdpa"),
    ],
)
def test_models_whose_sequences_cannot_be_divided(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(model(model_type, **fields))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2"])
def test_models_whose_sequences_can_be_divided(model_type: str) -> None:
    check_model(model(model_type))


@pytest.mark.parametrize(
    ("engine", "values", "message"),
    [
        ({}, {}, "the engine ddp does not go with parallelism_config_cp_size: 2 .* fsdp_version: 2"),
        (FSDP2, {"task": "masked_lm"}, "task: masked_lm .* causal_lm"),
        (FSDP2, {"attn_implementation": "eager"}, "attn_implementation: eager .* sdpa"),
        (FSDP2, {"micro_batch_size": "auto"}, "micro_batch_size: auto"),
    ],
)
def test_combinations_that_cannot_be(engine: dict[str, str], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_launch(read_launch({**sizes(2, cp=2), **engine}), from_values(values))


def test_the_launch_file_alone_is_accepted() -> None:
    check_launch(read_launch({**sizes(4, cp=2, dp_shard=2), **FSDP2}), Config())


@pytest.mark.distributed
def test_two_ranks_make_the_updates_of_plain_pytorch(tmp_path: Path) -> None:
    """In fp64, with AdamW and SGD, checkpointing, ragged lengths, and parts in which no target is left."""
    script, output = ROOT / "tests" / "divided_step.py", tmp_path / "found.json"
    done = torchrun(script, output, env={**environment(cp=2), **FSDP2})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found.pop("positions")  # accelerate's context parallelism on GPUs expects the same ones
    assert len(found) == 2
    for name, values in found.items():
        assert values["weights"] < 1e-12, name
        assert values["norm"] < 1e-12, name
        assert values["loss"] < 1e-5, name  # the loss that is shown is summed in fp32
        assert values["stopped"], name  # one rank was asked to
