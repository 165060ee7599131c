"""Optimizers and learning-rate schedules."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.config import Optimization
from train.records import Run


def build_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with weight decay on matrices only: not on biases, norms and other vectors."""
    optim, groups = run.config.optimization, parameter_groups(model, run.config.optimization)
    if (other := run.extras.first("build_optimizer", run.config, groups, run.accelerator.device)) is not None:
        return other
    assert optim.optimizer == "adamw", f"no extra has built --optimizer {optim.optimizer}"
    # One fused kernel: fewer launches, and none of foreach's temporaries, which are as large as the parameters.
    trained = [p for group in groups for p in group["params"]]
    fused = all(p.device.type in ("cuda", "cpu", "mps", "xpu") and p.is_floating_point() for p in trained)
    return torch.optim.AdamW(groups, **adam_settings(optim), fused=fused)


def adam_settings(optim: Optimization) -> dict[str, Any]:
    return {"lr": optim.learning_rate, "betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_epsilon}


def parameter_groups(model: nn.Module, config: Optimization) -> list[dict[str, Any]]:
    """The trained parameters of ``model``, and their weight decay."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:  # no kernel takes DTensors and plain tensors together
            groups.setdefault((isinstance(p, DTensor), p.ndim < 2 or "bias" in name), []).append(p)
    return [{"params": groups[k], "weight_decay": 0.0 if k[1] else config.weight_decay} for k in sorted(groups)]


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters; more than the elements of a tensor where two share a byte (bitsandbytes' 4 bits)."""
    shapes = [((getattr(p, "quant_state", None) or p).shape, p.requires_grad) for p in model.parameters()]
    return sum(shape.numel() for shape, is_trained in shapes if is_trained), sum(shape.numel() for shape, _ in shapes)


def num_warmup_steps(total_steps: int, config: Optimization) -> int:
    """How many steps the learning rate rises; may be more than the run has."""
    return config.warmup_steps if config.warmup_steps is not None else round(config.warmup_ratio * total_steps)


def learning_rate_at(step: int, total_steps: int, config: Optimization) -> float:
    """The learning rate of optimizer step ``step`` (from 0): a pure function, so a checkpoint need not hold it."""
    warmup, peak = num_warmup_steps(total_steps, config), config.learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.lr_scheduler == "constant":
        return peak
    after_warmup, left = max(1, total_steps - warmup), max(0, total_steps - step)
    if config.lr_scheduler == "cosine":
        share = 0.5 * (1.0 - math.cos(math.pi * left / after_warmup))
    elif config.lr_scheduler == "linear":
        share = left / after_warmup
    else:
        assert config.lr_scheduler == "warmup_stable_decay", f"no rate is written for {config.lr_scheduler}"
        decay_steps = min(round(config.decay_ratio * total_steps), after_warmup)
        share = min(1.0, left / max(1, decay_steps))
    return peak * (config.min_learning_rate_ratio + (1.0 - config.min_learning_rate_ratio) * share)


def set_learning_rate(optimizer: Any, rate: float, config: Optimization) -> None:
    """Sets the ``rate`` of the schedule; a parameter group with a rate of its own keeps its ratio to the peak."""
    for group in optimizer.param_groups:
        group["lr"] = rate * (group.setdefault("initial_lr", group["lr"]) / config.learning_rate)
