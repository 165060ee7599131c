"""Copies without weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from train.extras.weightless import obstacle_on_trial
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
