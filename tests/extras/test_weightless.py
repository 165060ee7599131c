"""Copies without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig
from transformers.utils import import_utils

from train.extras.losses.in_head import obstacle_to_chunks
from train.extras.weightless import obstacle_on_trial, without_weights
from train.model import ModelWithLoss


def test_a_mixture_of_experts_is_tried_next_to_its_loss_too() -> None:
    """On a machine without a kernel for grouped products of its type, which a copy has no values to fall back on."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))

    def trial(twin: Any) -> str | None:
        assert twin.model.config._experts_implementation == "batched_mm"
        ids = torch.zeros(1, 8, dtype=torch.long)
        twin({"input_ids": ids}, ids).backward()
        return None

    assert obstacle_on_trial(ModelWithLoss(model), trial) is None


@pytest.mark.parametrize("nested", [True, False])
def test_weights_in_4_bits_are_copied_without_their_scales_values(nested: bool) -> None:
    """Which would mix with meta tensors: a prediction has fake ones, and a run those of the device."""
    functional = pytest.importorskip("bitsandbytes.functional")
    modules = pytest.importorskip("bitsandbytes.nn")
    layer = modules.Linear4bit(128, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    packed, scales = functional.quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=nested)
    layer.weight = modules.Params4bit(packed, requires_grad=False, quant_state=scales, bnb_quantized=True)
    twin = without_weights(layer, "meta")
    kept = twin.weight.quant_state
    states = [kept, kept.state2] if nested else [kept]
    found = [value for state in states for value in vars(state).values() if isinstance(value, torch.Tensor)]
    assert len(found) == (5 if nested else 2) and all(tensor.is_meta for tensor in found)
    assert kept.shape == scales.shape == (64, 128) and not scales.absmax.is_meta
    assert twin(torch.empty(3, 128, device="meta")).shape == (3, 64)
    values = without_weights(layer, real=torch.float32).weight.quant_state  # for copies that compute with numbers
    assert torch.equal(values.absmax, scales.absmax)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral"])
def test_common_models_are_tried_once_and_on_the_meta_device(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors, which come second, a plan and the start of a run take longer."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **heads))
    model.config.use_cache = False  # as in a run
    given, run = list[str](), type(model).forward

    def forward(self: Any, input_ids: torch.Tensor, **named: Any) -> Any:
        given.append(input_ids.device.type)
        return run(self, input_ids, **named)

    monkeypatch.setattr(type(model), "forward", forward)
    before = import_utils.is_fake_tensor
    assert obstacle_to_chunks(model)[0] is None
    assert given == ["meta", "meta"]  # evaluating and training
    assert import_utils.is_fake_tensor is before


class Doubled(nn.Module):
    """Asks a constant of its own for its value, which a meta tensor does not keep."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * torch.tensor(2).item()


def test_constants_of_a_model_are_known_in_the_second_try() -> None:
    devices = list[str]()

    def trial(twin: nn.Module) -> None:
        ids = torch.zeros(1, 4)
        devices.append(ids.device.type)
        assert twin(ids).shape == ids.shape

    assert obstacle_on_trial(Doubled(), trial) is None
    assert devices == ["meta", "cpu"]


def test_what_fails_both_times_is_said() -> None:
    def trial(twin: nn.Module) -> None:
        raise ValueError("three heads")

    assert obstacle_on_trial(Doubled(), trial) == "trying it failed (ValueError: three heads)"
