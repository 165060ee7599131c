"""Sequence-length warm-up: the first steps see their tokens in shorter pieces (arXiv 2108.06084).

A window of S tokens becomes S / L rows of L, so a step keeps its examples, its targets and about its memory, and
attention costs less. The length is a function of the step alone: a resumed run continues with the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.config import Config
from train.extras.long_sequences import Options
from train.records import IGNORE, MicroBatch


def sequence_length_at(step: int, config: Config, longest: int) -> int:
    """Tokens of a row: the start, doubled after equal shares of the warm-up; or less, to cut ``longest`` equally."""
    own = config.of(Options)
    steps, length = own.sequence_length_warmup_steps, own.sequence_length_warmup_start
    if step >= steps:
        return config.data.max_length
    stages = [length]
    while 2 * stages[-1] < config.data.max_length:
        stages.append(2 * stages[-1])
    return -(-longest // -(-longest // stages[step * len(stages) // steps]))


def cut(batch: MicroBatch, length: int, causal: bool) -> MicroBatch:
    """``batch`` (B, S) in rows of ``length`` tokens; rows of nothing but padding are left out.

    The last tokens of a piece keep their targets, which for a causal model are the next tokens. Tokens see only those
    of their piece. ``causal``: padding at the end needs no mask, because no token sees what follows it.
    """
    width = batch.shape[1]  # labels may be one a row
    if width <= length:
        return batch
    missing = -width % length
    inputs: dict[str, Any] = dict(batch.inputs)
    if missing and not causal:
        inputs.setdefault("attention_mask", torch.ones_like(batch.labels))

    def pieces(tensor: Tensor, value: int = 0) -> Tensor:
        return F.pad(tensor, (0, missing), value=value).view(-1, length)

    labels = pieces(batch.labels, IGNORE)
    inputs = {name: pieces(tensor) for name, tensor in inputs.items()}
    kept = inputs.get("attention_mask", labels != IGNORE).any(1)
    kept[0] = True  # of a batch that only keeps ranks in step
    inputs = {name: tensor[kept] for name, tensor in inputs.items()}
    if "attention_mask" in inputs and inputs["attention_mask"].all():
        del inputs["attention_mask"]
    labels = labels[kept]  # rows that have no target are not computed, so their tokens do not count
    return replace(batch, inputs=inputs, labels=labels, num_tokens=min(batch.num_tokens, labels.numel()))
