"""Optimizers, what is decayed, and the learning rate of each step."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from support import run_for
from torch import nn

from train import optim
from train.config import Config, Optimization
from train.optim import learning_rate_at

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
OPTIMIZERS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "adamw_8bit" and not HAS_BITSANDBYTES, reason="an extra"))
    for name in get_args(get_type_hints(Optimization)["optimizer"])
]


def build_optimizer(model: nn.Module, optimization: Optimization) -> torch.optim.Optimizer:
    return optim.build_optimizer(run_for(Config(optimization=optimization)), model)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_bias=True,
        )
    )


def test_matrices_are_decayed_and_norms_and_biases_are_not() -> None:
    model = llama()
    optimizer = build_optimizer(model, Optimization(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.1), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weight_decay_shrinks_matrices_alone(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.ones_(model[0].bias)  # type: ignore
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = build_optimizer(model, Optimization(optimizer=optimizer, learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chosen.step()
    for name, parameter in model.named_parameters():
        if name == "0.weight":
            assert (parameter.abs() < before[name].abs()).all()
        else:
            assert torch.equal(parameter, before[name])


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, Optimization())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model[1].parameters()
    }


def test_a_model_of_vectors_only_needs_no_decayed_group() -> None:
    optimizer = build_optimizer(nn.LayerNorm(4), Optimization(weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(optimizer: Any) -> None:
    model = llama()
    chosen = build_optimizer(model, Optimization(optimizer=optimizer, learning_rate=1e-2))
    ids = torch.arange(16).view(2, 8)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01


def test_adamw_is_fused_and_takes_its_settings() -> None:
    config = Optimization(learning_rate=0.2, adam_beta1=0.7, adam_beta2=0.8, adam_epsilon=1e-5)
    optimizer = build_optimizer(llama(), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["fused"], group["lr"], group["betas"], group["eps"]) == (True, 0.2, (0.7, 0.8), 1e-5)


def test_an_optimizer_that_no_extra_has_built_is_not_replaced_by_adamw() -> None:
    """As one of a fork whose name is in the Literal, and whose extra is not in NAMES."""
    with pytest.raises(AssertionError, match="no extra has built --optimizer unheard_of"):
        build_optimizer(llama(), Optimization(optimizer="unheard_of"))  # type: ignore


def rates(total: int = 20, peak: float = 1.0, **settings: Any) -> list[float]:
    config = Optimization(learning_rate=peak, **settings)
    return [learning_rate_at(step, total, config) for step in range(total + 1)]


def test_constant_stays() -> None:
    assert rates(lr_scheduler="constant", peak=0.3) == [0.3] * 21


def test_linear_falls_evenly_to_zero() -> None:
    assert rates(lr_scheduler="linear") == pytest.approx([1 - step / 20 for step in range(21)])


def test_cosine_falls_along_half_a_wave() -> None:
    found = rates(lr_scheduler="cosine")
    assert found == pytest.approx([(1 + math.cos(math.pi * step / 20)) / 2 for step in range(21)])
    assert (found[0], found[10], found[20]) == pytest.approx((1.0, 0.5, 0.0))


def test_warmup_stable_decay_holds_and_then_falls() -> None:
    found = rates(lr_scheduler="warmup_stable_decay", decay_ratio=0.25, warmup_steps=4)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:16] == [1.0] * 12
    assert found[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_warmup_stable_decay_does_not_jump_where_warmup_and_decay_meet() -> None:
    found = rates(lr_scheduler="warmup_stable_decay", decay_ratio=0.8, warmup_steps=10)  # 16 of 20 steps would decay
    assert found[9:] == pytest.approx([1 - k / 10 if k > 0 else 1.0 for k in [0, *range(11)]])


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_warmup_rises_evenly_to_the_peak(scheduler: Any) -> None:
    by_steps = rates(lr_scheduler=scheduler, warmup_steps=5, peak=2.0)
    assert by_steps[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert rates(lr_scheduler=scheduler, warmup_ratio=0.25, peak=2.0) == by_steps


def test_decay_starts_where_warmup_ends() -> None:
    assert rates(lr_scheduler="linear", warmup_steps=10)[10:] == pytest.approx([1 - k / 10 for k in range(11)])
    assert rates(lr_scheduler="cosine", warmup_steps=10)[15] == pytest.approx(0.5)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "warmup_stable_decay"])
def test_the_floor_is_a_share_of_the_peak(scheduler: Any) -> None:
    free = rates(lr_scheduler=scheduler)
    found = rates(lr_scheduler=scheduler, min_learning_rate_ratio=0.1, peak=0.5)
    assert found[20] == pytest.approx(0.05)
    assert found == pytest.approx([0.5 * (0.1 + 0.9 * share) for share in free])


def test_longer_warmup_than_training_never_reaches_the_peak() -> None:
    assert rates(total=4, warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_tables_that_are_biases_are_not_decayed_as_with_trainer() -> None:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    optimizer = build_optimizer(model, Optimization(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    biases = {n: p for n, p in model.named_parameters() if "relative_attention_bias" in n}
    assert biases and all(p.ndim == 2 and decay[id(p)] == 0.0 for p in biases.values())
    assert decay[id(model.shared.weight)] == 0.1
