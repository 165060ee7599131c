"""A model that ``from_pretrained`` returns, which is in evaluation mode, is trained with its dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_tokenizers import tokenizer_of
from test_main import _own_signals, stopping_after, train, trained_losses  # noqa: F401

from train.records import EXIT_DONE, EXIT_STOPPED

FLAGS = ("--model_config", "None", "--global_batch_size", 2, "--eval_every_steps", 2, "--mixed_precision", "no")
IN_BACKWARD = ("--optimizer_in_backward", True, "--max_grad_norm", None)


def stored(folder: Path, dropout: float) -> Path:
    """A GPT-2 as a person has it, with its tokenizer."""
    torch.manual_seed(0)
    rates: dict[str, Any] = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    config = transformers.GPT2Config(vocab_size=259, **sizes, **rates)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer_of("bytes").save_pretrained(folder)
    return folder


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[bool]]:
    """Whether the modules were in training mode, by whether gradients were wanted, in each forward of a GPT-2."""
    plain, found = transformers.GPT2LMHeadModel.forward, dict[bool, list[bool]]({True: [], False: []})

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[torch.is_grad_enabled()] += [module.training for module in self.modules()]
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", forward)
    return found


@pytest.mark.parametrize("rehearse", [False, True])
@pytest.mark.parametrize("own", [(), IN_BACKWARD, ("--on_oom", "split")], ids=["plain", "in backward", "recovery"])
def test_all_modules_are_in_training_mode_in_every_step_and_in_none_of_an_evaluation(
    own: tuple[Any, ...], rehearse: bool, recipe: Path, tmp_path: Path, modes: dict[bool, list[bool]]
) -> None:
    flags = (*FLAGS, *own, "--rehearse", rehearse, "--max_steps", 4, "--model", stored(tmp_path / "gpt2", 0.1))
    assert train(recipe, tmp_path / "run", *flags, *stopping_after(2)) == EXIT_STOPPED
    before = len(modes[True])
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    assert 0 < before < len(modes[True]) and all(modes[True])
    assert modes[False] and not any(modes[False])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4


@pytest.mark.parametrize("is_function", [False, True])
def test_no_kernels_come_from_the_hub(
    is_function: bool, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers from 5.25 on takes them in ``from_pretrained`` unless told otherwise."""
    monkeypatch.setenv("USE_HUB_KERNELS", "")
    monkeypatch.delenv("USE_HUB_KERNELS")
    plain, uses = transformers.GPT2LMHeadModel.forward, set[bool]()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        uses.add(self.use_kernels)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", forward)
    model = stored(tmp_path / "gpt2", 0.0)
    (tmp_path / "own.py").write_text(
        "import transformers\n\n\ndef build(config):\n"
        f"    return transformers.AutoModelForCausalLM.from_pretrained({str(model)!r})\n"
    )
    own = ("--model", f"{tmp_path / 'own.py'}:build", "--tokenizer", "bytes") if is_function else ("--model", model)
    assert train(recipe, tmp_path / "run", *FLAGS, "--max_steps", 1, *own) == EXIT_DONE
    assert uses == {False}


def test_a_classifier_is_trained_on_another_number_of_classes(recipe: Path, tmp_path: Path) -> None:
    """Its head is drawn like a new one; everything else is the one that was stored."""
    config = transformers.GPT2Config(vocab_size=259, n_embd=16, n_layer=2, n_head=2, n_positions=64, num_labels=2)  # type: ignore
    before = transformers.GPT2ForSequenceClassification(config)
    before.save_pretrained(tmp_path / "two")
    tokenizer_of("bytes").save_pretrained(tmp_path / "two")
    rows = [{"text": f"text {number}", "label": "abc"[number % 3]} for number in range(30)]
    (tmp_path / "three.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [*FLAGS, "--task", "sequence_classification", "--model", tmp_path / "two", "--learning_rate", 1e-9]
    flags += ["--dataset", tmp_path / "three.jsonl", "--max_steps", 2, "--mixed_precision", "no"]
    assert train(recipe, tmp_path / "run", *flags) == EXIT_DONE
    after = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
    assert after.config.id2label == {0: "a", 1: "b", 2: "c"} and after.score.weight.shape == (3, 16)
    assert torch.allclose(after.transformer.wte.weight, before.transformer.wte.weight, atol=1e-6)


@pytest.mark.parametrize("own", [(), pytest.param(IN_BACKWARD, marks=pytest.mark.slow)], ids=["plain", "in backward"])
def test_dropout_counts_and_is_not_lost_by_a_resume(own: tuple[Any, ...], recipe: Path, tmp_path: Path) -> None:
    found = {}
    for dropout in (0.0, 0.5):
        model = stored(tmp_path / f"gpt2-{dropout}", dropout)
        flags = (*FLAGS, *own, "--rehearse", False, "--max_steps", 4, "--model", model)
        whole, pieces = (tmp_path / f"{name}-{dropout}" for name in ("whole", "pieces"))
        assert train(recipe, whole, *flags) == EXIT_DONE
        assert train(recipe, pieces, *flags, *stopping_after(2)) == EXIT_STOPPED
        assert train(recipe, pieces, *flags) == EXIT_DONE
        found[dropout] = trained_losses(whole)
        assert sorted(found[dropout]) == [1, 2, 3, 4]
        assert trained_losses(pieces) == found[dropout]
    assert all(abs(found[0.5][step] - found[0.0][step]) > 1e-3 for step in found[0.0])


def test_memory_of_dropout_is_predicted(recipe: Path, tmp_path: Path) -> None:
    """Also for a stored model: in evaluation mode, as it is loaded, it would keep no masks of dropout."""
    peaks = {}
    for dropout in (0.0, 0.5):
        model, run = stored(tmp_path / f"gpt2-{dropout}", dropout), tmp_path / f"run-{dropout}"
        assert train(recipe, run, *FLAGS, "--predict_memory", True, "--max_steps", 2, "--model", model) == EXIT_DONE
        summary = json.loads((run / "summary.json").read_text())
        peaks[dropout] = summary["predicted_peak_bytes"]
        assert peaks[dropout] == pytest.approx(summary["peak_allocated_bytes"], rel=5e-3)
    assert peaks[0.5] > 1.05 * peaks[0.0]
