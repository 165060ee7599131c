"""Layers compiled one by one: the same loss and gradients, causal attention, few compilations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import EVERY_CASE, run_for, takes_minutes
from test_main import train as train_run
from test_model import GPT2, LLAMA, MODES, built
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from train.config import Config
from train.extras.activations import Extra
from train.extras.activations.recompute import compile_layers
from train.extras.long_sequences.attention import Documents
from train.extras.losses.in_head import use_loss_in_head
from train.extras.weightless import uncompiled
from train.model import ModelWithLoss
from train.records import EXIT_DONE, UserError

DROPOUT = {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}


def counting() -> CompileCounterWithBackend:
    """Traces and differentiates as inductor does, without its minutes of C++, and counts compilations."""
    return CompileCounterWithBackend("aot_eager")


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model: nn.Module, length: int, rows: list[list[int]] | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of two rows, each of one document or of some of these lengths."""
    model.zero_grad()
    ids = torch.arange(3, 3 + 2 * length).view(2, length)
    inputs: dict[str, Any] = {"input_ids": ids}
    if rows is not None:
        documents = Documents.of(rows)
        inputs |= {"documents": documents, "position_ids": documents.position_ids()}
    torch.manual_seed(1)
    with_loss = ModelWithLoss(model.train())
    use_loss_in_head(with_loss, "chunked")
    loss = with_loss(inputs, ids.clone())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [MODES[1], *[{}, MODES[2]] * EVERY_CASE])
def test_loss_and_gradients_stay_and_three_lengths_need_two_compilations(mode: dict[str, Any]) -> None:
    model_config = DROPOUT if mode == MODES[1] else LLAMA
    plain, compiled = built(model_config, **mode), built(model_config, **mode)
    assert compile_layers(compiled, compiler := counting()) == 2
    for length in (12, 20, 31):
        loss, expected = gradients(plain, length)
        again, found = gradients(compiled, length)
        assert again == pytest.approx(loss, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():  # fp32, the same operations
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    # Layers that recompute and layers that do not are two functions.
    assert compiler.frame_count == (4 if mode == MODES[1] else 2)


BREAKS = [
    pytest.param({"packing": True}, id="packed", marks=pytest.mark.slow),
    pytest.param({"tiled_mlp": True}, id="tiled"),
    pytest.param({"packing": True, "gradient_checkpointing_offload": True}, id="offloaded", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", ["full", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("breaks", BREAKS)
def test_layers_that_recompute_are_compiled_around_what_is_not(kind: str, breaks: dict[str, Any]) -> None:
    """Attention within documents and tiles are left out; torch would leave out all of a checkpoint around them."""
    plain, compiled = (built(LLAMA, gradient_checkpointing=kind, **breaks) for _ in range(2))
    compile_layers(compiled, compiler := counting())
    for length in (12, 20, 31):
        cut = [[5, length - 5], [7, length - 7]]
        loss, expected = gradients(plain, length, cut if "packing" in breaks else None)
        again, found = gradients(compiled, length, cut if "packing" in breaks else None)
        assert again == pytest.approx(loss, rel=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert compiler.frame_count >= 4


@pytest.mark.slow
def test_checkpointing_that_is_switched_on_in_a_run_leaves_layers_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiler = built(LLAMA, packing=True), counting()
    compile_layers(model, compiler)
    gradients(model, 12, [[5, 7], [7, 5]])
    before, name = compiler.frame_count, "train.extras.activations.recompute.compile_layers"
    monkeypatch.setattr(name, lambda model: compile_layers(model, compiler))
    found = Extra().memory_measure(run_for(Config().changed(compile=True)), ModelWithLoss(model))
    assert found is not None and found[1]()
    for length in (20, 31):
        gradients(model, length, [[5, length - 5], [7, length - 7]])
    assert compiler.frame_count > before


def test_documents_of_other_lengths_compile_nothing_again() -> None:
    """Windows of eight tokens: whether a document is longer than one is looked at outside of what is compiled."""
    shape = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    model = built(shape, packing=True)
    compile_layers(model, compiler := counting())
    for longest in (9, 7, 12, 5, 14, 11):
        gradients(model, 20, [[longest, 20 - longest]] * 2)
    assert compiler.frame_count == 4  # of two different halves of a layer, each for one and for all lengths


def test_attention_stays_causal_without_a_mask() -> None:
    length, shapes, calls = 20, [], []

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            shapes.extend([tuple(value.shape)] if isinstance(value, Tensor) else [])
            calls.extend([node] if "scaled_dot_product_attention" in str(node.target) else [])
        return graph.forward

    model = built(LLAMA)
    compile_layers(model, look)
    gradients(model, length)
    assert calls and all(node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] for node in calls)
    assert shapes and not any(shape[-2:] == (length, length) for shape in shapes)


def test_names_of_weights_stay_and_the_sample_runs_uncompiled() -> None:
    model = built(LLAMA)
    names = list(model.state_dict())
    compile_layers(model, compiler := counting())
    with uncompiled(model):
        gradients(model, 8)
    assert compiler.frame_count == 0
    gradients(model, 8)
    assert compiler.frame_count == 1
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_memory_is_metered_uncompiled_and_what_follows_is_compiled_even_so(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch never compiles a function that it first met while operators were watched."""
    compiler, name = counting(), "train.extras.activations.recompute.compile_layers"
    monkeypatch.setattr(name, lambda model: compile_layers(model, compiler))
    monkeypatch.setattr("train.extras.meter.cpu.TRACK_EVERY_STEPS", 1000)
    assert train_run(recipe, tmp_path / "run", "--compile", "True", "--num_epochs", 3) == EXIT_DONE
    assert 1 <= compiler.frame_count < 8


def test_layers_that_only_their_model_names_are_compiled_too() -> None:
    """As in older code for transformers, whose layers cannot recompute by themselves."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]  # type: ignore
    assert compile_layers(model, "eager") == 2


def test_model_without_repeated_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"compile: this model is not of transformers, and has no nn.ModuleList"):
        compile_layers(nn.Linear(2, 2))


@pytest.mark.slow
@takes_minutes
def test_compiled_run_learns_the_same_and_goes_on_exactly(llama_recipe: Path, tmp_path: Path) -> None:
    """By inductor, in whole runs; a resumed one equals an uninterrupted one."""
    flags = ("--gradient_checkpointing", "full", "--lr_scheduler", "constant", "--measure_memory", "False")
    plain, whole, pieces = tmp_path / "plain", tmp_path / "whole", tmp_path / "pieces"
    assert train_run(llama_recipe, plain, *flags, "--max_steps", 4) == EXIT_DONE
    assert train_run(llama_recipe, whole, *flags, "--compile", "True", "--max_steps", 4) == EXIT_DONE
    for steps in (2, 4):
        assert train_run(llama_recipe, pieces, *flags, "--compile", "True", "--max_steps", steps) == EXIT_DONE
    stored = [load_file(run / "final" / "model.safetensors") for run in (plain, whole, pieces)]
    assert stored[0].keys() == stored[1].keys()
    for name, weight in stored[1].items():
        torch.testing.assert_close(weight, stored[0][name], rtol=1e-3, atol=2e-4)  # Adam magnifies last bits
        torch.testing.assert_close(weight, stored[2][name], rtol=0, atol=0)
