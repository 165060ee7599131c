"""Ulysses sequence parallelism (arXiv 2309.14509): neighbouring ranks share each sequence.

Outside attention each rank holds a part of the tokens, inside it all tokens of a part of the heads; DeepSpeed
exchanges the one for the other around the attention of a transformers model. It exchanges no mask, so sequences are
padded at the end, where causal attention keeps every token from seeing the padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from train.records import IGNORE, MicroBatch, UserError


def part_of_sequences(batch: MicroBatch, rank: int, size: int, num_rows: int) -> MicroBatch:
    """What rank ``rank`` of ``size`` that share ``batch`` computes: (B, S) becomes (num_rows, ⌈S / size⌉).

    Args:
        num_rows: DeepSpeed's exchange has a fixed number of rows; those that are missing are padding.

    Raises:
        UserError: the batch has inputs that cannot be cut so, such as a mask.
    """
    if set(batch.inputs) != {"input_ids"} or batch.labels.ndim != 2:
        raise UserError(
            f"sequence parallelism takes input_ids alone, this task also gives {', '.join(sorted(batch.inputs))}: use "
            "causal_lm, or a launch file without parallelism_config_sp_size."
        )
    rows, length = batch.labels.shape
    share = -(-length // size)
    padding = (0, share * size - length, 0, num_rows - rows)
    mine = slice(rank * share, (rank + 1) * share)
    labels = F.pad(batch.labels, padding, value=IGNORE)[:, mine].contiguous()
    return replace(
        batch,
        inputs={
            "input_ids": F.pad(batch.inputs["input_ids"], padding)[:, mine].contiguous(),
            "position_ids": torch.arange(share * size)[mine].repeat(num_rows, 1),
        },
        labels=labels,
        num_targets=int((labels != IGNORE).sum()),
    )
