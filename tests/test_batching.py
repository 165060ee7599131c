"""Which examples each optimizer step sees: once an epoch each, the same on any number of processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from support import evaluation_batches

from train.batching import (
    Batches,
    Loading,
    Rounds,
    without_targets,
)
from train.config import Config
from train.extras.long_sequences.token_batches import TokenRounds
from train.extras.longest import longest_of
from train.records import IGNORE, BatchArithmetic, MicroBatch, UsageError, arithmetic_of
from train.tasks import load_task


def test_batch_stays_in_ordinary_memory_where_none_can_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    batch = MicroBatch({"input_ids": torch.ones(2, 3)}, torch.ones(2, 3), 6, (0, 1), 6)
    assert batch.pin_memory() is batch


COLLATE = partial(load_task("causal_lm")(Config()).collate, pad_id=1)
LOADING = Loading(COLLATE)
COUNT = 29
SPLITS_OF_12 = [(12, 1, 1), (4, 3, 1), (1, 12, 1), (3, 2, 2), (2, 2, 3), (4, 1, 3), (1, 3, 4), (3, 1, 4)]
"""micro-batch × accumulation × processes = 12."""


def examples(count: int = COUNT) -> datasets.Dataset:
    """Example i starts with the token i; lengths from 1 to 12."""
    lengths = np.random.default_rng(3).integers(1, 13, size=count)
    tokens = [[i, *range(100, 100 + int(n))] for i, n in enumerate(lengths)]
    return datasets.Dataset.from_dict({"tokens": tokens, "length": lengths})


def map_batches(split: tuple[int, int, int], rank: int = 0, seed: int = 5) -> Batches:
    return Batches(examples(), LOADING, BatchArithmetic(*split), rank, seed)


def ids(window: Sequence[MicroBatch]) -> list[int]:
    return [i for batch in window for i in batch.example_ids]


def over_ranks(make: Any, split: tuple[int, int, int], epoch: int = 0, first_step: int = 0) -> list[list[int]]:
    """The examples of each step over all ranks, sorted, having checked that each rank does its part."""
    ranks = [list(make(split, rank).steps(epoch, first_step)) for rank in range(split[2])]
    steps = []
    for windows in zip(*ranks, strict=True):
        assert len({len(window) for window in windows}) == 1, "not as many rounds on each rank"
        assert all(len(batch.example_ids) <= split[0] for window in windows for batch in window)
        steps.append(sorted(i for window in windows for i in ids(window)))
    return steps


def same(one: Sequence[Sequence[MicroBatch]], other: Sequence[Sequence[MicroBatch]]) -> bool:
    def plain(windows: Sequence[Sequence[MicroBatch]]) -> list[Any]:
        return [
            [(b.inputs["input_ids"].tolist(), b.labels.tolist(), b.num_targets, b.example_ids, b.num_tokens) for b in w]
            for w in windows
        ]

    return plain(one) == plain(other)


# Arithmetic


def arithmetic(micro: int, accumulation: int | None, total: int | None, world: int) -> BatchArithmetic:
    given = {"gradient_accumulation_steps": accumulation, "global_batch_size": total}
    return arithmetic_of(Config().changed(micro_batch_size=micro, **given), world)


@pytest.mark.parametrize(
    ("micro", "total", "world", "said"),
    [
        (3, 8, 2, "6 or 12 would be, or another micro_batch_size."),
        (2, 8, 3, "6 or 12 would be, or another number of processes."),  # which no micro-batch divides
    ],
)
def test_a_batch_that_cannot_be_divided_is_told_with_what_would_do(
    micro: int, total: int, world: int, said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        arithmetic(micro, None, total, world)


@pytest.mark.parametrize(
    ("micro", "accumulation", "total", "world", "expected"),
    [
        (2, None, None, 1, (2, 1, 1)),
        (2, 4, None, 1, (2, 4, 1)),
        (2, 4, None, 3, (2, 4, 3)),
        (2, None, 24, 3, (2, 4, 3)),
        (2, 4, 24, 3, (2, 4, 3)),
        (8, None, 8, 1, (8, 1, 1)),
    ],
)
def test_arithmetic_completes_what_is_given(
    micro: int, accumulation: int | None, total: int | None, world: int, expected: tuple[int, int, int]
) -> None:
    found = arithmetic(micro, accumulation, total, world)
    assert (found.micro_batch_size, found.accumulation_steps, found.dp_size) == expected
    assert found.global_batch_size == expected[0] * expected[1] * expected[2]


@pytest.mark.parametrize(
    ("micro", "accumulation", "total", "world", "message"),
    [
        (2, None, 7, 1, "global_batch_size: 7 .* 6 or 8 would be"),
        (4, None, 2, 1, "global_batch_size: 2 .* 4 would be"),
        (2, None, 8, 3, "global_batch_size: 8 .* 3 process.* 6 or 12 would be"),
        (2, 3, 8, 1, "gradient_accumulation_steps: 3 contradicts global_batch_size 8"),
    ],
)
def test_contradictions_are_refused_with_what_would_do(
    micro: int, accumulation: int | None, total: int, world: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        arithmetic(micro, accumulation, total, world)


# Order


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return Rounds().order(np.ones(num_examples), seed, epoch)


def test_epoch_order_is_a_permutation_of_seed_and_epoch() -> None:
    order = epoch_order(COUNT, seed=5, epoch=2)
    assert sorted(order) == list(range(COUNT))
    assert order.tolist() == epoch_order(COUNT, seed=5, epoch=2).tolist()
    others = [epoch_order(COUNT, seed, epoch).tolist() for seed, epoch in ((5, 3), (6, 2), (2, 5))]
    assert order.tolist() not in [*others, list(range(COUNT))]


def test_epoch_order_stays_what_it_is() -> None:  # another one would break the resuming of runs
    assert epoch_order(10, seed=42, epoch=0).tolist() == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]


@pytest.mark.parametrize("split", SPLITS_OF_12)
def test_each_step_sees_its_slice_of_the_order_on_any_number_of_processes(split: tuple[int, int, int]) -> None:
    for epoch in (0, 3):
        order = epoch_order(COUNT, 5, epoch)
        expected = [sorted(order[first : first + 12].tolist()) for first in range(0, COUNT, 12)]
        assert over_ranks(map_batches, split, epoch) == expected
        assert map_batches(split).steps_per_epoch == 3
        assert len(expected[-1]) == COUNT - 24  # the last window is short and there


@pytest.mark.parametrize("split", SPLITS_OF_12)
def test_each_example_is_seen_once_an_epoch(split: tuple[int, int, int]) -> None:
    assert sorted(i for step in over_ranks(map_batches, split) for i in step) == list(range(COUNT))


def test_ids_belong_to_the_rows_they_number() -> None:
    rows = examples()["tokens"]
    for window in map_batches((3, 2, 2), rank=1).steps(0, 0):
        for batch in window:
            for row, (example, tokens) in enumerate(zip(batch.example_ids, batch.inputs["input_ids"], strict=True)):
                expected = rows[example]
                assert tokens[: len(expected) - 1].tolist() == expected[:-1]
                assert (batch.labels[row] != IGNORE).sum().item() == len(expected) - 1


def test_resuming_at_a_step_gives_exactly_the_remaining_windows() -> None:
    whole = list(map_batches((2, 2, 1)).steps(1, 0))
    assert len(whole) == 8
    for step in (0, 1, 5, 7, 8):
        assert same(list(map_batches((2, 2, 1)).steps(1, step)), whole[step:])
    assert not same(list(map_batches((2, 2, 1)).steps(2, 0)), whole)
    assert not same(list(map_batches((2, 2, 1), seed=6).steps(1, 0)), whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_do_not_change_a_batch(rank: int) -> None:
    collate = partial(load_task("masked_lm")(Config()).collate, pad_id=1)  # draws random numbers
    rows = examples().map(lambda row: {**row, "special": [False] * len(row["tokens"]), "vocab_size": 200, "mask_id": 2})

    def windows(workers: int) -> list[list[MicroBatch]]:
        batches = Batches(rows, Loading(collate, num_workers=workers), BatchArithmetic(2, 2, 2), rank, 5)
        return list(batches.steps(1, 1))

    assert same(windows(0), windows(2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_is_planned_when_it_is_needed_or_fetched_ahead(workers: int) -> None:
    planned = []

    class Counted(Rounds):
        def form(self, ids: Sequence[int], lengths: Sequence[int], arithmetic: BatchArithmetic) -> Any:
            planned.append(list(ids))
            return super().form(ids, lengths, arithmetic)

    loading = Loading(COLLATE, workers, rounds=Counted())
    steps = Batches(examples(100), loading, BatchArithmetic(1, 2, 1), 0, 5).steps(0, 10)
    first = next(steps)
    # two micro-batches for each worker are fetched ahead, and the step after those may have been begun
    assert len(planned) <= 2 + 2 * workers and sorted(ids(first)) == sorted(planned[0])
    assert len([first, *steps]) == len(planned) == 40


def test_a_step_groups_examples_by_length_the_longest_first() -> None:
    lengths = [3, 9, 1, 4, 8, 2, 7]
    parts = Rounds().form([10, 11, 12, 13, 14, 15, 16], lengths, BatchArithmetic(2, 1, dp_size=2))
    assert parts == [[[11, 14], [16, 13]], [[10, 15], [12]]]


def test_examples_of_one_length_keep_their_order() -> None:
    """On any processor, with any numpy: a run that is resumed elsewhere makes the same micro-batches."""
    order = list(range(500))
    parts = Rounds().form(order, [3, 5] * 250, BatchArithmetic(500, 1, 1))
    assert parts == [[[*order[1::2], *order[::2]]]]


@pytest.mark.parametrize("count", [1, 2, 5, 11, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sizes_within_a_step_differ_by_one_at_most(count: int, world: int) -> None:
    rounds = Rounds().form(list(range(count)), [1] * count, BatchArithmetic(3, 1, world))
    sizes = [len(part) for parts in rounds for part in parts]
    assert all(len(parts) == world for parts in rounds)
    assert sum(sizes) == count and max(sizes) <= 3 and max(sizes) - min(sizes) <= 1


# Ranks without an example of their own


def test_rank_without_examples_gets_a_batch_without_targets() -> None:
    last = [list(map_batches((3, 1, 4), rank).steps(0, 0))[-1] for rank in range(4)]
    assert [len(ids(window)) for window in last] == [2, 1, 1, 1]
    few = [list(Batches(examples(2), LOADING, BatchArithmetic(4, 1, 4), rank, 0).steps(0, 0)) for rank in range(4)]
    assert [[len(w) for w in windows] for windows in few] == [[1]] * 4
    for ((batch,),) in few[2:]:
        assert (batch.num_targets, batch.num_tokens, batch.example_ids) == (0, 0, ())
        assert torch.equal(batch.labels, few[0][0][0].labels)  # of an example of this step, with its own labels
        assert batch.inputs["input_ids"].numel() > 0


def test_batch_without_targets_keeps_its_shapes() -> None:
    batch = COLLATE([{**row, "id": i} for i, row in enumerate(examples(3).to_list())], (0, 0))
    empty = without_targets(batch)
    assert torch.equal(empty.labels, batch.labels)  # no made-up ones, which a loss might not know
    assert (empty.num_targets, empty.num_tokens, empty.example_ids) == (0, 0, ())
    assert torch.equal(empty.inputs["input_ids"], batch.inputs["input_ids"])
    assert batch.num_targets > 0 and batch.example_ids == (0, 1, 2)  # unchanged itself


# Evaluation


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "size"), [(1, 4), (3, 4), (7, 2), (29, 4)])
def test_evaluation_sees_each_example_once(count: int, size: int, world: int) -> None:
    rows = examples(count)
    ranks = [evaluation_batches(rows, LOADING, size, world, rank) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for batches in ranks for batch in batches]
    assert sorted(ids(batches)) == list(range(count))
    assert all(len(batch.example_ids) <= size for batch in batches)
    assert sum(batch.num_targets for batch in batches) == sum(rows["length"])


def test_evaluation_starts_with_the_longest_batch() -> None:
    lengths = [batch.labels.shape[1] for batch in evaluation_batches(examples(), LOADING, 4)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == max(examples()["length"])


# By tokens

BUDGETS = [(12, 1), (12, 2), (12, 3), (20, 1), (20, 3), (1000, 1), (1000, 4)]
"""(tokens of a micro-batch, processes)."""


def of_tokens(max_tokens: int) -> Loading:
    return Loading(COLLATE, rounds=TokenRounds(max_tokens))


def by_tokens(max_tokens: int, world_size: int, rank: int = 0, epoch: int = 0) -> list[list[MicroBatch]]:
    arithmetic = BatchArithmetic(1, 12 // world_size, world_size)
    return list(Batches(examples(), of_tokens(max_tokens), arithmetic, rank, 5).steps(epoch, 0))


@pytest.mark.parametrize(("max_tokens", "world_size"), BUDGETS)
def test_micro_batches_hold_as_many_tokens_as_fit(max_tokens: int, world_size: int) -> None:
    ranks = [by_tokens(max_tokens, world_size, rank) for rank in range(world_size)]
    steps = []
    for windows in zip(*ranks, strict=True):
        assert len({len(window) for window in windows}) == 1
        assert all(batch.labels.numel() <= max_tokens for window in windows for batch in window)
        steps.append(sorted(i for window in windows for i in ids(window)))
    assert steps == over_ranks(map_batches, (12, 1, 1))  # the examples of a step stay


def test_fewer_micro_batches_at_the_same_peak_than_by_number() -> None:
    number = list(map_batches((2, 6, 1)).steps(0, 0))
    peak = max(batch.labels.numel() for window in number for batch in window)
    tokens = by_tokens(peak, 1)
    assert max(batch.labels.numel() for window in tokens for batch in window) <= peak
    assert sum(map(len, tokens)) <= 0.8 * sum(map(len, number))


def test_longest_by_tokens_is_no_smaller_than_any_micro_batch() -> None:
    for max_tokens, world_size in BUDGETS:
        arithmetic = BatchArithmetic(1, 12 // world_size, world_size)
        longest = longest_of(Batches(examples(), of_tokens(max_tokens), arithmetic, 0, 5))[0].labels.numel()
        runs = [by_tokens(max_tokens, world_size, rank, epoch) for rank in range(world_size) for epoch in range(6)]
        made = [batch for windows in runs for window in windows for batch in window]
        assert max(batch.labels.numel() for batch in made) <= longest <= max_tokens


def test_the_micro_batch_of_most_pairs_of_tokens_is_a_candidate_where_it_is_not_that_of_most_tokens() -> None:
    """Attention may keep a score for each pair: one text of 1,990 tokens has more of them than eight of 256."""
    lengths, rounds = np.array([256] * 20 + [1990, 250]), TokenRounds(2048)
    most, pairs = rounds.longest(lengths, BatchArithmetic(1, 10, 1))
    assert [lengths[i] for i in most] == [256] * 7 + [250]  # padded, as others are
    assert [lengths[i] for i in pairs] == [1990]
    assert len(rounds.longest(np.array([64] * 40), BatchArithmetic(1, 10, 1))) == 1


def test_what_a_step_by_tokens_is_made_of_is_said_in_words() -> None:
    rounds: Any = of_tokens(4096).rounds
    said = rounds.describe(BatchArithmetic(1, 4, 2))
    assert said == "8 per step, in micro-batches of up to 4,096 tokens on 2 processes"


def test_evaluation_by_tokens() -> None:
    loading = of_tokens(20)
    found, other = (evaluation_batches(examples(), loading, 1, 2, rank) for rank in (0, 1))
    assert sorted(ids([*found, *other])) == list(range(COUNT)) and len(found) == len(other)
    assert max(batch.labels.numel() for batch in found) <= 20
