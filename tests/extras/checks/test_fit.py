"""Tokenizers that lack what a task needs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_tokenizers import tokenizer_of
from support import run_for
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from train.config import Config
from train.extras.checks import Extra
from train.extras.checks.fit import check_shards, check_tokenizer
from train.records import UserError
from train.tasks import Task, load_task


def test_only_the_index_of_a_table_is_explained_by_sizes() -> None:
    said: list[str] = []
    for error in (IndexError("list index out of range"), RuntimeError("device-side assert triggered")):
        run: Any = SimpleNamespace(config=Config(), outputs=SimpleNamespace(say=said.append))
        error.add_note = said.append  # type: ignore
        assert Extra().failed(run, error) is None
    assert len(said) == 1 and said[0].startswith("A table of the model may be too small")


def test_a_process_that_was_killed_while_it_tokenised_is_explained() -> None:
    words = "One of the subprocesses has abruptly died during map operation."  # by 🤗 Datasets
    found = Extra().failed(None, RuntimeError(f"{words} To debug the error, disable multiprocessing."))
    assert found is not None and "host's memory was full. Try --preprocessing_num_workers 1" in found


def test_a_model_of_which_nothing_is_trained_is_explained() -> None:
    with pytest.raises(ValueError) as caught:
        torch.optim.AdamW([])
    assert Extra().failed(None, caught.value) == (
        "model: none of its parameters is trained. Leave some with requires_grad=True."
    )


@pytest.mark.parametrize(
    ("rows", "ranks", "fits"), [(2, 2, True), (2, 3, False), (5, 4, False), (8, 4, True), (1, 1, True)]
)
def test_the_largest_element_of_a_shard_without_rows_is_refused(rows: int, ranks: int, fits: bool) -> None:
    """Rows are dealt in equal pieces but the last: of 5 to 4 ranks 2, 2, 1 and none."""
    mesh = SimpleNamespace(size=lambda dim: (7, ranks)[dim], ndim=2)  # replicas of shards
    shard: Any = SimpleNamespace(shape=(rows, 3), requires_grad=True, device_mesh=mesh)
    frozen: Any = SimpleNamespace(shape=(1, 3), requires_grad=False, device_mesh=mesh)
    model: Any = SimpleNamespace(named_parameters=lambda: [("frozen", frozen), ("head.weight", shard)])
    if fits:
        check_shards(model)
    else:
        with pytest.raises(
            UserError, match=rf"head\.weight has only {rows} rows, so some ranks hold none\. Use --grad_norm_type 2"
        ):
            check_shards(model)


def test_a_tokenizer_with_gaps_in_its_ids_needs_an_embedding_for_the_highest(tmp_path: Path) -> None:
    vocabulary = {"<|end|>": 0, "a": 1, "b": 2, "c": 700}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), eos_token="<|end|>")
    assert len(tokenizer) == 4
    run = run_for(Config().changed(output_dir=str(tmp_path)))
    with pytest.raises(UserError, match="the model has 700 embeddings, the tokenizer 701 tokens"):
        Extra().check_model_config(run, LlamaConfig(vocab_size=700), load_task("causal_lm"), tokenizer)
    Extra().check_model_config(run, LlamaConfig(vocab_size=701), load_task("causal_lm"), tokenizer)


def made(name: str, **options: Any) -> Task:
    return load_task(name)(Config().changed(task=name, **options))


def test_masked_lm_refuses_a_tokenizer_without_mask_token() -> None:
    tokenizer = tokenizer_of("bytes")
    check_tokenizer(made("masked_lm"), tokenizer)
    tokenizer.mask_token = None
    with pytest.raises(UserError, match="masked_lm: the tokenizer has no mask token"):
        check_tokenizer(made("masked_lm"), tokenizer)
    check_tokenizer(made("causal_lm"), tokenizer)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm", "sequence_classification"])
def test_a_tokenizer_without_padding_and_end_token_is_refused(task: str) -> None:
    tokenizer = tokenizer_of("bytes")
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(UserError, match=f"{task}: the tokenizer has neither a padding nor an end token"):
        check_tokenizer(made(task), tokenizer)


@pytest.mark.parametrize("task", ["masked_lm", "sequence_classification"])
def test_a_length_without_room_for_text_is_refused(task: str) -> None:
    with pytest.raises(UserError, match=r"max_length: 2 leaves no room .* Give 3 or more"):
        check_tokenizer(made(task, max_length=2), tokenizer_of("bytes"))
    check_tokenizer(made(task, max_length=3), tokenizer_of("bytes"))
    check_tokenizer(made("causal_lm", max_length=2), tokenizer_of("bytes"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before, the hint is a line of output")
def test_an_index_that_no_table_has_gets_a_hint_and_other_errors_get_none() -> None:
    run = run_for(Config().changed(max_length=77))
    on_a_card, other = map(RuntimeError, ("CUDA error: device-side assert triggered", "CUDA error: misaligned address"))
    for error in (on_a_card, other):
        assert Extra().failed(run, error) is None
    assert "max_length 77 positions" in on_a_card.__notes__[0]  # type: ignore
    assert not hasattr(other, "__notes__")
