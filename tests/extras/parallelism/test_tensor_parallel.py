"""Tensor parallelism: the plan of a model, what is refused, and two gloo ranks against one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoint_digests
from test_distributed import forked, killed_at_step_4
from test_fsdp2 import final_weights, largest_difference, launched, metrics, run
from test_launch import sizes
from test_main import STEPS, trained_losses
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from train import extras
from train.config import Config, from_values
from train.extras.parallelism import Extra
from train.extras.parallelism.tensor import plan_of
from train.launch import Launch, read_launch
from train.records import EXIT_DONE, UsageError, UserError

EXPERTS = {"layers.*.mlp.experts": "moe_tp_experts"}  # which Mixtral has up to transformers 5.24


def model(model_type: str, auto_class: Any = AutoModelForCausalLM, **fields: Any) -> nn.Module:
    small = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.device("meta"):
        return auto_class.from_config(AutoConfig.for_model(model_type, **{**small, **fields}))


def test_attention_and_feed_forward_are_divided_but_not_the_vocabulary() -> None:
    plan = plan_of(model("qwen3"), 2)
    layer = "model.layers.0."
    assert plan == {
        **{f"{layer}self_attn.{name}_proj": "colwise" for name in "qkv"},
        **{f"{layer}self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"},
        f"{layer}self_attn.o_proj": "rowwise",
        f"{layer}mlp.gate_proj": "colwise",
        f"{layer}mlp.up_proj": "colwise",
        f"{layer}mlp.down_proj": "rowwise",
    }


def test_a_classifier_is_divided_but_for_its_head() -> None:
    plan = plan_of(model("llama", AutoModelForSequenceClassification), 2)
    assert "model.layers.0.mlp.down_proj" in plan
    assert "score" not in plan


@pytest.mark.parametrize(
    ("model_type", "fields", "ranks", "message"),
    [
        ("gpt2", {}, 2, r"gpt2 has no plan of .* Use .*fsdp2\.yaml"),
        ("mixtral", {"base_model_tp_plan": EXPERTS}, 2, r"mixtral plans 'moe_tp_experts' for .*\.mlp\.experts.*Use"),
        ("llama", {}, 4, r"llama has 2 num_key_value_heads, which 4 ranks cannot share evenly.*tp_size"),
        ("llama", {"intermediate_size": 63}, 2, r"gate_proj of llama is 63 wide, which 2 ranks"),
    ],
)
def test_models_that_cannot_be_divided(model_type: str, fields: dict[str, Any], ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(model(model_type, **fields), ranks)


@pytest.mark.parametrize(
    ("launched", "values", "message"),
    [
        ({"tp": 2, "dp_shard": 2}, {}, "sharding or data parallelism: set num_processes: 2"),
        ({"tp": 2, "cp": 2}, {}, "sharding or data parallelism"),
        (
            {"tp": 4},
            {"mixed_precision": "fp16"},
            "parallelism_config_tp_size: 4 .* cannot be combined with mixed_precision: fp16",
        ),
        ({"tp": 4}, {"max_grad_value": 1.0, "max_grad_norm": None}, "max_grad_value: use max_grad_norm"),
        ({"tp": 4}, {"loss": "liger"}, "loss: liger: use auto or chunked"),
        ({"tp": 4}, {"packing": True}, r"packing: leave packing out, or use ddp\.yaml"),
    ],
)
def test_combinations_that_cannot_be(launched: dict[str, int], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Extra().check(from_values(values), read_launch(sizes(4, **launched)))


def test_the_launch_file_alone_is_accepted() -> None:
    Extra().check(Config(), read_launch(sizes(2, tp=2)))


@pytest.mark.parametrize("launch", [Launch(2, tp_size=2), Launch(2, engine="deepspeed")], ids=str)
def test_a_copy_without_this_extra_does_not_take_such_a_launch(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "classes", dict)
    extras.check(Config(), Launch(2))
    with pytest.raises(UsageError, match=r"needs train/extras/parallelism/: use ddp\.yaml"):
        extras.check(Config(), launch)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_make_the_updates_of_plain_pytorch(tmp_path: Path) -> None:
    """In fp64, with AdamW and SGD, tied and untied weights, checkpointing, all logits and chunks of them."""
    output = tmp_path / "found.json"
    done = forked("tests/extras/parallelism/divided_step.py", output, env=environment(tp=2))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert len(found) == 5
    for name, values in found.items():
        assert values["weights"] < 1e-12, name
        assert values["norm"] < 1e-12, name
        assert values["loss"] < 1e-5, name  # the loss that is shown is summed in fp32
        assert values["copies"] == 0, name  # weights that every rank has are equal to the last bit
        assert 0.5 < values["share"] < 0.52, name  # in layers norms and some biases alone are not divided
        assert values["stopped"], name  # one rank was asked to


def environment(**parallel: int) -> dict[str, str]:
    """What ``accelerate launch`` hands its processes for a launch file with these sizes."""
    named = {name: value for name, value in sizes(2, **parallel).items() if name not in ("WORLD_SIZE", "RANK")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **named}


def assert_same_course(one: Path, other: Path) -> None:
    """Losses, gradient norms, metrics and final weights of two runs are those of one computation."""
    assert largest_difference(final_weights(one), final_weights(other)) < 2e-4  # Adam magnifies rounding
    left, right = metrics(one), metrics(other)
    assert [(r["kind"], r["step"]) for r in left] == [(r["kind"], r["step"]) for r in right]
    for a, b in zip(left, right, strict=True):
        for name in ("loss", "learning_rate", "grad_norm", "accuracy", "bits_per_byte"):
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-4), name
        for name in ("tokens_seen", "padding_share", "examples"):
            assert a.get(name) == b.get(name), name


@pytest.mark.distributed
@pytest.mark.slow
def test_run_from_the_launch_file_equals_that_of_one_process(llama_recipe: Path, tmp_path: Path) -> None:
    """With evaluation; ``final/`` is a plain folder."""
    from transformers.models.llama import LlamaForCausalLM

    flags = ("--eval_every_steps", 2, "--eval_batch_size", 3, "--save_every_steps", 2, "--save_total_limit", 9)
    one, two = tmp_path / "one", tmp_path / "two"
    run("cpu", llama_recipe, one, *flags, processes=1)
    said = run("tensor_parallel", llama_recipe, two, *flags)
    assert "device: 2 × CPU, 1 thread each, ddp, tensor parallel 2, precision fp32" in said
    assert "2 examples per micro-batch × 4 accumulated × 1 process = 8 per step" in said
    assert_same_course(one, two)
    assert metrics(two)[-1]["examples"] == 5
    found: Any = LlamaForCausalLM.from_pretrained(two / "final", output_loading_info=True)
    assert not found[1]["missing_keys"] and not found[1]["unexpected_keys"]


@pytest.mark.distributed
@pytest.mark.slow
def test_one_process_goes_on_from_the_parts_of_two_and_they_from_it(llama_recipe: Path, tmp_path: Path) -> None:
    flags = ("--save_every_steps", 2, "--save_total_limit", 9)
    one, two = tmp_path / "one", tmp_path / "two"
    run("cpu", llama_recipe, one, *flags, processes=1)
    run("tensor_parallel", llama_recipe, two, *flags)
    stored = Path("checkpoints") / "step-00000002"
    for file, processes, source in (("cpu", 1, two), ("tensor_parallel", 2, one)):
        output = tmp_path / f"goes-on-{file}"
        said = run(file, llama_recipe, output, *flags, "--resume", source / stored, processes=processes)
        assert "resumed from" in said
        assert min(trained_losses(output)) == 3
        assert largest_difference(final_weights(output), final_weights(one)) < 2e-4


@pytest.mark.distributed
@pytest.mark.slow
def test_killed_and_resumed_is_exact(llama_recipe: Path, tmp_path: Path) -> None:
    """With attention dropout, and a pretrained model's weights to start from."""
    start, whole, pieces = tmp_path / "start", tmp_path / "whole", tmp_path / "pieces"
    llama_recipe.write_text(llama_recipe.read_text().replace("tie_word", "attention_dropout: 0.1, tie_word"))
    run("cpu", llama_recipe, start, "--max_steps", 1, processes=1)
    flags = ("--model", start / "final", "--save_every_steps", 1, "--save_total_limit", 9)
    run("tensor_parallel", llama_recipe, whole, *flags)
    words = ("--config", llama_recipe, "--output_dir", pieces, *flags)
    killed = launched("tensor_parallel", *words, script=killed_at_step_4(tmp_path))
    assert killed.returncode != EXIT_DONE
    assert not (pieces / "final").exists()
    assert "resumed from" in run("tensor_parallel", llama_recipe, pieces, *flags)
    assert checkpoint_digests(whole, STEPS) == checkpoint_digests(pieces, STEPS)
