"""DeepSpeed's own configuration: made from both sides, which must agree. Needs no DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import datasets
import pytest
import torch
from support import run_for
from transformers import AutoModelForCausalLM, LlamaConfig

from train.batching import Loading
from train.config import Architecture, Config, Data, Optimization
from train.data import PreparedData
from train.extras.parallelism import Extra
from train.extras.parallelism.deepspeed_engine import DeepSpeed, deepspeed_plugin, engine_settings
from train.extras.parallelism.sequences import Ulysses, part_of_sequences
from train.launch import Launch
from train.records import IGNORE, MicroBatch, UsageError, UserError
from train.step import Engine

TWO = Launch(world_size=2, engine="deepspeed")
SEQUENCES = replace(TWO, sp_size=2)
SHAPE = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=8)
SHAPE.num_key_value_heads = 2


def settings(launch: Launch = TWO, dtype: str = "float32", attention: str | None = None, **given: Any):
    """Of a run of 2 examples × 4 accumulated; ``given`` in capitals is the launch file's, the rest the recipe's."""
    environment = {f"ACCELERATE_{name}": str(value) for name, value in given.items() if name.isupper()}
    environment["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"
    optimization = {name: value for name, value in given.items() if not name.isupper()}
    config = Config(
        architecture=Architecture(dtype=cast("Any", dtype), attn_implementation=attention),
        optimization=Optimization(**{"micro_batch_size": 2, "gradient_accumulation_steps": 4, **optimization}),  # type: ignore
    )
    with patch.dict(os.environ, environment):
        return engine_settings(config, launch)


def test_launch_file_gives_the_stage_and_the_recipe_the_clipping() -> None:
    made = settings(DEEPSPEED_ZERO_STAGE=3, DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu", max_grad_norm=0.25)
    assert made["gradient_clipping"] == 0.25
    assert made["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
    }
    assert "communication_data_type" not in made
    assert settings(max_grad_norm=None)["gradient_clipping"] == 0.0


def test_gradients_of_half_precision_are_summed_in_fp32() -> None:
    for made in (settings(mixed_precision="bf16"), settings(replace(TWO, precision="fp16"))):
        assert made["communication_data_type"] == "fp32"
        assert made["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"GRADIENT_ACCUMULATION_STEPS": "8"}, r"gradient_accumulation_steps: 8 in the launch file, .*: 4"),
        ({"GRADIENT_CLIPPING": "0.5"}, r"gradient_clipping: 0\.5 in the launch file, max_grad_norm: 1\.0"),
        ({"GRADIENT_CLIPPING": "1", "max_grad_norm": None}, r"max_grad_norm: 0\.0"),
        ({"DEEPSPEED_ZERO_STAGE": "1"}, r"zero_stage: 1"),
        ({"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, r"offload_param_device: cpu .* only stage 3"),
        ({"DEEPSPEED_ZERO3_INIT": "true"}, r"zero3_init_flag: true"),
        ({"DEEPSPEED_CONFIG_FILE": "ds.json"}, r"deepspeed_config_file: ds\.json: leave it out: .*launch file"),
        ({"DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, r"offload_optimizer_device: nvme"),
        ({"max_grad_value": 0.1, "max_grad_norm": None}, r"max_grad_value: 0\.1: .*clips by the 2-norm"),
        ({"grad_norm_type": "inf"}, r"grad_norm_type: inf"),
        ({"dtype": "bfloat16"}, r"dtype: bfloat16"),
        ({"launch": SEQUENCES, "attention": "flash_attention_2"}, r"sp_attn_implementation: sdpa in .*: flash_att"),
    ],
)
def test_what_cannot_work_stops_the_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings(**given)


@pytest.mark.parametrize(
    ("launch", "config", "message"),
    [
        (
            replace(SEQUENCES, engine="fsdp2"),
            Config(),
            r"parallelism_config_sp_size: 2 .* cannot be combined with the engine fsdp2",
        ),
        (SEQUENCES, Config(data=Data(task="masked_lm")), r"sp_size: 2 .*cannot be combined with task: masked_lm"),
        (SEQUENCES, Config().changed(attn_implementation="eager"), r"attn_implementation: eager: use sdpa"),
        (
            SEQUENCES,
            Config().changed(global_batch_size=8, max_tokens_per_micro_batch=2048),
            r"sp_size: 2 .* cannot be combined with max_tokens_per_micro_batch: 2048: give micro_batch_size",
        ),
    ],
)
def test_sequences_are_shared_by_deepspeed_for_causal_models(launch: Launch, config: Config, message: str) -> None:
    Extra().check(Config(), SEQUENCES)
    with pytest.raises(UsageError, match=message):
        Extra().check(config, launch)


def test_ranks_that_share_sequences_evaluate_different_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[list[list[int]]] = []
    monkeypatch.setattr("train.data.load", lambda examples, loading, id_lists, seed: parts.append(list(id_lists)))
    data: Any = PreparedData(*[None] * 4, loading=Loading(print))  # type: ignore
    rows = datasets.Dataset.from_dict({"length": [9, 8, 7, 6]})
    for launch in (replace(SEQUENCES, world_size=4, rank=3), replace(TWO, tp_size=2, rank=1)):
        data.evaluation_batches(run_for(Config(), launch=launch), rows)
    assert parts == [[[3]], [[0], [1], [2], [3]]]


def test_want_of_deepspeed_is_said_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(UserError, match=r"pip install -e '\.\[deepspeed\]'"):
        deepspeed_plugin(Config(), TWO)


def fake(stage: int = 2, training: bool = True) -> Any:
    """An accelerator of rank 3 of 4 with a DeepSpeed engine that shares each sequence between two ranks."""
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        train_micro_batch_size_per_gpu=lambda: 2,
        module=torch.nn.Module().train(training),
    )
    engine.module.model = AutoModelForCausalLM.from_config(SHAPE)
    return SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=engine), num_processes=4, process_index=3)


def ulysses(accelerator: Any) -> Ulysses:
    run: Any = SimpleNamespace(launch=replace(SEQUENCES, world_size=4, rank=3))
    engine = Extra().wrap_step(run, Engine(accelerator, Config()))
    assert isinstance(engine, Ulysses)
    return engine


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"sliding_window": 16},
            "cannot divide its sequences .*: it has a sliding_window of 16 tokens in sdpa",
        ),
        ({"sliding_window": 64}, None),
        ({"layer_types": ["conv", "full_attention"]}, "it has conv"),
        ({"head_dim": None}, None),
        ({"output_router_logits": False}, None),
        ({"output_router_logits": True}, "its experts are balanced over whole sequences"),
        ({"num_attention_heads": 3}, r"2 does not divide its 3 heads, 2 of keys; another size may\. Use a model"),
        ({"num_key_value_heads": 3}, "2 does not divide its 4 heads, 3 of keys"),
        ({"num_key_value_heads": None}, r"its 4 heads, \? of keys"),
    ],
)
def test_attention_that_ulysses_cannot_divide_is_refused(
    fields: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeepSpeed, "prepare", lambda run, model: None)
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    own: Any = SimpleNamespace(_attn_implementation="sdpa", **{**shape, **fields})
    own.get_text_config = lambda: own
    sizes = SimpleNamespace(sp_handler=SimpleNamespace())
    run: Any = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=sizes), launch=SEQUENCES)
    run.config = Config().changed(max_length=64)
    with pytest.raises(UserError, match=said) if said else nullcontext():
        Ulysses.prepare(run, SimpleNamespace(model=SimpleNamespace(config=own)))
        assert sizes.sp_handler.sp_attn_implementation == "sdpa" and getattr(own, "head_dim", 8) == 8


def test_gradients_are_scaled_by_what_deepspeed_divides_them_by() -> None:
    assert [ulysses(fake(stage)).loss_factor for stage in (2, 3)] == [2, 4]
    assert DeepSpeed(fake(), Config()).loss_factor == 4


def test_sequences_are_divided_in_training_and_whole_in_evaluation() -> None:
    batch = batch_of(8)
    with ulysses(fake()).share(batch) as part:
        assert part.labels.shape == (2, 4)
        assert torch.equal(part.labels, batch.labels[:, 4:])
    accelerator = fake(training=False)
    layers = accelerator.deepspeed_engine_wrapped.engine.module.model.model.layers
    assert [layer.self_attn.num_key_value_groups for layer in layers] == [2, 2]
    layers[1].self_attn.num_key_value_groups = 1  # DeepSpeed does so where there are more ranks than heads of keys
    with ulysses(accelerator).share(batch) as part:
        assert part is batch
    assert [layer.self_attn.num_key_value_groups for layer in layers] == [2, 2]


def batch_of(length: int, **more: Any) -> MicroBatch:
    ids = torch.arange(1, 2 * length + 1).view(2, length)
    labels = ids + 100
    labels[1, -2:] = IGNORE
    return MicroBatch({"input_ids": ids, **more}, labels, 2 * length - 2, (0, 1), 2 * length)


@pytest.mark.parametrize("length", [8, 7])
def test_parts_of_sequences_put_together_are_the_sequences(length: int) -> None:
    whole = batch_of(length)
    parts = [part_of_sequences(whole, rank, 2, num_rows=3) for rank in range(2)]
    assert {part.labels.shape for part in parts} == {(3, 4)}
    assert torch.equal(torch.cat([p.labels for p in parts], 1)[:2, :length], whole.labels)
    assert torch.equal(torch.cat([p.inputs["input_ids"] for p in parts], 1)[:2, :length], whole.inputs["input_ids"])
    positions = torch.cat([p.inputs["position_ids"] for p in parts], 1)
    assert torch.equal(positions, torch.arange(8).repeat(3, 1))
    assert sum(part.num_targets for part in parts) == whole.num_targets
    assert [part.num_targets for part in parts] == [int((part.labels != IGNORE).sum()) for part in parts]


def test_what_cannot_be_cut_into_parts_is_refused() -> None:
    with pytest.raises(UserError, match="attention_mask, input_ids: use a task that gives only input_ids"):
        part_of_sequences(batch_of(8, attention_mask=torch.ones(2, 8)), 0, 2, num_rows=2)
