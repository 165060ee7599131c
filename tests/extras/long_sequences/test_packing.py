"""Several examples in one row: which, what a batch of rows holds, and the same update as with padding."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from support import evaluation_batches
from test_main import _own_signals as _own_signals
from test_main import checkpoint_digests, stopping_after, train, trained_losses
from transformers import AutoConfig, AutoModelForCausalLM

from train import extras
from train.batching import Batches, Loading
from train.config import Config
from train.extras.long_sequences import attention, packing
from train.extras.long_sequences.attention import Documents
from train.extras.long_sequences.packing import best_fit, collate_packed, pack_split
from train.extras.longest import longest_of
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import (
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_USAGE,
    IGNORE,
    BatchArithmetic,
    MicroBatch,
    UsageError,
    column,
)
from train.step import Engine, optimizer_step
from train.tasks import Task, load_task

LENGTHS = [12, 3, 7, 12, 1, 5, 5, 9, 2, 8]
ROOM = 12


def causal_examples(lengths: list[int] = LENGTHS) -> datasets.Dataset:
    """Example i holds the token 10 + i, and ends with the token after."""
    tokens = [[10 + i] * n + [11 + i] for i, n in enumerate(lengths)]
    return datasets.Dataset.from_dict({"tokens": tokens, "length": lengths, "num_bytes": [1.5 * n for n in lengths]})


def masked_examples() -> datasets.Dataset:
    columns = {
        "tokens": [[10 + i] * n for i, n in enumerate(LENGTHS)],
        "special": [[True] + [False] * (n - 1) for n in LENGTHS],
        "length": LENGTHS,
        "vocab_size": [60] * len(LENGTHS),
        "mask_id": [2] * len(LENGTHS),
    }
    return datasets.Dataset.from_dict(columns)


def task_of(name: str = "causal_lm") -> Task:
    return load_task(name)(Config().changed(task=name))


def collate_of(task: Task) -> Any:
    return partial(collate_packed, pad_id=0, collate=task.collate)


def batches_of(examples: datasets.Dataset, task: Task, size: int = 2) -> list[MicroBatch]:
    packed = pack_split(examples, ROOM)
    windows = Batches(packed, Loading(collate_of(task)), BatchArithmetic(size, 1, 1), 0, 5).steps(0, 0)
    return [batch for window in windows for batch in window]


# Which examples share a row


def test_longest_first_each_where_it_leaves_least_over() -> None:
    assert best_fit(LENGTHS, ROOM) == [[0], [3], [7, 1], [9, 8, 4], [2, 5], [6]]
    assert best_fit([], 8) == []


def test_every_example_once_and_nearly_as_few_rows_as_can_be() -> None:
    lengths = np.random.default_rng(0).integers(1, 513, size=4000)
    rows = best_fit(lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(4000))
    assert max(int(lengths[row].sum()) for row in rows) <= 512
    assert len(rows) <= 1.01 * lengths.sum() / 512
    assert rows == best_fit(lengths, 512)


def test_a_row_adds_up_its_members() -> None:
    packed = pack_split(causal_examples(), ROOM)
    assert column(packed, "length").tolist() == [12, 12, 12, 11, 12, 5]
    assert column(packed, "num_bytes").sum() == 1.5 * sum(LENGTHS)
    assert packed[3]["member_ids"] == [9, 8, 4]
    assert packed[3]["tokens"] == [[19] * 8 + [20], [18] * 2 + [19], [14, 15]]


def test_rows_are_kept_on_disk_and_known_by_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pack_split(causal_examples(), ROOM)
    assert pack_split(causal_examples(), 13)._fingerprint != first._fingerprint
    assert pack_split(causal_examples([*LENGTHS[:-1], 4]), ROOM)._fingerprint != first._fingerprint
    monkeypatch.setattr(packing, "best_fit", None)  # to be called would fail
    again = pack_split(causal_examples(), ROOM)
    assert again._fingerprint == first._fingerprint
    assert again[:] == first[:]


def test_packed_rows_that_are_damaged_are_packed_again() -> None:
    rows = pack_split(causal_examples(), 11)
    known, file = rows[:], Path(rows.cache_files[0]["filename"])
    file.write_bytes(file.read_bytes().replace(b"\x0e\0\0\0", b"\x0f\0\0\0"))
    assert pack_split(causal_examples(), 11)[:] == known


# Batches


def test_a_batch_says_where_each_document_begins() -> None:
    rows = pack_split(causal_examples(), ROOM).with_format("numpy")
    batch = collate_of(task_of())([{**rows[i], "id": i} for i in (3, 5)], (0,))
    assert batch.inputs["input_ids"].tolist() == [[19] * 8 + [18, 18, 14], [16] * 5 + [0] * 6]
    assert batch.labels.tolist() == [[19] * 7 + [20, 18, 19, 15], [16] * 4 + [17] + [IGNORE] * 6]
    assert batch.inputs["position_ids"].tolist() == [[*range(8), 0, 1, 0], [*range(5), *range(6)]]
    documents = batch.inputs["documents"]
    assert documents.lengths == ((8, 2, 1), (5, 6))
    assert documents.boundaries.tolist() == [0, 8, 10, 11, 16, 22]
    assert (batch.num_targets, batch.num_tokens, batch.example_ids) == (16, 16, (3, 5))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_target_is_in_one_batch_of_an_epoch(workers: int) -> None:
    packed = pack_split(causal_examples(), ROOM)
    batches = Batches(packed, Loading(collate_of(task_of()), workers), BatchArithmetic(2, 1, 1), 0, 5)
    found = [label for (batch,) in batches.steps(0, 0) for label in batch.labels[batch.labels != IGNORE].tolist()]
    assert sorted(found) == sorted(t for row in causal_examples()["tokens"] for t in row[1:])
    assert longest_of(batches)[0].labels.shape == (2, 12)
    evaluated = evaluation_batches(packed, Loading(collate_of(task_of()), workers), 2)
    assert sum(batch.num_targets for batch in evaluated) == sum(LENGTHS)


def test_what_is_hidden_in_a_document_does_not_depend_on_its_row() -> None:
    task = task_of("masked_lm")
    plain = {
        i: (batch.inputs["input_ids"][0].tolist(), batch.labels[0].tolist())
        for (batch,) in Batches(
            masked_examples(), Loading(partial(task.collate, pad_id=0)), BatchArithmetic(1, 1, 1), 0, 5
        ).steps(0, 0)
        for i in batch.example_ids
    }
    rows = best_fit(LENGTHS, ROOM)
    for batch in batches_of(masked_examples(), task):
        for number, row in enumerate(batch.example_ids):
            ids = [t for member in rows[row] for t in plain[member][0]]
            labels = [t for member in rows[row] for t in plain[member][1]]
            assert batch.inputs["input_ids"][number].tolist()[: len(ids)] == ids
            assert batch.labels[number].tolist()[: len(ids)] == labels


def test_halves_of_a_packed_batch_keep_their_documents() -> None:
    from train.extras.endurance.recovery import halves

    rows = pack_split(causal_examples(), ROOM).with_format("numpy")
    batch = collate_of(task_of())([{**rows[i], "id": i} for i in (2, 3, 5)], (0,))
    first, last = (half.inputs["documents"] for half in halves(batch))
    assert first.lengths == ((9, 3), (8, 2, 1, 1))
    assert last.lengths == ((5, 7),)
    assert last.boundaries.tolist() == [0, 5, 12]


# The update


def test_update_is_that_of_the_padded_examples() -> None:
    """Three micro-batches of rows against one padded batch of all documents, in fp64."""
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    task = task_of()
    examples = causal_examples().with_format("numpy")
    padded = task.collate([{**examples[i], "id": i} for i in range(len(LENGTHS))], (0,), pad_id=0)
    weights = []
    for window in (batches_of(causal_examples(), task), [padded]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=60, **fields)
        network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
        attention.set_document_boundaries(network)
        accelerator = Accelerator(cpu=True)
        optimizer: Any
        model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=1.0))
        engine = Engine(accelerator, Config().changed(max_grad_norm=None))
        outcome = optimizer_step(engine, model, optimizer, window)
        weights.append({k: v.detach().clone() for k, v in network.state_dict().items()})
        assert (outcome.num_targets, outcome.num_tokens) == (sum(LENGTHS), sum(LENGTHS))
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=0, atol=1e-10), name


def test_packed_run_resumes_exactly_and_says_what_it_packed(
    llama_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--packing", "True", "--global_batch_size", 4, "--max_steps", 4)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(llama_recipe, whole, *flags) == EXIT_DONE
    said = capsys.readouterr().out
    assert (found := re.search(r"packing: (\d+) train examples in (\d+) rows of 64 tokens, (.*)% empty", said)), said
    assert int(found[2]) < int(found[1]) and float(found[3]) < 20
    assert train(llama_recipe, pieces, *flags, *stopping_after(2)) == EXIT_STOPPED
    assert train(llama_recipe, pieces, *flags) == EXIT_DONE
    assert checkpoint_digests(whole, 4) == checkpoint_digests(pieces, 4)
    assert trained_losses(whole) == trained_losses(pieces)
    capsys.readouterr()
    assert train(llama_recipe, pieces, *flags, "--packing", "False", "--max_steps", 5) == EXIT_ERROR
    assert "training data" in capsys.readouterr().err
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["result"]["validation"]["bits_per_byte"] > 0


def test_whole_examples_with_a_label_are_not_packed(
    llama_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--packing", "True", "--task", "sequence_classification")
    assert train(llama_recipe, tmp_path / "run", *flags) == EXIT_USAGE
    assert "packing: sequence_classification has one label a row" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_rows_of_documents_are_not_divided_among_ranks(name: str) -> None:
    engine = "deepspeed" if name == "sp_size" else "ddp" if name == "tp_size" else "fsdp2"
    launch = replace(Launch(world_size=2, engine=engine), **{name: 2})  # type: ignore
    config = Config().changed(model="x")
    extras.check(config, launch)
    with pytest.raises(UsageError, match=r"parallel 2 in the launch file .*packing: leave packing out"):
        extras.check(config.changed(packing=True), launch)


def test_documents_know_their_positions() -> None:
    documents = Documents.of([[2, 3], [4, 1]])
    assert documents.longest == 4
    assert documents.position_ids().tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert documents.boundaries.tolist() == [0, 2, 5, 9, 10]
