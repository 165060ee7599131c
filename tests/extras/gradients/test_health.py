"""Gradient health: its figures are those computed directly, planted problems are named, healthy models are not."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from faults.injections import at_step, die
from faults.processes import KILLED, run, script
from support import ROOT, final_files, run_for, sampled, takes_minutes, write_recipe
from torch import nn

from train import extras
from train.config import Config, from_values
from train.extras.gradients import health
from train.extras.gradients.health import Health, figures_of, gradient_of, layer_of
from train.extras.gradients.problems import problems_in
from train.figures import read_metrics
from train.launch import Launch
from train.main import main
from train.model import ModelWithLoss
from train.records import EXIT_DONE, MicroBatch, UsageError
from train.step import Engine

CLASSES, WIDTH = 11, 6


class Net(nn.Module):
    """Two blocks between an embedding and a head; the last block's gradients are tiny."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        x = x + torch.tanh(self.blocks[0](x))
        return self.head(x + 1e-6 * self.blocks[1](x))


def batch(seed: int) -> MicroBatch:
    ids = torch.randint(CLASSES, (2, 5), generator=torch.Generator().manual_seed(seed))
    return MicroBatch({"input_ids": ids}, ids, ids.numel(), (0, 1), ids.numel())


def measured(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row of a step of two micro-batches, and its figures computed directly from a copy of the model."""
    network, copy, window, rows = Net(), Net(), [batch(1), batch(2)], []
    seen: dict[str, float] = {}
    for name, module in copy.named_modules():
        if layer := layer_of(name) if name else "":
            module.register_forward_hook(
                lambda m, i, o, layer=layer: seen.update({layer: max(seen.get(layer, 0.0), o.abs().max().item())})
            )
    for part in window:
        logits = copy(**part.inputs)
        (nn.functional.cross_entropy(logits.flatten(0, 1), part.labels.flatten(), reduction="sum") / 20).backward()
    layers: dict[str, list[str]] = {"embed": ["embed.weight"]}
    layers |= {name: [f"{name}.weight", f"{name}.bias"] for name in ("blocks.0", "blocks.1", "head")}
    found: dict[str, nn.Parameter] = dict(copy.named_parameters())
    flat = {
        layer: torch.cat([found[name].grad.flatten() for name in names])  # type: ignore
        for layer, names in layers.items()
    }

    config = from_values({"model": "x", "max_grad_norm": 0.05, "gradient_accumulation_steps": 2})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(
        ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.5, weight_decay=0.01)
    )
    if scale is not None:
        monkeypatch.setitem(accelerator.state.__dict__, "_mixed_precision", "fp16")
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = AcceleratedOptimizer(optimizer.optimizer, scaler=accelerator.scaler)
        accelerator._optimizers = [optimizer]
    run = run_for(config, accelerator)
    monkeypatch.setattr(run.outputs, "record", lambda run, kind, step, row: rows.append((kind, step, row)))
    health = Health(run, network, 1)
    engine = Engine(accelerator, config, lambda phase: health.see_gradient() if phase == "clip" else None)
    assert health.is_due(7)
    with health.measuring(7):
        engine.step(model, optimizer, window)
    ((kind, step, row),) = rows
    assert (kind, step, row["layers"], row["loss_scale"]) == ("health", 7, list(layers), scale)

    def in_half(gradient: torch.Tensor, scale: float) -> tuple[float, float]:
        half = (gradient * scale).half()
        some = gradient != 0
        return (half[some] == 0).float().mean().item(), half[some].isinf().float().mean().item()

    plain, scaled = ({k: in_half(g, s) for k, g in flat.items()} for s in (1.0, scale or 2.0**16))
    expected = {
        "norms": {layer: g.norm().item() for layer, g in flat.items()},
        "activations": seen,
        "flushed": {layer: share for layer, (share, _) in plain.items()},
        "overflowed": {layer: share for layer, (_, share) in plain.items()},
        "flushed_scaled": {layer: share for layer, (share, _) in scaled.items()},
        "overflowed_scaled": {layer: share for layer, (_, share) in scaled.items()},
        "grad_norm": torch.cat(list(flat.values())).norm().item(),
        "zeros": (torch.cat(list(flat.values())) == 0).float().mean().item(),
    }
    return row, expected


@pytest.mark.parametrize("scale", [None, 64.0, 2.0**40])
def test_figures_are_those_computed_directly(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    row, expected = measured(scale, monkeypatch)
    for name, value in expected.items():
        found = dict(zip(row["layers"], row[name], strict=True)) if isinstance(value, dict) else row[name]
        assert found == pytest.approx(value, rel=1e-3, abs=1e-7), name
    assert row["flushed"][2] > 0 and row["zeros"] > 0  # of the last block, and of tokens that are not in the batch
    assert sum(row["exponents"].values()) + row["zeros"] == pytest.approx(1, abs=1e-3)
    if scale == 2.0**40:
        assert row["overflowed_scaled"][3] > 0.5


def test_what_fp16_has_lost_is_told_from_zeros_that_are_right() -> None:
    weight = nn.Parameter(torch.zeros(4, 5))
    weight.grad = torch.full((4, 5), 1e-3)
    weight.grad[2], weight.grad[:, 1] = 0.0, 0.0  # a token that is not there, a unit that is off
    weight.grad[0, 0] = weight.grad[1, 2] = 0.0
    *counts, squares, lost = gradient_of([weight], is_fp16=True)
    assert lost == 2 and counts[0] == 10 and squares == pytest.approx(10e-6)
    assert gradient_of([weight], is_fp16=False)[-1] == 0
    row = figures_of([[*counts, squares, lost]], [20], None)
    assert row["flushed"] == [pytest.approx(2 / 12, rel=1e-3)] and row["flushed_scaled"] == [0.0]


def test_a_sum_of_losses_is_no_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loss is computed in the head, a head's output is that sum, as large as there are targets."""

    class LossHead(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 1e5 * super().forward(input).sum()

    network, rows = Net(), list[dict[str, Any]]()
    network.head.__class__ = LossHead
    run = run_for(from_values({"model": "x"}), Accelerator(cpu=True))
    monkeypatch.setattr(run.outputs, "record", lambda run, kind, step, row: rows.append(row))
    health = Health(run, network, 1)
    with health.measuring(1):
        network(**batch(1).inputs).backward()
        health.see_gradient()
    seen = dict(zip(rows[0]["layers"], rows[0]["activations"], strict=True))
    assert seen["head"] is None and 0 < seen["blocks.0"] < 100


def test_layers_are_blocks_and_modules_outside_of_blocks() -> None:
    assert layer_of("model.layers.3.mlp.up_proj") == "model.layers.3"
    assert layer_of("lm_head") == "lm_head" and layer_of("0") == "0"


def test_early_steps_and_every_nth_are_due() -> None:
    health = Health(run_for(Config()), Net(), 20)
    due = []
    for step in range(65):
        due += [step] if health.is_due(step) else []
    assert due == [1, 2, 4, 8, 16, 20, 40, 60]


def test_large_tensors_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.randn(300, 64, generator=torch.Generator().manual_seed(0)))
    weight.grad = weight.detach() * 1e-6
    whole = gradient_of([weight], is_fp16=False)
    monkeypatch.setattr(health, "PIECE", 1000)
    assert gradient_of([weight], is_fp16=False) == whole


def test_gradients_in_fp64_and_of_complex_weights_are_measured() -> None:
    values = torch.tensor([[0.0, 3.0], [4.0, 0.5]])
    found = []
    for gradient in (values, values.double(), torch.view_as_complex(values), torch.view_as_complex(values.double())):
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        found.append(gradient_of([weight], is_fp16=False))
    assert all(row == pytest.approx(found[0], rel=1e-6) for row in found)
    assert found[0][-2] == pytest.approx(25.25) and sum(found[0][:-2]) == 4


# ---- problems in given figures ---------------------------------------------------------------------------------------


def row(norms: Sequence[float | None], **other: Any) -> dict[str, Any]:
    layers = ["embed", *(f"layers.{i}" for i in range(len(norms) - 2)), "head"]
    same = {name: [0.0] * len(norms) for name in ("flushed", "flushed_scaled")}
    finite = [norm for norm in norms if norm is not None]
    whole = math.hypot(*finite) if len(finite) == len(norms) else None
    own = {"activations": [1.0] * len(norms), "fp16": False, "loss_scale": None}
    return {"layers": layers, "norms": list(norms), "grad_norm": whole, **same, **own, **other}


GOOD, HALF = row([0.5, 1.0, 0.8, 2.0]), {"fp16": True}
CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]]]] = {
    "healthy": ([GOOD] * 9, []),
    "vanishing": ([row([1e-9, 1e-9, 1e-3, 2.0])] * 2, [("vanishing gradient", "layers.0")]),
    "zero": ([row([0.0, 0.0, 0.0, 2.0])] * 2, [("vanishing gradient", "layers.0")]),
    "a tower for images": ([row([0.5, 0.0, 0.8, 2.0], activations=[1.0, None, 1.0, 1.0])] * 2, []),
    "a tower for images in fp16": ([row([0.5, 0.0, 0.8, 2.0], activations=[1.0, None, 1.0, 1.0], **HALF)] * 2, []),
    "once is not enough": ([GOOD, row([0.5, 1e-9, 0.8, 2.0])], []),
    "outside of blocks it is not judged": ([row([1e-9, 1.0, 0.8, 2.0])] * 2, []),
    "vanished later": ([GOOD, *[row([0.5, 1e-9, 0.8, 2.0])] * 2], [("learning rate too high", "layers.0")]),
    "exploding": ([row([1e2, 1e5, 1e3, 2.0])], [("exploding gradient", "layers.0")]),
    "a jump": ([*[GOOD] * 5, row([0.5, 1.0, 900.0, 2.0])], [("exploding gradient", "layers.1")]),
    "a spike": ([*[GOOD] * 5, row([0.5, 1.0, 90.0, 2.0])], []),
    "not finite": ([GOOD, row([0.5, None, 0.8, 2.0])], [("exploding gradient", "layers.0")]),
    "a loss scale that is being found": ([row([0.5, None, 0.8, 2.0], loss_scale=65536.0, **HALF)], []),
    "activations that grow": ([GOOD, row([1.0] * 4, activations=[1.0, 2.0, 150.0, 3.0])],
                              [("learning rate too high", "layers.1")]),
    "activations that were not seen": ([row([1.0] * 4, activations=[None] * 4)] * 3, []),
    "fp16 flushes": ([row([1.0] * 4, flushed=[0.0, 0.2, 0.1, 0.0], **HALF)], [("fp16 underflow", "layers.0")]),
    "fp16 would flush": ([row([1.0] * 4, flushed=[0.0, 0.2, 0.1, 0.0])], []),
    "a loss scale helps": ([row([1.0] * 4, flushed=[0.5] * 4, loss_scale=1024.0, **HALF)], []),
    "or does not": ([row([1.0] * 4, flushed_scaled=[0.0, 0.06, 0.0, 0.0], loss_scale=1024.0, **HALF)],
                    [("fp16 underflow", "layers.0")]),
    "LoRA's first step": ([row([0.0, 1.0, 0.8, 2.0], **HALF), row([0.1, 1.0, 0.8, 2.0], **HALF)], []),
    "fp16 overflows in the step before": ([row([0.5, None, 0.8, 2.0], loss_scale=65536.0, **HALF),
                                           row([0.5, 0.0, 0.8, 2.0], loss_scale=32768.0, **HALF)], []),
    "fp16 flushes all": ([row([0.5, 0.0, 0.8, 2.0], **HALF)] * 2, [("fp16 underflow", "layers.0")]),
    "fp16 overflows": ([row([1.0] * 4, activations=[1.0, 1.0, 4e4, 1.0], **HALF)] * 2,
                       [("fp16 overflow", "layers.1")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_figures_are_judged(name: str) -> None:
    rows, expected = CASES[name]
    assert [(problem.name, problem.layer) for problem in problems_in(rows)] == expected


# ---- in a run --------------------------------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, make, depth, half=False):
        super().__init__()
        self.embed, self.half = nn.Embedding(300, 64), half
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(64, 300)

    def forward(self, input_ids):
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).float()


class Block(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.inner, self.share = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), share

    def forward(self, x):
        return x + self.share * self.inner(x)


def linear(gain):
    layer = nn.Linear(64, 64)
    nn.init.normal_(layer.weight, std=gain / 8)
    return nn.Sequential(layer, nn.ReLU())


def sigmoids():
    return Net(lambda: nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), 30)


def no_normalisation():
    return Net(lambda: linear(3.0), 20)


def half():
    return Net(lambda: Block(3e-4), 4, half=True)


def half_lost():
    return Net(lambda: Block(1e-3), 4, half=True)


def not_half():
    return Net(lambda: Block(1e-3), 4)


def residual():
    return Net(lambda: Block(1.0), 30)
"""
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4}
BERT = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
BERT |= {"num_attention_heads": 4}
AGAIN = ("--resume", "never")
Told = Callable[..., tuple[list[str], list[dict[str, Any]]]]


@pytest.fixture
def train(tmp_path: Path) -> Told:
    """Trains with the flags given; the problems that it names, and the rows of health."""
    (tmp_path / "my_models.py").write_text(MODELS)
    paths = sorted((ROOT / "train").glob("*.py"))
    with (tmp_path / "documents.jsonl").open("w") as file:
        for path in paths:
            file.write(json.dumps({"text": path.read_text(), "label": int(path.name < "g")}) + "\n")

    def run(model: str | dict[str, Any], *flags: Any) -> tuple[list[str], list[dict[str, Any]]]:
        own = ["--model_config", json.dumps(model)] if isinstance(model, dict) else ["--model", f"my_models:{model}"]
        own += ["--dataset", tmp_path / "documents.jsonl", "--tokenizer", "bytes", "--max_length", 128]
        own += ["--micro_batch_size", 8, "--learning_rate", 1e-3, "--warmup_ratio", 0.1, "--gradient_health"]
        own += ["--gradient_health_every_steps", 20, "--rehearse", False, "--predict_memory", False]
        own += ["--measure_memory", False, "--cpu_threads", 1, "--mixed_precision", "no"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ACCELERATE_USE_CPU": "true"}
        done = script(["train/main.py", *own, "--output_dir", tmp_path / "run", *flags], 1, environment)
        assert done.returncode == EXIT_DONE, done.stderr
        told = [line for line in done.stdout.splitlines() if line.startswith("gradient health, step")]
        return told, [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "health"]

    return run


def test_thirty_sigmoid_layers_vanish(train: Told) -> None:
    (told,), rows = train("sigmoids", "--max_steps", 2)
    assert told.startswith("gradient health, step 2: vanishing gradient in layers.0: ")
    assert "LayerNorm" in told and "residual" in told and "initialisation" in told
    assert rows[-1]["norms"][1] < 1e-15 < 0.1 < rows[-1]["norms"][-1]


def test_a_healthy_model_is_not_accused(train: Told) -> None:
    told, rows = train(LLAMA, "--max_steps", 8)
    assert told == [] and [r["step"] for r in rows] == [1, 2, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"),
    sampled(
        [
            (LLAMA, ()),
            (LLAMA, ("--optimizer", "sgd", "--learning_rate", 0.1)),
            (GPT2, ()),
            (LLAMA, ("--adapter", "lora")),
            (BERT, ("--task", "masked_lm")),
            (BERT, ("--task", "sequence_classification", "--learning_rate", 1e-4)),
            ("residual", ()),
        ],
        3,
    ),
)
def test_healthy_models_are_not_accused(model: Any, flags: Sequence[Any], train: Told) -> None:
    told, rows = train(model, *flags, "--max_steps", 64)
    assert told == [] and len(rows) == 8


MOSTLY_FROZEN = """
import os
import transformers


def build():
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.transformer.h.requires_grad_("FROZEN" not in os.environ)
    return model
"""


def test_a_run_that_resumes_with_more_trained_layers_is_measured_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(MOSTLY_FROZEN)
    flags = ["--config", write_recipe(tmp_path), "--output_dir", tmp_path / "run", "--gradient_health"]
    flags += [
        "--model",
        f"{tmp_path / 'own.py'}:build",
        "--tokenizer",
        "bytes",
        "--num_epochs",
        "None",
        "--lr_scheduler",
        "constant",
    ]
    monkeypatch.setenv("FROZEN", "1")
    assert main([str(word) for word in [*flags, "--max_steps", 2]]) == EXIT_DONE
    monkeypatch.delenv("FROZEN")
    assert main([str(word) for word in [*flags, "--max_steps", 4]]) == EXIT_DONE
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "health"]
    assert [(row["step"], len(row["layers"])) for row in rows] == [(1, 3), (2, 3), (4, 5)]


@pytest.mark.slow
@takes_minutes
def test_the_quickstart_is_not_accused(tmp_path: Path) -> None:
    flags = ["--config", "recipes/quickstart.yaml", "--max_steps", 24, "--max_length", 256, "--mixed_precision", "no"]
    flags += ["--gradient_health", "--output_dir", tmp_path / "run", "--rehearse", False, "--cpu_threads", 1]
    done = script(["train/main.py", *flags], 1, {**os.environ, "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == EXIT_DONE, done.stderr
    assert "gradient health" not in done.stdout
    assert sum(r["kind"] == "health" for r in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags", "name", "layers", "remedy"),
    [
        ("no_normalisation", (), "exploding gradient", ("head",), "max_grad_norm"),
        (LLAMA, ("--learning_rate", 0.1), "learning rate too high", ("model.layers.", "lm_head"), "Divide"),
        (GPT2, ("--learning_rate", 0.1), "learning rate too high", ("transformer.",), "Divide"),
        (LLAMA, ("--learning_rate", 10, "--optimizer", "sgd"), "learning rate too high", ("",), "Divide"),
        ("half", (), "fp16 underflow", ("layers.",), "mixed_precision: fp16"),
    ],
)
def test_problems_are_named(
    model: Any, flags: Sequence[Any], name: str, layers: tuple[str, ...], remedy: str, train: Told
) -> None:
    told, _ = train(model, "--max_steps", 20, *flags)
    assert told and f": {name} in " in told[0] and remedy in told[0]
    assert told[0].split(f"{name} in ")[1].startswith(layers)


@pytest.mark.slow
def test_what_fp16_loses_is_what_it_was_expected_to_lose(train: Told) -> None:
    (_, (lost,)), (_, (expected,)) = train("half_lost", "--max_steps", 1), train("not_half", "--max_steps", 1, *AGAIN)
    assert lost["fp16"] and not expected["fp16"]
    counted, foreseen = (np.array(row["flushed"][1:5]) for row in (lost, expected))
    assert (foreseen > 0.005).all() and (foreseen < 0.03).all()
    # The documents are this repository's own code, so the few gradients of a single layer vary with it.
    assert counted.mean() == pytest.approx(foreseen.mean(), rel=0.4)
    assert counted == pytest.approx(foreseen, rel=0.7)


def test_measuring_changes_nothing(tmp_path: Path) -> None:
    def trained(name: str, *more: str) -> dict[str, str]:
        words = ["train/main.py", "--config", write_recipe(tmp_path), "--max_steps", 3, "--output_dir", tmp_path / name]
        done = script([*words, *more], 1, {**os.environ, "ACCELERATE_USE_CPU": "true"})
        assert done.returncode == EXIT_DONE, done.stderr
        return final_files(tmp_path / name)

    assert trained("with", "--gradient_health", "--gradient_health_every_steps", "1") == trained("without")
    kinds = [[r["kind"] for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("with", "without")]
    assert [of.count("health") for of in kinds] == [3, 0]


@pytest.mark.parametrize(
    ("values", "launch", "said"),
    [
        ({}, Launch(2, engine="deepspeed"), "deepspeed in the launch file: use ddp.yaml or fsdp2.yaml"),
        ({}, Launch(2, tp_size=2), "tensor parallel 2 in the launch file"),
        ({"optimizer_in_backward": True, "max_grad_norm": None}, Launch(), "optimizer_in_backward"),
    ],
)
def test_gradients_that_cannot_be_seen_are_refused(values: dict[str, Any], launch: Launch, said: str) -> None:
    extra = extras.classes()["gradients"]()
    config = from_values({"model": "x", "gradient_health": True, **values})
    with pytest.raises(UsageError, match=f"gradient_health cannot be combined with .*{said}"):
        extra.check(config, launch)
    extra.check(config.changed(gradient_health=False), launch)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_with_whole_and_with_sharded_weights_see_what_one_process_sees(llama_recipe: Path) -> None:
    flags = ["--config", llama_recipe, "--max_steps", "2", "--gradient_health", "--rehearse", "False"]
    flags += ["--global_batch_size", "8"]
    rows = {}
    for name, processes in (("cpu", 1), ("ddp", 2), ("fsdp2", 2)):
        output = llama_recipe.parent / name
        words = [*flags, "--output_dir", output, "--micro_batch_size", 8 // processes]
        launch = ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{name}.yaml"]
        launch += ["--num_processes", str(processes), "--mixed_precision", "no", "--main_process_port", "0"]
        command = [sys.executable, *launch, "train/main.py", *map(str, words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == EXIT_DONE, done.stderr[-3000:]
        rows[name] = [r for r in read_metrics(output / "metrics.jsonl") if r["kind"] == "health"][-1]
    for name in ("ddp", "fsdp2"):
        assert rows[name]["layers"] == rows["cpu"]["layers"]
        for figure in ("grad_norm", "norms", "activations", "flushed", "zeros"):
            assert rows[name][figure] == pytest.approx(rows["cpu"][figure], rel=0.01), (name, figure)


def test_a_resumed_run_compares_with_how_the_whole_run_began(tmp_path: Path) -> None:
    flags = ("--config", write_recipe(tmp_path), "--output_dir", tmp_path / "run", "--save_every_steps", 1)
    flags += ("--gradient_health", "--gradient_health_every_steps", 1, "--learning_rate", 3.0)
    flags += ("--max_steps", 8, "--num_epochs", None, "--warmup_steps", 0)
    assert run(flags, tmp_path / "logs", fault=at_step(3, "begin", die))[0].status == KILLED
    assert run(flags, tmp_path / "logs")[0].status == EXIT_DONE
    notes = json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]
    assert any(re.match(r"gradient health, step \d: learning rate too high", note) for note in notes), notes
