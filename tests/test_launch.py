"""What the launcher decided, read from its environment, and disagreements with the training configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ACCELERATE_LAUNCH, ROOT, run_for
from torch.distributed import distributed_c10d
from transformers import AutoConfig, AutoModelForCausalLM

from train.config import Config
from train.data import PreparedData
from train.launch import Launch, accelerator_options, read_launch, shard_by_layer
from train.records import EXIT_ERROR

MEET = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def sizes(world_size: int, rank: int = 0, **given: int) -> dict[str, str]:
    named = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": str(size) for name, size in given.items()}
    return {**PARALLEL, **MEET, "WORLD_SIZE": str(world_size), "RANK": str(rank), **named}


def test_nobody_launched() -> None:
    launch = read_launch({})
    assert launch == Launch()
    assert (launch.dp_size, launch.rank, launch.mp_size, str(launch)) == (1, 0, 1, "")


@pytest.mark.parametrize(
    ("environment", "engine"),
    [
        ({}, "ddp"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp2"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
    ],
)
def test_engine_of_two_processes(environment: dict[str, str], engine: str) -> None:
    launch = read_launch({**MEET, "WORLD_SIZE": "2", "RANK": "1", **environment})
    assert (launch.engine, str(launch), launch.dp_size, launch.rank) == (engine, engine, 2, 1)


def test_ranks_that_share_examples_are_neighbours() -> None:
    assert read_launch({**sizes(8, sp=4), "ACCELERATE_USE_DEEPSPEED": "true"}).dp_size == 2
    launches = [read_launch(sizes(8, rank, dp_shard=2, cp=2, tp=2)) for rank in range(8)]
    data: Any = PreparedData(*[None] * 3, examples={"train": None}, loading=None)  # type: ignore
    batches = [data.training_batches(run_for(Config(), launch=launch)) for launch in launches]
    assert [part.rank for part in batches] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {(launch.dp_size, launch.mp_size) for launch in launches} == {(2, 4)}
    assert str(launches[0]) == "ddp, tensor parallel 2, context parallel 2"


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert read_launch({"WORLD_SIZE": "", "RANK": ""}) == Launch()


def test_on_cuda_whoever_knows_the_lost_rank_speaks_before_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", None)  # put back afterwards
    for device, seconds in (("cpu", 30), ("cuda", 90)):
        [handler] = accelerator_options(Launch(), torch.device(device), 30)["kwargs_handlers"]
        assert handler.timeout.total_seconds() == seconds
    # also in the groups of meshes and DeepSpeed, which are told none
    assert distributed_c10d._get_default_timeout(distributed_c10d.Backend.NCCL).total_seconds() == 90  # type: ignore


@pytest.mark.parametrize(
    ("precision", "types"),
    [("bf16", (torch.bfloat16, torch.float32)), ("fp16", (torch.float16, torch.float32)), ("no", (None, None))],
)
def test_fsdp2_sums_gradients_in_fp32_and_no_library_leaves_weights_empty(
    precision: str, types: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", None)  # put back afterwards
    for name, value in (("FSDP_VERSION", "2"), ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")):
        monkeypatch.setenv(name, value)
    launch = Launch(world_size=2, engine="fsdp2", precision=precision)
    policy = accelerator_options(launch, torch.device("cpu"))["fsdp_plugin"].mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == types
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


@pytest.mark.slow
def test_a_launcher_that_starts_one_of_two_is_noticed(tmp_path: Path) -> None:
    command = [*ACCELERATE_LAUNCH, "--cpu", "--num_processes", "2", "--quiet", "train/main.py", "--output_dir"]
    done = subprocess.run([*command, tmp_path / "run"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == EXIT_ERROR
    assert "error: the launcher was asked for several processes and started one" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_file_of_one_gpu_leaves_cards_and_precision_to_the_user(tmp_path: Path) -> None:
    """Its own ``gpu_ids`` would replace CUDA_VISIBLE_DEVICES, and its precision the card's."""
    script = tmp_path / "shown.py"
    script.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['ACCELERATE_MIXED_PRECISION'])")
    command = [*ACCELERATE_LAUNCH, "--config_file", "accelerate_configs/single_gpu.yaml", script]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.stdout.split(), done.returncode) == (["3", "no"], 0), done.stderr


@pytest.mark.parametrize(
    ("model_type", "options", "loads_by_itself"),
    [
        ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, True),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, False),
    ],
)
def test_accelerate_loads_no_model_with_a_persistent_buffer(
    model_type: str, options: dict[str, Any], loads_by_itself: bool
) -> None:
    """It takes each entry of the state for a sharded parameter. deepseek_v3's routers have a buffer."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **sizes, num_attention_heads=2, **options)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True, transformer_cls_names_to_wrap=None)
    state = SimpleNamespace(fsdp_plugin=plugin)
    shard_by_layer(
        SimpleNamespace(is_fsdp2=True, state=state, gradient_state=SimpleNamespace(plugin_kwargs={})), network
    )
    assert plugin.cpu_ram_efficient_loading is loads_by_itself
    assert plugin.transformer_cls_names_to_wrap == [type(network.model.layers[0]).__name__]
