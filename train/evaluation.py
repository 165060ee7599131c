"""Evaluation: every example once over all ranks, metrics as 🤗 evaluate classes that need no network."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import datasets
import evaluate
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from train.errors import UserError
from train.extras.parallelism.context import shared_sequences
from train.launch import Launch
from train.loss import Scores
from train.records import IGNORE, Evaluation, Meter, MicroBatch, column

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train.config import Config
    from train.data import PreparedData


SMALLER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
MATRIX_CLASSES = 100
"""Up to so many have a confusion matrix."""
CONFUSIONS = 20
"""Named where there is none."""


class TokenMetrics(evaluate.Metric):
    """Loss, perplexity and accuracy over all targets, and bits per byte of the text they cover; a row an example."""

    def _info(self) -> evaluate.MetricInfo:
        columns = {name: datasets.Value("float64") for name in ("loss_sum", "targets", "correct", "num_bytes")}
        return evaluate.MetricInfo(
            description=self.__doc__ or "", citation="", inputs_description="", features=datasets.Features(columns)
        )

    def _compute(self, loss_sum: Any, targets: Any, correct: Any, num_bytes: Any) -> dict[str, float]:  # pyright: ignore
        loss = math.fsum(loss_sum) / max(1.0, math.fsum(targets))
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "accuracy": math.fsum(correct) / max(1.0, math.fsum(targets)),
        }
        if (covered := math.fsum(num_bytes)) > 0:
            metrics["bits_per_byte"] = math.fsum(loss_sum) / math.log(2) / covered
        return metrics


class ClassMetrics(evaluate.Metric):
    """Accuracy, macro F1 and the confusion matrix ``[reference][prediction]``; one row per example.

    Many classes have their most frequent confusions in its place: nobody reads a matrix of millions, and every
    evaluation would write it.
    """

    def __init__(self, num_classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes

    def _info(self) -> evaluate.MetricInfo:
        columns = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description=self.__doc__ or "", citation="", inputs_description="", features=datasets.Features(columns)
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:  # pyright: ignore
        references, predictions, classes = np.asarray(references), np.asarray(predictions), self.num_classes
        hits, of_class, as_class = (
            np.bincount(values, minlength=classes)
            for values in (references[references == predictions], references, predictions)
        )
        f1 = 2 * hits / np.maximum(1, of_class + as_class)
        present = (of_class + as_class) > 0  # the mean is over classes that were there or were predicted
        return {
            "accuracy": float(hits.sum() / max(1, len(references))),
            "macro_f1": float(f1[present].mean()) if present.any() else 0.0,
            **self._confusions(references, predictions),
        }

    def _confusions(self, references: np.ndarray, predictions: np.ndarray) -> dict[str, Any]:
        if self.num_classes <= MATRIX_CLASSES:
            matrix = np.zeros((self.num_classes, self.num_classes), dtype=np.int64)
            np.add.at(matrix, (references, predictions), 1)
            return {"confusion_matrix": matrix.tolist()}
        wrong = references != predictions
        pairs, counts = np.unique(np.stack([references[wrong], predictions[wrong]]), axis=1, return_counts=True)
        most = np.argsort(-counts, kind="stable")[:CONFUSIONS]
        rows = np.stack([*pairs[:, most], counts[most]], axis=1).tolist()
        names = ("reference", "prediction", "count")
        return {"most_frequent_confusions": [dict(zip(names, row, strict=True)) for row in rows]}


def load_hub_metrics(names: Sequence[str], num_classes: int) -> dict[str, Any]:
    """Further metrics by name on the Hub or by folder, each tried once, before the first step rather than after it.

    Raises:
        UserError: one cannot be loaded, or not be computed from predicted classes.
    """
    if names and not num_classes:
        raise UserError(f"metrics: {', '.join(names)} would compare classes, and this task has none: leave it out.")
    loaded = {}
    for name in names:
        try:
            loaded[name] = evaluate.load(name, keep_in_memory=True)
            loaded[name].compute(predictions=list(range(num_classes)), references=list(range(num_classes)))
        except Exception as error:  # metric scripts fail in their own ways
            raise UserError(
                f"metrics: {name!r} cannot be used: {' '.join(str(error).split())[:300]} Metrics on the Hub need a "
                "connection; accuracy, macro F1 and the confusion matrix are computed without one."
            ) from None
    return loaded


class Evaluator:
    """Evaluates the model on held-out splits."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        launch: Launch,
        model: nn.Module,
        prepared: PreparedData,
        meter: Meter,
    ) -> None:
        self._config, self._accelerator, self._launch = config, accelerator, launch
        self._model, self._prepared, self._meter = model, prepared, meter
        self._more_metrics = load_hub_metrics(config.output.metrics, len(prepared.examples.label_names))

    def validation(self, step: int) -> Evaluation:
        """Metrics on the validation split, the same on every rank."""
        return self.split("validation", self._prepared.examples.validation, step)

    @torch.no_grad()  # not inference_mode: what a model caches in it cannot be trained with afterwards
    def split(self, name: str, examples: datasets.Dataset, step: int) -> Evaluation:
        """Metrics of one pass over ``examples``, each counted once, the same on every rank."""
        started = time.perf_counter()
        self._model.eval()
        rows: list[tuple[float, ...]] = []
        for batch in self._prepared.evaluation_batches(examples, self._config, self._accelerator, self._launch):
            with self._meter.evaluation(batch), shared_sequences(self._accelerator, batch) as part:
                part = part.to(self._accelerator.device)
                rows += _rows(self._model(part.inputs, part.labels, scored=True), part)
        reshard(self._model)
        self._model.train()
        metrics = self._metrics(_gathered(self._accelerator, self._launch, rows), examples)
        return Evaluation(name, step, metrics, time.perf_counter() - started)

    def _metrics(self, table: np.ndarray, examples: datasets.Dataset) -> dict[str, Any]:
        covered = np.zeros(len(table))
        if "num_bytes" in examples.column_names:
            covered = column(examples, "num_bytes")[table[:, 0].astype(int)]
        tokens = TokenMetrics(keep_in_memory=True)
        tokens.add_batch(loss_sum=table[:, 1], targets=table[:, 2], correct=table[:, 3], num_bytes=covered)
        metrics: dict[str, Any] = tokens.compute() or {}
        if num_classes := len(self._prepared.examples.label_names):
            del metrics["perplexity"]
            for metric in [ClassMetrics(num_classes, keep_in_memory=True), *self._more_metrics.values()]:
                metric.add_batch(predictions=table[:, 4].astype(int), references=table[:, 5].astype(int))
                metrics.update(metric.compute() or {})
        return {**metrics, "examples": len(table)}


