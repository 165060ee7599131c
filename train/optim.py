"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.config import Optimization
from train.extras.optimizers import in_backward
from train.extras.optimizers.bf16 import Bf16AdamW
from train.extras.optimizers.eight_bit import eight_bit_adamw
from train.extras.optimizers.offload import OffloadedAdamW
from train.records import StepOutcome
from train.step import optimizer_step


def build_optimizer(
    model: nn.Module, config: Optimization, device: torch.device | None = None
) -> torch.optim.Optimizer:
    """The optimizer, weight decay on matrices only: not on biases, norms and other vectors.

    Args:
        device: where the steps will be made; None: on a CPU, where there is nothing to offload from.
    """
    groups = parameter_groups(model, config)
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.sgd_momentum)
    if config.optimizer == "adamw_8bit":
        return eight_bit_adamw(groups, **settings)
    if config.bf16_update != "nearest":
        return Bf16AdamW(groups, config.bf16_update, config.seed, **settings)
    if config.optimizer_offload and device is not None and device.type != "cpu":
        return OffloadedAdamW(groups, **settings)
    # One fused kernel: fewer launches, and none of foreach's temporaries, which are as large as the parameters.
    trained = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cuda", "cpu", "mps", "xpu") and p.is_floating_point() for p in trained)
    return torch.optim.AdamW(groups, **settings, fused=fused)


def parameter_groups(model: nn.Module, config: Optimization) -> list[dict[str, Any]]:
    """The trained parameters of ``model``, and their weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = []
    for sharded in (False, True):  # no kernel takes DTensors and plain tensors together
        alike = [p for p in trained if isinstance(p, DTensor) == sharded]
        groups.append({"params": [p for p in alike if p.ndim >= 2], "weight_decay": config.weight_decay})
        groups.append({"params": [p for p in alike if p.ndim < 2], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def step_function(config: Optimization) -> Callable[..., StepOutcome]:
    """What makes a step of a run without DeepSpeed: :func:`train.step.optimizer_step`, or its form in backward."""
    return in_backward.optimizer_step if config.optimizer_in_backward else optimizer_step


def peak_learning_rate(config: Optimization, global_batch_size: int) -> float:
    """``learning_rate`` scaled to the global batch: linear (arXiv 1706.02677) or by the square root."""
    if config.learning_rate_scaling == "none" or config.learning_rate_reference_batch_size is None:
        return config.learning_rate
    ratio = global_batch_size / config.learning_rate_reference_batch_size
    return config.learning_rate * (ratio if config.learning_rate_scaling == "linear" else math.sqrt(ratio))


def num_warmup_steps(total_steps: int, config: Optimization) -> int:
    """How many steps the learning rate rises; may be more than the run has."""
    return config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * total_steps)


def learning_rate_at(step: int, total_steps: int, peak: float, config: Optimization) -> float:
    """The learning rate of the optimizer step ``step`` (from 0): a pure function, so nothing of it needs saving."""
    warmup = num_warmup_steps(total_steps, config)
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = config.min_learning_rate_ratio
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler == "constant":
        share = 1.0
    elif config.lr_scheduler == "linear":
        share = 1.0 - done
    elif config.lr_scheduler == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        decay_steps = max(1, round(config.decay_ratio * total_steps))
        share = min(1.0, (total_steps - step) / decay_steps)
    return peak * (floor + (1.0 - floor) * share) if config.lr_scheduler != "constant" else peak


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets it for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
