"""What a trained language model writes, and what its bits per byte compare with."""

from __future__ import annotations

import pytest
import transformers
from support import run_for
from torch import nn

from train.config import Config
from train.extras.readers.own_tokenizers import build_tokenizer
from train.extras.report.sample import references, sample
from train.tasks import load_task

BYTES = build_tokenizer("bytes", ())


def test_references_are_entropy_and_xz() -> None:
    found = references(["ab" * 500])
    assert found["order-0 entropy"] == pytest.approx(1.0)
    assert found["xz -9"] < 1.0


def test_references_are_those_of_a_part_of_a_large_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.extras.report.sample.REFERENCE_BYTES", 1000)
    read = []
    texts = (read.append(text) or text for text in ["ab" * 300, "ba" * 300, "c" * 10**9])
    assert references(texts) == references(["ab" * 300 + "ba" * 200])
    assert len(read) == 2


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
