"""Evaluation: every example once over all ranks; the task defines the metrics."""

import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from train.records import IGNORE, Evaluation, MicroBatch, Parts, Run, StopAtOnce, UserError, exchange

NOT_SUMMED = [0, 4, 5]  # columns of the rows that score gives: example, prediction, reference


def evaluate(run: Run, parts: Parts, split: str, step: int, may_stop: bool = False) -> Evaluation:
    """Metrics of one pass over ``split``; StopAtOnce on all ranks if it ``may_stop`` and any was asked to stop."""
    data, started, rows = parts.data, time.perf_counter(), []
    parts.model.eval()
    try:
        for batch in data.evaluation_batches(run, data.examples[split]):
            if may_stop and parts.engine.total((0, 0, 0, bool(run.stop)))[3]:  # the stop requests of all ranks
                raise StopAtOnce
            rows += score(run, parts, batch)
        # Ranks that share tensors have the same rows; those that share sequences each a part of an example's positions.
        own = rows if run.launch.rank % run.launch.tp_size == 0 else []
        everyone = np.array(sorted(row for rows in exchange(own) for row in rows), dtype=np.float64)
        _, first = np.unique(everyone[:, 0], return_index=True)
        table = np.add.reduceat(everyone, first)
        table[:, NOT_SUMMED] = everyone[first][:, NOT_SUMMED]
        metrics = {**data.task.metrics(table, data.examples[split], data.label_names), "examples": len(table)}
        metrics |= run.extras.merged("metrics", run, data, split, table)  # which may generate, without dropout
        return Evaluation(split, step, metrics, time.perf_counter() - started)
    finally:
        reshard(parts.model)
        parts.model.train()


@torch.no_grad()  # not inference_mode: what a model caches in it cannot be trained with afterwards
def score(run: Run, parts: Parts, batch: MicroBatch) -> list[tuple[float, ...]]:
    """(example, loss sum, targets, correct, prediction, reference, counts) of each example of a batch."""
    with run.extras.inside("computing", "evaluation", [batch]), parts.engine.share(batch) as part:
        part = part.to(run.accelerator.device)
        scores: Any = parts.model(part.inputs, part.labels, scored=True)
        if (found := scores.predictions).shape != part.labels.shape:
            raise UserError(f"predictions {tuple(found.shape)} need the labels' shape, {tuple(part.labels.shape)}.")
        targets = part.labels != IGNORE
        correct = (found == part.labels) & targets
        sums = [t.reshape(len(targets), -1).sum(1) for t in (scores.loss_sums, targets, correct)]
        first = [t.reshape(len(targets), -1)[:, 0] for t in (found, part.labels)]
        # In fp32, which counts to 16 million (MPS has no fp64), or in fp64 if the losses are.
        wide = torch.promote_types(scores.loss_sums.dtype, torch.float32)
        rows = torch.stack([t.to(wide) for t in (*sums, *first, *scores.counts)], dim=1).tolist()
    # A dummy batch, which keeps ranks in step, has no ids.
    return [(example, *row) for example, row in zip(part.example_ids, rows, strict=False)]


def reshard(model: nn.Module) -> None:
    """Frees the gathered FSDP2 weights that a forward without a backward leaves on every rank."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
