"""Ulysses sequence parallelism (arXiv 2309.14509): neighbouring ranks share each sequence.

Outside attention each rank holds a part of the tokens, inside it all tokens of a part of the heads; DeepSpeed
exchanges the one for the other around the attention of a transformers model. It exchanges no mask, so sequences are
padded at the end, where causal attention keeps every token from seeing the padding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from train.extras.parallelism.deepspeed_engine import DeepSpeed, complete_settings
from train.launch import Launch
from train.loss import ModelWithLoss
from train.records import IGNORE, MicroBatch, Run, UserError

if TYPE_CHECKING:
    from accelerate.utils import ParallelismConfig


class Ulysses(DeepSpeed):
    """DeepSpeed on ranks that share sequences in training; in evaluation each of them takes whole ones."""

    @property
    def loss_scale(self) -> float:
        """Stage 3 divides the sum of gradients by all ranks; stage 2 counts ranks that share a sequence as one."""
        is_stage_3 = self.engine.zero_optimization_stage() == 3
        return self.accelerator.num_processes // (1 if is_stage_3 else self.copies)

    def share(self, micro_batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        """This rank's stretch of every sequence; the whole batch in evaluation, where nothing is exchanged."""
        if not self.engine.module.training:
            return nullcontext(micro_batch)
        rank, num_rows = self.accelerator.process_index % self.copies, self.engine.train_micro_batch_size_per_gpu()
        return nullcontext(part_of_sequences(micro_batch, rank, self.copies, num_rows))


def sequence_parallelism(launch: Launch) -> ParallelismConfig:
    """What the Accelerator needs to set up Ulysses."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    return ParallelismConfig(
        sp_size=launch.sp_size,
        sp_backend="deepspeed",
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True),
        dp_replicate_size=launch.dp_size,
    )


def set_attention(run: Run, model: ModelWithLoss) -> None:
    """Has DeepSpeed exchange heads around the attention that the model was built with.

    Raises:
        AttributeError: it is not a model of transformers.
    """
    complete_settings(run, model)
    network, sizes = cast("Any", model.model), cast("Any", run.accelerator.parallelism_config)
    model.config = network.config  # where accelerate looks for it
    sizes.sp_handler.sp_attn_implementation = network.config._attn_implementation


def part_of_sequences(batch: MicroBatch, rank: int, size: int, num_rows: int) -> MicroBatch:
    """What rank ``rank`` of ``size`` that share ``batch`` computes: (B, S) becomes (num_rows, ⌈S / size⌉).

    Args:
        num_rows: DeepSpeed's exchange has a fixed number of rows; missing ones are padding.

    Raises:
        UserError: the batch has inputs that cannot be divided, such as a mask.
    """
    if set(batch.inputs) != {"input_ids"} or batch.labels.ndim != 2:
        raise UserError(
            f"sequence parallelism divides input_ids alone, this task gives {', '.join(sorted(batch.inputs))}: use a "
            "task that gives only input_ids, or a launch file without parallelism_config_sp_size."
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
