"""The micro-batches that may take most memory, whatever step they belong to."""

from dataclasses import replace

import numpy as np

from train.batching import Batches, load
from train.records import BatchArithmetic, MicroBatch, column


def longest_of(batches: Batches) -> list[MicroBatch]:
    """The longest examples of all; two micro-batches where a model decides which takes more. Loaded by this process."""
    of_rounds = getattr(batches.loading.rounds, "longest", longest_ids)  # an extra's rounds may have their own
    loading = replace(batches.loading, num_workers=0, deliver=None)
    ids = of_rounds(column(batches.examples, "length"), batches.arithmetic)
    return list(load(batches.examples, loading, ids, (batches.seed, 0)))


def longest_ids(lengths: np.ndarray, arithmetic: BatchArithmetic) -> list[list[int]]:
    """The longest examples, padded if lengths differ at all."""
    return [with_padding(np.argsort(-lengths, kind="stable")[: arithmetic.micro_batch_size].tolist(), lengths)]


def with_padding(ids: list[int], lengths: np.ndarray) -> list[int]:
    """``ids``; if all are of one length, the next shorter example comes last: padding may bring a mask."""
    if len(ids) > 1 and lengths[ids[-1]] == lengths[ids[0]] > lengths.min():
        ids[-1] = int(np.where(lengths < lengths[ids[0]], lengths, -1).argmax())
    return ids
