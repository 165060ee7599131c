"""Ranks that use different modules in forward are told apart from ranks whose sequences differ in length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from train.extras import parallelism
from train.extras.activations.tiling import MIN_TILE_TOKENS, tile_mlps
from train.records import UserError

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiled() -> Any:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).train()  # type: ignore
    tile_mlps(model)
    return model


class SecondIfLong(nn.Module):
    """Its second layer is used by sequences of more than ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(32, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.layers[0](self.embedding(input_ids))
        return SimpleNamespace(logits=self.layers[1](hidden) if input_ids.shape[1] > 10 else hidden)


def ranks_of(model: Any, lengths: tuple[int, int]) -> list[Any]:
    """What two ranks have counted that make a step with ``model`` on a sequence each."""
    ranks = []
    for length in lengths:
        extra: Any = parallelism.Extra()
        config = SimpleNamespace(get=lambda name: None)
        launch, accelerator = SimpleNamespace(engine="fsdp2"), SimpleNamespace(num_processes=2)
        run: Any = SimpleNamespace(launch=launch, accelerator=accelerator, config=config)
        extra.before_training(run, SimpleNamespace(model=model))
        extra.mark("forward")
        loss = model(torch.arange(length)[None] % 32).logits.square().mean()
        extra.mark("backward")
        loss.backward()
        extra.mark("clip")
        ranks.append((extra, run))
        for module in model.modules():
            module._forward_pre_hooks.clear()
    return ranks


def logged(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the log on the first of them."""
    monkeypatch.setattr(parallelism, "exchange", lambda own: [extra._order for extra, _ in ranks])
    ranks[0][0].logged(ranks[0][1], SimpleNamespace(), 1.0, 0)


def test_tiles_that_only_a_long_sequence_has_are_computed_again_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = MIN_TILE_TOKENS // 2, 2 * MIN_TILE_TOKENS
    ranks = ranks_of(tiled(), lengths)
    logged(ranks, monkeypatch)


def test_a_layer_that_only_one_rank_uses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    logged(ranks_of(SecondIfLong(), (11, 20)), monkeypatch)
    with pytest.raises(UserError, match="ranks used different modules in a micro-batch"):
        logged(ranks_of(SecondIfLong(), (5, 20)), monkeypatch)
