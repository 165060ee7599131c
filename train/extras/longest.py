"""The micro-batches that may take most memory, whatever step they belong to."""

from dataclasses import replace

import numpy as np

from train.batching import Batches, load
from train.records import MicroBatch, column


def longest_of(batches: Batches) -> list[MicroBatch]:
    """The longest examples of all; two micro-batches where a model decides which takes more. Loaded by this process."""
    lengths, arithmetic = column(batches.examples, "length"), batches.arithmetic
    ids = [with_padding(np.argsort(-lengths, kind="stable")[: arithmetic.micro_batch_size].tolist(), lengths)]  # type: ignore
    if (of_rounds := getattr(batches.loading.rounds, "longest", None)) is not None:  # an extra's may have their own
        ids = of_rounds(lengths, arithmetic)
    return list(load(batches.examples, replace(batches.loading, num_workers=0, deliver=None), ids, (batches.seed, 0)))


def with_padding(ids: list[int], lengths: np.ndarray) -> list[int]:
    """``ids``; if all are of one length, the next shorter example comes last: padding may bring a mask."""
    if len(ids) > 1 and lengths[ids[-1]] == lengths[ids[0]] > lengths.min():
        ids[-1] = int(np.where(lengths < lengths[ids[0]], lengths, -1).argmax())
    return ids
