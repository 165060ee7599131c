"""A model that is to predict the next token does not see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from made_tokenizers import tokenizer_of
from support import run_for
from torch import Tensor, nn

from train.config import Config
from train.extras import checks, small_copy
from train.extras.small_copy import obstacle_to_task
from train.model import build_model
from train.records import UserError
from train.tasks import causal_lm, masked_lm

BYTES = tokenizer_of("bytes")
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {"model_type": "bert", **SHAPE}
SEES = "its tokens see those that follow"


def built(
    model_config: dict[str, Any] | None = None, task: Any = causal_lm.Task, has_weights: bool = True, **fields: Any
) -> Any:
    torch.manual_seed(0)
    config = Config().changed(**{"model_config": model_config, "max_length": 32, **fields})
    return build_model(run_for(config), task, BYTES, has_weights=has_weights).model


def change_before(model: nn.Module) -> float:
    """By how much outputs change at the tokens before one that is changed."""
    ids = torch.arange(40, 52).unsqueeze(0)
    other = ids.clone()
    other[:, -1] = 7
    with torch.no_grad():
        first, second = (model.eval()(input_ids=tokens).logits[:, :-1] for tokens in (ids, other))
    return (first - second).abs().max().item()


IN_VAIN = ("big_bird", "roformer", "rembert")
"""Models that transformers 5.17 has see the future all the same."""


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra", "camembert", *IN_VAIN])
def test_an_encoder_from_scratch_becomes_a_decoder(model_type: str) -> None:
    try:
        model = built({**SHAPE, "model_type": model_type})
    except UserError as error:
        assert SEES in str(error) and model_type in IN_VAIN and transformers.__version__.startswith("5.17."), error
        return
    assert model.config.is_decoder is True
    assert change_before(model) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model_config",
    [
        {"model_type": "llama", **SHAPE},
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2},
        {"model_type": "gpt_neox", **SHAPE, "is_decoder": False},
        {"model_type": "gpt_neox_japanese", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"is_decoder": False},
        {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        {"model_type": "mistral", **SHAPE, "num_key_value_heads": 1, "sliding_window": 3},
        {"model_type": "mixtral", **SHAPE, "num_key_value_heads": 1, "num_local_experts": 4},
        {"model_type": "bart", "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8},
    ],
    ids=lambda value: value["model_type"],
)
def test_decoders_are_taken(model_config: dict[str, Any], dtype: str) -> None:
    assert change_before(built(model_config, dtype=dtype)) < 1e-6


@pytest.mark.parametrize("model_type", ["bert", "roformer"])  # the layers of the second do not say what they see
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_encoder_that_stays_one_is_refused(model_type: str, dtype: str) -> None:
    with pytest.raises(UserError, match=rf"model '{model_type}': {SEES} \(is_decoder: false.*--task masked_lm"):
        built({**SHAPE, "model_type": model_type, "is_decoder": False}, dtype=dtype)


def test_another_switch_is_seen_too() -> None:
    xlm = {"model_type": "xlm", "emb_dim": 16, "n_layers": 1, "n_heads": 2}
    with pytest.raises(UserError, match=f"model 'xlm': {SEES}, so"):
        built(xlm)
    assert change_before(built({**xlm, "causal": True})) == 0


def test_a_stored_encoder_is_refused_with_and_without_its_weights(tmp_path: Path) -> None:
    stored = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE, vocab_size=259))
    stored.save_pretrained(tmp_path)
    for weights in (True, False):
        with pytest.raises(UserError, match=rf"model '{tmp_path}': {SEES}.*is_decoder: true") as caught:
            built(model=str(tmp_path), has_weights=weights)
        assert "\n" not in str(caught.value)
    assert built(model=str(tmp_path), task=masked_lm.Task)
    stored.config.is_decoder = True
    stored.save_pretrained(tmp_path)
    assert change_before(built(model=str(tmp_path))) == 0


class Averaging(nn.Module):
    """Mixes each token with the mean of all, or of those up to it; has state, randomness and a part out of training."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(300, 8)
        self.frozen = nn.Dropout(0.5).eval()
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 300)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.embedding(input_ids)
        hidden *= 2
        sums = hidden.cumsum(1) if self.causal else hidden.sum(1, keepdim=True)
        noise = torch.rand(())
        return {"logits": self.head(self.dropout(hidden + sums + noise))}


FUNCTIONS = """
from test_causality import Averaging
def looks_back():
    return Averaging(causal=True)
def looks_ahead():
    return Averaging(causal=False)
"""


@pytest.mark.parametrize("max_length", [2, 32])
def test_models_of_ones_own_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_length: int) -> None:
    (tmp_path / "own_causality.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with pytest.raises(UserError, match=f"'own_causality:looks_ahead': {SEES}"):
        built(model="own_causality:looks_ahead", max_length=max_length)
    assert built(model="own_causality:looks_back", max_length=max_length).causal
    assert built(model="own_causality:looks_ahead", max_length=max_length, check_model=False)


def check(model: nn.Module) -> None:
    config = Config().changed(model="own:model", tokenizer="bytes", max_length=32)
    assert obstacle_to_task(model, causal_lm.Task, config, 300, 0) is None


def test_trying_leaves_no_trace() -> None:
    model = Averaging(causal=True)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and model.dropout.training and not model.frozen.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_large_models_and_those_that_cannot_be_tried_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    check(nn.Linear(2, 3))
    with torch.device("meta"):
        check(Averaging(causal=False))
    monkeypatch.setattr(small_copy, "TRIED_PARAMETERS", 1000)
    model = Averaging(causal=False)
    check(model)
    assert not model.calls


@pytest.mark.parametrize(
    ("most", "said"), [(1000, ["model: too large to try whether padding or later tokens"]), (9**9, [])]
)
def test_a_run_says_that_a_model_is_too_large_to_be_tried(
    most: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.extras.checks.fit.TRIED_PARAMETERS", most)
    notes: list[str] = []
    config = Config().changed(model="own:model", tokenizer="bytes", max_length=32)
    run: Any = SimpleNamespace(config=config, is_planned=False, outputs=SimpleNamespace(note=notes.append))
    checks.Extra().check_model(run, Averaging(causal=True), causal_lm.Task, (300, 0))
    assert [note[: len(line)] for note, line in zip(notes, said, strict=True)] == said
