"""Run by the tests of tensor and context parallelism under torchrun: updates in fp64, and those of plain PyTorch.

Every rank also makes the same updates with the whole model and whole sequences, by nothing of this template; the
largest differences are written as JSON by rank 0.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_run import run_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from train.config import Config
from train.extras.losses import chunked
from train.extras.losses.chunked import Objective, objective_of
from train.extras.parallelism.sequences import positions_of
from train.launch import read_launch, shard_by_layer
from train.model import ModelWithLoss
from train.optim import build_optimizer
from train.records import IGNORE, MicroBatch, Run
from train.step import Engine, optimizer_step
from train.tasks.causal_lm import Task

VOCABULARY = 259
CHUNKED = {"loss": "chunked"}
TENSOR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"attention_bias": True}, {**CHUNKED, "gradient_checkpointing": "full"}),
    "qwen3": ({"tie_word_embeddings": True}, {**CHUNKED, "gradient_checkpointing": "selective"}),
    "llama, smoothed": ({}, {**CHUNKED, "label_smoothing": 0.2, "z_loss": 0.05}),
    "gpt_neox": ({}, {"optimizer": "sgd"}),
    "llama, tied": ({"tie_word_embeddings": True}, {}),
}
"""Fields of the model's configuration, and of the run's."""
CONTEXT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {**CHUNKED, "gradient_checkpointing": "full"}),
    "llama, tied": ({"tie_word_embeddings": True}, {"optimizer": "sgd"}),
}
CONFIG = Config().changed(
    learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5, sgd_momentum=0.9, gradient_accumulation_steps=2
)


def main(output: str) -> None:
    run, found = run_of(CONFIG, read_launch()), cast("dict[str, Any]", {})
    for name, (fields, settings) in (TENSOR if run.launch.tp_size > 1 else CONTEXT).items():
        run.config = CONFIG.changed(**settings)
        with patch.multiple(chunked, MIN_CHUNK_TOKENS=16, CHUNK_LOGITS_BYTES=1):  # several chunks
            found[name] = compared(run, small_model(name.split(",")[0], **fields))
    if run.launch.cp_size > 1:
        found["positions"] = positions_as_torch_divides_them(run.accelerator)
    if run.accelerator.is_main_process:
        Path(output).write_text(json.dumps(found))


def compared(run: Run, network: nn.Module) -> dict[str, float]:
    """Three updates, and how far they are from those of plain PyTorch."""
    accelerator, reference, objective = run.accelerator, copy.deepcopy(network), objective_of(run.config)
    run.extras.each("change_model", run, network, Task)
    with_loss = ModelWithLoss(network, Task)
    run.extras.each("change_loss", run, with_loss)
    assert (with_loss.loss_in_head is not None) == (run.config.get("loss") == "chunked")
    shard_by_layer(accelerator, network)
    accelerator._models.clear()
    model, prepared = accelerator.prepare(with_loss, build_optimizer(run, network))
    engine = run.extras.pipe("wrap_step", run, Engine(accelerator, run.config))
    assert engine.mp_size == 2
    plain_optimizer, plain_norms, plain_losses = build_optimizer(run, reference), [], []
    norms, sums, stopped = [], [], False
    for window in ([batch([37, 20]), batch([9, 1])], [batch([30, 30]), batch([4])], [batch([5, 3])]):
        plain_losses.append(plain_loss(reference, window, objective))
        plain_norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        outcome = optimizer_step(engine, model, prepared, window, accelerator.process_index == 1)
        assert outcome.num_targets == sum(b.num_targets for b in window)
        assert (outcome.num_tokens, outcome.clipped) == (outcome.num_targets, True)
        norms.append(outcome.grad_norm)
        loss_sum = cast("Tensor", accelerator.reduce(outcome.loss_sum, reduction="sum"))
        sums.append(loss_sum.item() / outcome.num_targets)
        stopped = outcome.stop_requested
    with torch.no_grad():
        return {
            "weights": max(distance(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)),
            "norm": max(abs(a - b) for a, b in zip(norms, plain_norms, strict=True)),
            "loss": max(abs(a - b) for a, b in zip(sums, plain_losses, strict=True)),
            "copies": max(
                [difference_between_ranks(p) for p in model.parameters() if not isinstance(p, DTensor)], default=0
            ),
            "share": sum(local(p).numel() for p in in_layers(model)) / sum(p.numel() for p in in_layers(reference)),
            "stopped": float(stopped),
        }


def small_model(model_type: str, **fields: Any) -> nn.Module:
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def batch(lengths: list[int]) -> MicroBatch:
    """Random tokens and labels, padded at the end."""
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)))
    labels = torch.randint(3, VOCABULARY, ids.shape)
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:] = 0, IGNORE
    return MicroBatch({"input_ids": ids}, labels, sum(lengths), tuple(range(len(lengths))), sum(lengths))


def plain_loss(model: nn.Module, window: list[MicroBatch], objective: Objective) -> float:
    """The mean loss of all targets; leaves its gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for b in window:
        logits = model(**b.inputs).logits
        kept = b.labels != IGNORE
        log_z, log_p = logits[kept].logsumexp(-1), logits[kept].log_softmax(-1)
        smoothed = log_p.mean(-1) * objective.label_smoothing
        plain = log_p.gather(-1, b.labels[kept].unsqueeze(-1)).squeeze(-1) * (1 - objective.label_smoothing)
        total = total - (plain + smoothed).sum() + objective.z_loss * log_z.square().sum()
    loss = total / sum(b.num_targets for b in window)
    loss.backward()
    return loss.item()


def distance(parameter: Tensor, expected: Tensor) -> float:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return (whole - expected).abs().max().item()


def in_layers(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".layers." in name]


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def difference_between_ranks(parameter: Tensor) -> float:
    largest, smallest = parameter.detach().clone(), parameter.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return (largest - smallest).abs().max().item()


def positions_as_torch_divides_them(accelerator: Accelerator) -> bool:
    """Whether ranks hold the positions that torch's own context parallelism expects there."""
    numbers = torch.arange(24).unsqueeze(0)
    with accelerator.maybe_context_parallel([numbers], [1], {numbers}):
        pass
    return numbers[0].tolist() == positions_of(24, accelerator.process_index, accelerator.num_processes).tolist()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
