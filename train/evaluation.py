"""Evaluation: every example once over all ranks; what the metrics are is the task's to say."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import datasets
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from train.batching import Batches
from train.data import PreparedData
from train.loss import Scores
from train.optim import peak_learning_rate
from train.records import IGNORE, Evaluation, MicroBatch, Progress, Run, StopAtOnce, UserError, exchange
from train.step import Engine

SMALLER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Goal:
    """What the run works towards."""

    total_steps: int
    peak_learning_rate: float
    metric: str
    greater_is_better: bool
    best_of: str = ""  # the metric and the data: a best by anything else does not count
    data: str = ""  # a digest of the validation data


def goal_of(run: Run, data: PreparedData, batches: Batches, progress: Progress) -> Goal:
    """How many steps a run at ``progress`` makes in all, and what counts as best; UserError for an unknown metric."""
    optim, output = run.config.optimization, run.config.output
    metric = output.metric_for_best or data.task.default_metric
    grows = metric not in SMALLER_IS_BETTER if output.greater_is_better is None else output.greater_is_better
    step, epoch, done = progress.counted_from  # with another batch size an epoch has other steps
    total_steps = optim.max_steps or step + ((optim.num_epochs or 1) - epoch) * (batches.steps_per_epoch or 1) - done
    peak = peak_learning_rate(optim, batches.arithmetic.global_batch_size)
    goal = Goal(total_steps, peak, metric, grows, f"{metric} on data {data.validation_digest}", data.validation_digest)
    if output.metric_for_best:  # told now by the metrics of one example, not at the first evaluation
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):  # of a fork's own, that want more of them
            split, names = data.examples.validation, data.examples.label_names
            found = data.task.metrics(np.array([[0.0, 1, 1, 1, 0, 0]]), split, names)
            after_evaluation(progress, goal, Evaluation("validation", 0, found))
    return goal


class Evaluator:
    """Evaluates the model on held-out splits."""

    def __init__(self, run: Run, model: nn.Module, engine: Engine, data: PreparedData) -> None:
        self._run, self._model, self._engine, self._data = run, model, engine, data

    def validation(self, step: int, may_stop: bool = False) -> Evaluation:
        """Metrics on the validation split, the same on every rank."""
        found = self.split("validation", self._data.examples.validation, step, may_stop)
        return replace(found, data=self._data.validation_digest)

    def split(self, name: str, examples: datasets.Dataset, step: int, may_stop: bool = False) -> Evaluation:
        """Metrics of one pass over ``examples``; StopAtOnce on all ranks if it ``may_stop`` and one was asked to."""
        started, rows = time.perf_counter(), []
        self._model.eval()
        try:
            for batch in self._data.evaluation_batches(self._run, examples):
                if may_stop and self._engine.total((1, 0, 0, bool(self._run.stop)))[3]:
                    raise StopAtOnce
                rows += self.score(batch)
        finally:
            reshard(self._model)
            self._model.train()
        table = _gathered(self._run, rows)
        metrics = self._data.task.metrics(table, examples, self._data.examples.label_names)
        return Evaluation(name, step, {**metrics, "examples": len(table)}, time.perf_counter() - started)

    @torch.no_grad()  # not inference_mode: what a model caches in it cannot be trained with afterwards
    def score(self, batch: MicroBatch) -> list[tuple[float, ...]]:
        """(example, loss sum, targets, correct, prediction, reference) of each example of a batch."""
        with self._run.extras.inside("evaluating", batch), self._engine.share(batch) as part:
            part = part.to(self._run.accelerator.device)
            scores: Scores = self._model(part.inputs, part.labels, scored=True)
            targets = part.labels != IGNORE
            correct = (scores.predictions == part.labels) & targets
            sums = [t.reshape(len(targets), -1).sum(1) for t in (scores.loss_sums, targets, correct)]
            first = [t.reshape(len(targets), -1)[:, 0] for t in (scores.predictions, part.labels)]
            # In fp32, which counts to 16 million (MPS has no fp64), or in fp64 if the losses are.
            wide = torch.promote_types(scores.loss_sums.dtype, torch.float32)
            rows = torch.stack([t.to(wide) for t in sums + first], dim=1).tolist()
        # A batch that only keeps ranks in step has no ids.
        return [(example, *row) for example, row in zip(part.example_ids, rows, strict=False)]


def after_evaluation(progress: Progress, goal: Goal, evaluation: Evaluation) -> Progress:
    """``progress`` with an evaluation counted, and remembered if the best; UserError for a metric that is not there."""
    if goal.metric not in evaluation.metrics:
        known = ", ".join(k for k, v in evaluation.metrics.items() if isinstance(v, float))
        raise UserError(f"metric_for_best: {goal.metric!r} is not among this task's metrics: {known}.")
    value, best = float(evaluation.metrics[goal.metric]), progress.best_metric
    progress = replace(progress, evaluated_step=progress.step, best_of=goal.best_of)
    is_better = best is None or math.isnan(best) or (value > best if goal.greater_is_better else value < best)
    if is_better and not math.isnan(value):
        return replace(progress, best_metric=value, best_step=progress.step, evaluations_without_improvement=0)
    return replace(progress, evaluations_without_improvement=progress.evaluations_without_improvement + 1)


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 free the whole weights that a forward without a backward leaves on every rank."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _gathered(run: Run, rows: list[tuple[float, ...]]) -> np.ndarray:
    """(examples, 6) all ranks' rows in the order of the examples, one for each."""
    # The first of the ranks that share tensors has the same rows as the others.
    own = rows if run.launch.rank % run.launch.tp_size == 0 else []
    everyone = [row for rows in exchange(own, run.accelerator.num_processes) for row in rows]
    table = np.array(sorted(everyone), dtype=np.float64).reshape(-1, 6)
    _, first = np.unique(table[:, 0], return_index=True)
    whole = table[first]
    whole[:, 1:4] = np.add.reduceat(table[:, 1:4], first)  # each rank had a part of each example's positions
    return whole
