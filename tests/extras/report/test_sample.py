"""What a trained language model writes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import run_for
from torch import nn

from train.config import Config
from train.extras.readers.own_tokenizers import build_tokenizer
from train.extras.report import sample as sample_module
from train.extras.report.sample import sample, sample_of
from train.tasks import load_task

BYTES = build_tokenizer("bytes", ())


def test_a_causal_model_continues_the_beginning_of_the_text() -> None:
    run = run_for(Config().changed(max_length=24, seed=3))
    task = load_task("causal_lm")(run.config)
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    first, again = (sample(run, task, model, BYTES, "to be or not to be") for _ in range(2))
    assert first is not None and first == again
    assert first.startswith("to be or not⟪") and first.endswith("⟫")
    assert sample(run, task, nn.Linear(1, 1), BYTES, "to be") is None
    assert sample(run, task, model, BYTES, "") is None  # nothing to begin with
    assert sample(run, load_task("masked_lm")(run.config), model, BYTES, "to be or not") is None


def test_the_beginning_is_framed_as_the_task_frames_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose texts bring their own marks would else train without a start token and write after one."""
    run = run_for(Config().changed(max_length=24))
    task, given = load_task("causal_lm")(run.config), list[list[int]]()
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)

    def generate(prompt: torch.Tensor, **options: Any) -> torch.Tensor:
        given.append(prompt[0].tolist())
        return prompt

    monkeypatch.setattr(model, "generate", generate)
    ids = BYTES.encode("to be or not", add_special_tokens=False)
    sample(run, task, model, BYTES, "to be or not to be")
    monkeypatch.setattr(task, "framed", lambda ids, tokenizer: ids)
    sample(run, task, model, BYTES, "to be or not to be")
    assert given == [[BYTES.eos_token_id, *ids], ids]


def test_words_without_an_end_make_a_short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_module, "sample", lambda *_: "x" * 100_000)
    corpus: Any = SimpleNamespace(splits={"validation": [{"text": "x"}]})
    data = SimpleNamespace(task=None, tokenizer=None, corpus=corpus)
    parts: Any = SimpleNamespace(data=data, state=SimpleNamespace(model=nn.Linear(1, 1)))
    run: Any = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
    assert sample_of(run, parts) == "x" * 5000