def reshard(model: nn.Module) -> None:
    """Has FSDP2 drop the whole weights that a forward without a backward leaves on every rank."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _rows(scores: Scores, batch: MicroBatch) -> list[tuple[float, ...]]:
    """(example, loss sum, targets, correct, prediction, reference) of each example of a batch."""
    if not batch.example_ids:
        return []
    targets = batch.labels != IGNORE
    correct = (scores.predictions == batch.labels) & targets
    size = len(batch.labels)
    first = torch.stack([t.reshape(size, -1)[:, 0].double() for t in (scores.predictions, batch.labels)])
    sums = torch.stack([t.reshape(size, -1).sum(1).double() for t in (scores.loss_sums, targets, correct)])
    columns = torch.cat([sums, first]).T.tolist()
    return [(example, *row) for example, row in zip(batch.example_ids, columns, strict=True)]


def _gathered(accelerator: Accelerator, launch: Launch, rows: list[tuple[float, ...]]) -> np.ndarray:
    """(examples, 6) all ranks' rows in the order of the examples, one for each."""
    if launch.rank % launch.tensor_size:  # the first of the ranks that share tensors has the same rows
        rows = []
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        rows = gather_object(rows)
    table = np.array(sorted(rows), dtype=np.float64).reshape(-1, 6)
    if launch.context_size == 1:
        return table
    _, first, example = np.unique(table[:, 0], return_index=True, return_inverse=True)
    whole = table[first]
    whole[:, 1:4] = 0
    np.add.at(whole[:, 1:4], example, table[:, 1:4])  # each rank had a part of each example's positions
    return whole
