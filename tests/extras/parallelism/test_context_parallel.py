"""Context parallelism: which rank holds which positions, what is refused, and two gloo ranks against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoint_digests
from test_distributed import FSDP2, forked, killed_at_step_4
from test_fsdp2 import launched, run
from test_launch import sizes
from test_main import STEPS, trained_losses
from test_tensor_parallel import assert_same_course, environment, model
from torch import nn

from train.config import Config, from_values
from train.extras.parallelism import Extra
from train.extras.parallelism.sequences import ContextParallel, part_of, positions_of
from train.launch import read_launch
from train.model import ModelWithLoss
from train.records import EXIT_DONE, IGNORE, MicroBatch, UsageError, UserError


def prepare(network: nn.Module) -> None:
    unused: Any = None
    ContextParallel.prepare(unused, ModelWithLoss(network))


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
        ("mixtral", {"output_router_logits": True}, "experts are balanced over whole sequences"),
    ],
)
def test_models_whose_sequences_cannot_be_divided(model_type: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(model(model_type, **fields))


def test_inputs_that_cannot_be_divided_are_refused() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    batch = MicroBatch({"input_ids": ids, "token_type_ids": ids}, ids, 16, (0, 1), 16)
    with pytest.raises(UserError, match="input_ids, token_type_ids: use a task that gives only input_ids"):
        part_of(batch, 0, 2)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2", "mixtral"])
def test_models_whose_sequences_can_be_divided(model_type: str) -> None:
    prepare(model(model_type))


@pytest.mark.parametrize(
    ("engine", "values", "message"),
    [
        ({}, {}, "parallelism_config_cp_size: 2 .* cannot be combined with the engine ddp: use fsdp2, as"),
        (FSDP2, {"task": "masked_lm"}, "task: masked_lm: .*causal_lm"),
        (FSDP2, {"attn_implementation": "eager"}, "attn_implementation: eager: .*sdpa"),
        (FSDP2, {"packing": True}, r"packing: leave packing out, or use .*fsdp2\.yaml"),
    ],
)
def test_combinations_that_cannot_be(engine: dict[str, str], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Extra().check(from_values(values), read_launch({**sizes(2, cp=2), **engine}))


def test_the_launch_file_alone_is_accepted() -> None:
    Extra().check(Config(), read_launch({**sizes(4, cp=2, dp_shard=2), **FSDP2}))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_make_the_updates_of_plain_pytorch(tmp_path: Path) -> None:
    """In fp64, with AdamW and SGD, checkpointing, ragged lengths, and parts in which no target is left."""
    output = tmp_path / "found.json"
    done = forked("tests/extras/parallelism/divided_step.py", output, env={**environment(cp=2), **FSDP2})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found.pop("positions")  # accelerate's context parallelism on GPUs expects the same ones
    assert len(found) == 2
    for name, values in found.items():
        assert values["weights"] < 1e-12, name
        assert values["norm"] < 1e-12, name
        assert values["loss"] < 1e-5, name  # the loss that is shown is summed in fp32
        assert values["stopped"], name  # one rank was asked to


@pytest.mark.slow
@pytest.mark.distributed
def test_run_from_the_launch_file_equals_that_of_one_process(llama_recipe: Path, tmp_path: Path) -> None:
    """Ragged documents, evaluation with each example once, checkpointing of activations; ``final/`` is whole."""
    flags = ("--eval_every_steps", 2, "--eval_batch_size", 3, "--gradient_checkpointing", "selective")
    one, two = tmp_path / "one", tmp_path / "two"
    run("cpu", llama_recipe, one, *flags, processes=1)
    said = run("fsdp2_context_parallel", llama_recipe, two, *flags)
    assert "fsdp2, context parallel 2" in said
    assert "2 examples per micro-batch × 4 accumulated × 1 process = 8 per step" in said
    assert_same_course(one, two)


@pytest.mark.distributed
@pytest.mark.slow
def test_killed_and_resumed_is_exact(llama_recipe: Path, tmp_path: Path) -> None:
    flags = ("--save_every_steps", 1, "--save_total_limit", 9)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run("fsdp2_context_parallel", llama_recipe, whole, *flags)
    words = ("--config", llama_recipe, "--output_dir", pieces, *flags)
    killed = launched("fsdp2_context_parallel", *words, script=killed_at_step_4(tmp_path))
    assert killed.returncode != EXIT_DONE
    assert "resumed from" in run("fsdp2_context_parallel", llama_recipe, pieces, *flags)
    assert checkpoint_digests(whole, STEPS) == checkpoint_digests(pieces, STEPS)


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ring_attention_on_two_gpus_is_attention(llama_recipe: Path, tmp_path: Path) -> None:
    """In bf16, from the launch file as it stands, against one GPU."""
    flags = ("--mixed_precision", "bf16", "--max_steps", 4)
    one, two = tmp_path / "one", tmp_path / "two"
    run("single_gpu", llama_recipe, one, *flags, processes=1)
    run("fsdp2_context_parallel", llama_recipe, two, *flags)
    left, right = trained_losses(one), trained_losses(two)
    assert left.keys() == right.keys()
    for step, loss in left.items():
        assert right[step] == pytest.approx(loss, rel=2e-2)
