"""Sequence-length warm-up: short to long at the same tokens per step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from test_attention import CAUSAL, built
from test_main import _own_signals as _own_signals
from test_main import checkpoint_digests, stopping_after, train

from train import extras
from train.config import Config, from_values
from train.extras.long_sequences import Extra
from train.extras.long_sequences.length_warmup import cut, sequence_length_at
from train.extras.meter.tracker import StorageTracker
from train.figures import read_metrics
from train.launch import Launch
from train.model import ModelWithLoss
from train.records import EXIT_DONE, EXIT_STOPPED, IGNORE, MicroBatch, UsageError
from train.step import Engine, optimizer_step


def config(steps: int, start: int, max_length: int) -> Config:
    return from_values(
        {"sequence_length_warmup_steps": steps, "sequence_length_warmup_start": start, "max_length": max_length}
    )


def padded(lengths: list[int], width: int) -> MicroBatch:
    labels = torch.full((len(lengths), width), IGNORE)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.arange(length) + 100 * row
    ids = (labels + 1).clamp(min=0)
    return MicroBatch({"input_ids": ids}, labels, sum(lengths), tuple(range(len(lengths))), sum(lengths))


def test_lengths_double_until_all() -> None:
    for_steps = [sequence_length_at(step, config(8, 64, 1024), 1024) for step in range(10)]
    assert for_steps == [64, 64, 128, 128, 256, 256, 512, 512, 1024, 1024]
    assert [sequence_length_at(step, config(3, 48, 100), 96) for step in range(4)] == [48, 48, 96, 100]
    assert [sequence_length_at(step, config(0, 64, 512), 500) for step in (0, 9)] == [512, 512]


def test_pieces_of_the_longest_row_are_nearly_equal() -> None:
    """Two of 8 tokens for a row of 9 would take 7 of padding; the same for all rows, whoever computes them."""
    assert [sequence_length_at(0, config(9, 8, 64), longest) for longest in (9, 20, 16, 5)] == [5, 7, 8, 5]


def test_pieces_hold_the_same_tokens_and_targets() -> None:
    batch = padded([8, 5, 2], 8)
    found = cut(batch, 4, causal=True)
    assert found.labels.tolist() == [
        [0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, IGNORE, IGNORE, IGNORE], [200, 201, IGNORE, IGNORE]
    ]  # fmt: skip
    assert found.inputs["input_ids"].shape == (5, 4)
    assert torch.equal(found.inputs["input_ids"], (found.labels + 1).clamp(min=0))
    assert (found.num_targets, found.num_tokens, found.example_ids) == (15, 15, (0, 1, 2))
    assert cut(batch, 8, causal=True) is batch


def test_tokens_that_are_not_computed_do_not_count() -> None:
    """As of a prompt that is no target, in pieces of its own."""
    batch = padded([16], 16)
    batch.labels[0, :12] = IGNORE
    found = cut(batch, 4, causal=True)
    assert (found.labels.shape, found.num_tokens, found.num_targets) == ((2, 4), 8, 16)  # the first piece stays


def test_a_length_that_does_not_divide_pads_and_masks_where_padding_could_be_seen() -> None:
    assert "attention_mask" not in cut(padded([7, 7], 7), 4, causal=True).inputs
    found = cut(padded([7, 7], 7), 4, causal=False)
    assert found.inputs["attention_mask"].tolist() == [[1] * 4, [1, 1, 1, 0]] * 2
    assert "attention_mask" not in cut(padded([8, 8], 8), 4, causal=False).inputs


def test_a_batch_without_targets_keeps_a_row() -> None:
    empty = padded([0], 8)
    assert cut(empty, 4, causal=True).labels.shape == (1, 4)


def test_packed_rows_are_not_cut() -> None:
    with pytest.raises(UsageError, match="would cut the documents of a packed row"):
        extras.check(Config().changed(model="x", sequence_length_warmup_steps=5, packing=True))


def test_a_cut_step_takes_no_more_memory_than_a_whole_one() -> None:
    def peak(length: int) -> int:
        accelerator: Any = Accelerator(cpu=True)
        network = built("llama", CAUSAL["llama"], torch.float32)
        model, optimizer = accelerator.prepare(ModelWithLoss(network), torch.optim.SGD(network.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(97, (2, 512), generator=generator)
        window = [cut(MicroBatch({"input_ids": ids}, ids.roll(-1, 1), 1024, (0, 1), 1024), length, causal=True)]
        engine = Engine(accelerator, Config())
        optimizer_step(engine, model, optimizer, window)
        with StorageTracker("cpu") as tracker:
            optimizer_step(engine, model, optimizer, window)
        return tracker.peak.num_bytes

    assert peak(64) <= peak(128) <= peak(512)
    assert peak(sequence_length_at(0, config(9, 400, 512), 512)) <= peak(512) < peak(400)


def test_run_with_a_warmup_resumes_exactly_and_logs_the_length(llama_recipe: Path, tmp_path: Path) -> None:
    flags = ("--sequence_length_warmup_steps", 3, "--sequence_length_warmup_start", 16, "--max_steps", 4)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(llama_recipe, whole, *flags) == EXIT_DONE
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["sequence_length"] for row in rows] == [16, 16, 30, 62]  # of at most 16, 16, 32 and 64 tokens
    assert train(llama_recipe, pieces, *flags, *stopping_after(2)) == EXIT_STOPPED
    assert train(llama_recipe, pieces, *flags) == EXIT_DONE
    assert checkpoint_digests(whole, 4) == checkpoint_digests(pieces, 4)
    tokens = [row["tokens_seen"] for row in rows]
    assert train(llama_recipe, tmp_path / "without", "--max_steps", 4) == EXIT_DONE
    without = [r for r in read_metrics(tmp_path / "without" / "metrics.jsonl") if r["kind"] == "train"]
    assert [row["tokens_seen"] for row in without] == tokens
    assert [row["loss"] for row in without] != [row["loss"] for row in rows]


def test_another_stretch_of_positions_is_another_model() -> None:
    own = {"rope_scaling": "yarn", "max_length": 64}
    cases = ({}, {"max_length": 128}, {"rope_scaling_factor": 2.0}, {"rope_scaling_factor": 4.0})

    def identity(values: dict[str, Any]) -> dict[str, Any]:
        run: Any = SimpleNamespace(config=from_values(values))
        return Extra().identity(run, run)

    found = [identity({**own, **case}) for case in cases]
    assert all(first != second for first, second in itertools.combinations(found, 2))
    plain = [identity({"max_length": length}) for length in (64, 128)]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sequences_divided_among_ranks_are_not_cut(name: str) -> None:
    launch = replace(Launch(world_size=2, engine="deepspeed" if name == "sp_size" else "fsdp2"), **{name: 2})
    with pytest.raises(UsageError, match=r"cannot be combined with sequence_length_warmup_steps: 5: set it to 0"):
        extras.check(Config().changed(model="x", sequence_length_warmup_steps=5), launch)
