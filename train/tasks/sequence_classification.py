"""One label for a whole document."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from train import tasks
from train.records import Corpus


class Task(tasks.Task):
    """Each document is one example; what does not fit ``max_length`` is cut as ``truncation`` says."""

    auto_class = "AutoModelForSequenceClassification"
    default_metric = headline_metric = "accuracy"
    labelled = True
    encode_settings = ("max_length", "dataset_options", "truncation")
    example_columns = ("tokens", "length", "document_length", "label")

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """In the order of a classifier that has them, in upper or lower case, or of the dataset; else by value."""
        labels, architecture = set(map(str, corpus.splits["train"]["label"][:])), self.config.architecture
        by_value = sorted(labels, key=lambda n: (float(n) if re.fullmatch(r"-?\d+(\.\d+)?", n) else math.inf, n))
        names = corpus.classes if labels.issubset(corpus.classes) else tuple(by_value)
        if architecture.model is None or architecture.is_function:
            return names
        # Its head was trained for these numbers; with other numbers its classes would be mixed up.
        known = tuple(name for _, name in sorted((tasks.stored_config(architecture).id2label or {}).items()))
        own = {label.casefold(): label for label in labels}
        fits = len(own) == len(labels) and own.keys() <= {name.casefold() for name in known}
        return tuple(own.get(name.casefold(), name) for name in known) if fits else names

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
        """The document as one example, with the tokenizer's start and end tokens."""
        lost = max(0, len(ids) - (room := self.room(tokenizer)))
        head = {"keep_head": room, "keep_tail": 0}.get(self.data.truncation, (room + 1) // 2)
        tokens = np.array(self.framed(ids[:head] + ids[head + lost :] if lost else ids, tokenizer), dtype=np.int32)
        yield {"tokens": tokens, "length": len(tokens), "document_length": len(tokens) + lost, "label": label}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens and the number of their class."""
        return torch.tensor(example["tokens"], dtype=torch.long), torch.tensor(int(example["label"]))

    def metrics(self, table: np.ndarray, examples: Dataset, label_names: Sequence[str]) -> dict[str, Any]:
        """Loss, accuracy, macro F1 and confusions."""
        metrics = super().metrics(table, examples, label_names)
        del metrics["perplexity"]
        return metrics | class_metrics(table[:, 4].astype(int), table[:, 5].astype(int), len(label_names))


def class_metrics(predictions: np.ndarray, references: np.ndarray, num_classes: int) -> dict[str, Any]:
    """Accuracy, macro F1 and, of few classes, ``confusion_matrix[reference][prediction]``; arguments (examples,)."""
    right = references == predictions
    num_classes = max(num_classes, predictions.max() + 1)  # a model of one's own may have outputs to spare
    hits = np.bincount(references[right], minlength=num_classes)
    there = np.bincount(references, minlength=num_classes) + np.bincount(predictions, minlength=num_classes)
    f1 = 2 * hits[there > 0] / there[there > 0]  # the mean is over classes that were there or were predicted
    metrics: dict[str, Any] = {"accuracy": float(right.mean()), "macro_f1": float(f1.mean())}
    if num_classes <= 100:  # nobody reads a larger matrix
        counts = np.bincount(references * num_classes + predictions, minlength=num_classes**2)
        metrics["confusion_matrix"] = counts.reshape(num_classes, num_classes).tolist()
    return metrics
