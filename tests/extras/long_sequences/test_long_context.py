"""Rotary positions scaled and windows that slide: what the model computes, and what its configuration says."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import run_for
from test_main import _own_signals as _own_signals
from test_main import train
from transformers import AutoModelForCausalLM

from train.config import Config, from_values
from train.extras.long_sequences import Extra, attention
from train.extras.readers.own_tokenizers import build_tokenizer
from train.model import build_model
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_USAGE, UserError
from train.tasks import load_task

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64}
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERNBERT = {**SIZES, **MARKS, "model_type": "modernbert", "max_position_embeddings": 64, "local_attention": 8}


def built(model_config: dict[str, Any], max_length: int, task: str = "causal_lm", **options: Any) -> Any:
    """The network that a run with these options would train."""
    config = Config().changed(task=task, model_config=model_config, max_length=max_length, **options)
    return build_model(run_for(config), load_task(task), build_tokenizer("bytes", ())).model


def frequencies(model: Any) -> torch.Tensor:
    return next(buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))


def test_linear_divides_every_frequency_by_the_factor() -> None:
    plain, scaled = built(LLAMA, 64), built(LLAMA, 256, rope_scaling="linear")
    assert torch.equal(frequencies(scaled), frequencies(plain) / 4)
    assert scaled.config.rope_parameters["factor"] == 4.0
    assert scaled.config.max_position_embeddings == 256
    halved = built(LLAMA, 100, rope_scaling="linear", rope_scaling_factor=2.0)
    assert torch.equal(frequencies(halved), frequencies(plain) / 2)


def test_yarn_divides_slow_frequencies_keeps_fast_ones_and_sharpens_attention() -> None:
    plain, scaled = built(LLAMA, 64), built(LLAMA, 256, rope_scaling="yarn")
    theta = plain.config.rope_parameters["rope_theta"]
    head_size = 16

    def turns(turns_in_training: float) -> float:  # which pair of dimensions turns so often in 64 positions
        return head_size * math.log(64 / (turns_in_training * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), head_size - 1)
    ramp = ((torch.arange(head_size // 2) - low) / (high - low)).clamp(0, 1)
    expected = frequencies(plain) * (1 - ramp) + frequencies(plain) / 4 * ramp
    assert torch.allclose(frequencies(scaled), expected, rtol=1e-6)
    rotary = next(m for m in scaled.modules() if hasattr(m, "attention_scaling"))
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert scaled.config.rope_parameters["original_max_position_embeddings"] == 64


def test_a_model_that_yarn_lengthened_can_be_lengthened_again() -> None:
    once, at_once = built(LLAMA, 128, rope_scaling="yarn"), built(LLAMA, 256, rope_scaling="yarn")
    own = {"rope_parameters": once.config.rope_parameters, "max_position_embeddings": 128}
    for stale in ({}, {"attention_factor": 1.5}):
        rope = {**own["rope_parameters"], **stale}
        twice = built({**LLAMA, **own, "rope_parameters": rope}, 256, rope_scaling="yarn")
        assert twice.config.rope_parameters == at_once.config.rope_parameters
        assert twice.config.max_position_embeddings == 256
        assert torch.equal(frequencies(twice), frequencies(at_once))
    with pytest.raises(UserError, match="max_length 128 is within the model's 128 positions"):
        built({**LLAMA, **own}, 128, rope_scaling="yarn")


def test_yarn_scales_a_model_whose_configuration_does_not_say_the_size_of_a_head() -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2}
    assert torch.equal(
        frequencies(built(mixtral, 256, rope_scaling="yarn")),
        frequencies(built({**mixtral, "head_dim": 16}, 256, rope_scaling="yarn")),
    )


def test_only_layers_that_see_everything_are_scaled() -> None:
    model = built(MODERNBERT, 128, "masked_lm", rope_scaling="yarn")
    rope = model.config.rope_parameters
    assert rope["full_attention"]["factor"] == 2.0
    assert rope["sliding_attention"]["rope_type"] == "default"


def takes_documents(model: Any) -> bool:
    """So that a window needs no mask."""
    return attention._with_documents in model.base_model._forward_pre_hooks.values()


def test_a_window_hides_what_is_further_back() -> None:
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 60
    for model_type in ("mistral", "qwen3"):
        torch.manual_seed(0)
        fields = {**LLAMA, "model_type": model_type, "num_hidden_layers": 1}
        model = built(fields, 64, sliding_window=8).eval()
        assert takes_documents(model)
        with torch.no_grad():
            one, two = model(input_ids=ids).logits, model(input_ids=other).logits
        assert not torch.equal(one[0, 7], two[0, 7])
        assert torch.equal(one[0, 8:], two[0, 8:])


@pytest.mark.parametrize(
    ("model_type", "own_fields", "needs_mask"),
    [
        ("doge", {"keep_window_size": 4}, True),
        pytest.param("inkling_text", {}, True, marks=pytest.mark.slow),
        ("mistral", {}, False),
        ("qwen3", {}, False),
    ],
)
def test_a_model_with_a_window_computes_what_it_would_by_itself(
    model_type: str, own_fields: dict[str, Any], needs_mask: bool
) -> None:
    """Doge learns which tokens of a window it sees, Inkling weighs distances: without a mask both would be lost."""
    fields = {**LLAMA, "model_type": model_type, **own_fields}
    run = run_for(Config().changed(model_config=fields, max_length=64, sliding_window=8))
    torch.manual_seed(0)
    model: Any = build_model(run, load_task("causal_lm"), build_tokenizer("bytes", ())).model.eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 1))
    own = type(model)._from_config(model.config).eval()
    own.load_state_dict(model.state_dict())
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = model(input_ids=ids).logits, own(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    said = "WARNING: windows take a mask of 64 × 64: a small copy cannot do without"
    assert (said in run.outputs.notes, takes_documents(model)) == (needs_mask, not needs_mask)


def test_a_window_as_long_as_the_data_leaves_attention_alone() -> None:
    assert not takes_documents(built({**LLAMA, "model_type": "mistral"}, 64, sliding_window=64))
    assert takes_documents(built(MODERNBERT, 64, "masked_lm"))
    assert built(MODERNBERT, 64, "masked_lm", sliding_window=6).config.local_attention == 12


@pytest.mark.parametrize(
    ("fields", "max_length", "options", "message"),
    [
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 1}, 64, {"rope_scaling": "yarn"}, "yarn .* gpt2 has none"),
        (LLAMA, 64, {"rope_scaling": "linear"}, "max_length 64 is within the model's 64 positions"),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            256,
            {"rope_scaling": "yarn"},
            r"llama already scales its own \(linear\)",
        ),
        (
            {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            256,
            {"rope_scaling": "linear"},  # of these it is unknown what the model was trained for
            r"llama already scales its own \(linear\)",
        ),
        # else final/ could not be written, which checks them
        ({**LLAMA, "model_type": "phi3"}, 256, {"rope_scaling": "yarn"}, "yarn is not for phi3: .*longrope"),
        (LLAMA, 64, {"sliding_window": 8}, "sliding_window: 8: llama sees all positions"),
        (
            {**LLAMA, "model_type": "minimax", "num_local_experts": 2, "head_dim": 8},
            64,
            {"sliding_window": 8},
            "sliding_window: 8: minimax sees all positions",
        ),
        (LLAMA, 200, {"rope_scaling": "yarn", "rope_scaling_factor": 2.0}, "max_length: 200 is more than .* 128"),
        (LLAMA, 200, {}, "--rope_scaling yarn"),
    ],
)
def test_what_a_model_does_not_have_is_said(
    fields: dict[str, Any], max_length: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        built(fields, max_length, **options)


def test_the_language_model_within_a_model_of_images_is_changed_and_checked() -> None:
    text = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 32}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "vocab_size": 300}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    fields = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    config = built(fields, 100, sliding_window=8, rope_scaling="yarn").config.get_text_config()
    assert (config.sliding_window, config.max_position_embeddings) == (8, 100)
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    with pytest.raises(UserError, match="max_length: 100 is more than the model's 64 positions"):
        built(fields, 100)
    with pytest.raises(UserError, match="the model has 200 embeddings, the tokenizer 259 tokens"):
        built({**fields, "text_config": {**text, "vocab_size": 200}}, 64)


def test_final_holds_what_was_changed(llama_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**LLAMA, "model_type": "qwen3", "max_position_embeddings": 16, "head_dim": 16}
    flags = ("--model_config", json.dumps(fields), "--rope_scaling", "yarn", "--sliding_window", 8, "--max_steps", 2)
    assert train(llama_recipe, tmp_path / "run", *flags) == EXIT_DONE
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.config.sliding_window == 8
    assert model.config.layer_types == ["sliding_attention"] * 2
    keys = ("rope_type", "factor", "original_max_position_embeddings")
    rope = {key: model.config.rope_parameters[key] for key in keys}
    assert rope == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert model.config.max_position_embeddings == 64
    capsys.readouterr()
    assert train(llama_recipe, tmp_path / "run", *flags[:-2], "--sliding_window", 4, "--max_steps", 3) == EXIT_ERROR
    assert "sliding_window" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rope_scaling_factor", 2), "rope_scaling_factor needs rope_scaling"),
        (
            ("--rope_scaling", "yarn", "--rope_scaling_factor", 1),
            "rope_scaling_factor: 1 is not valid: it must be above 1",
        ),
        (("--sliding_window", 0), "sliding_window: 0 is not valid: it must be at least 1"),
        (
            ("--model", "nowhere:made", "--tokenizer", "bytes", "--sliding_window", 4),
            "module:function has none",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    llama_recipe: Path, tmp_path: Path, flags: tuple[Any, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(llama_recipe, tmp_path / "run", *flags) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_another_stretch_of_positions_is_another_model() -> None:
    own = {"rope_scaling": "yarn", "max_length": 64}
    cases = ({}, {"max_length": 128}, {"rope_scaling_factor": 2.0}, {"rope_scaling_factor": 4.0})

    def identity(values: dict[str, Any]) -> dict[str, Any]:
        run: Any = SimpleNamespace(config=from_values(values))
        return Extra().identity(run, run)

    found = [identity({**own, **case}) for case in cases]
    assert all(first != second for first, second in itertools.combinations(found, 2))
    plain = [identity({"max_length": length}) for length in (64, 128)]
    assert plain[0] == plain[1]
