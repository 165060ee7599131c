"""One label for a whole document."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from train import tasks
from train.figures import several
from train.records import Corpus, Examples, UserError, column, one_line

MATRIX_CLASSES = 100  # up to this many have a confusion matrix


class Task(tasks.Task):
    """Each document is one example; what does not fit ``max_length`` is cut as ``truncation`` says."""

    name = "sequence_classification"
    auto_class = "AutoModelForSequenceClassification"
    default_metric = headline_metric = "accuracy"
    labelled = True
    encode_settings = ("max_length", "truncation")
    example_columns = ("tokens", "length", "document_length", "label")

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """The training split's labels: in the order of a classifier that has them, else by value or alphabet.

        Raises UserError for fewer than two.
        """
        labels = set(corpus.train["label"])
        if len(labels) < 2:
            raise UserError(
                f"{corpus.name}: the training split has only the label {', '.join(map(repr, labels))} in column "
                f"{self.config.get('label_column', 'label')!r}; classification needs two or more. Is it the right "
                "--label_column?"
            )
        names, architecture = tuple(sorted(map(str, labels), key=_place)), self.config.architecture
        if architecture.model is None or architecture.is_function:
            return names
        # Its head is trained for these numbers; under others it would be a permuted one.
        known = tuple(name for _, name in sorted((tasks.stored_config(architecture).id2label or {}).items()))
        return known if set(names) <= set(known) else names

    def classes_of(self, labels: Sequence[Any], label_names: Sequence[str]) -> list[int | None]:
        numbers = {name: number for number, name in enumerate(label_names)}
        return [numbers.get(str(label)) for label in labels]

    def accepted(self, documents: Dataset, label_names: Sequence[str]) -> tuple[Dataset, tuple[str, ...]]:
        """The documents that have a class; raises UserError for any other, unless ``on_bad_record`` is skip."""
        is_known = [number is not None for number in self.classes_of(documents["label"], label_names)]
        if all(is_known):
            return documents, ()
        first = documents[number := is_known.index(False)]
        place = first.get("source", f"document {number}")
        where = f"{place}: label {first['label']!r} does not occur in the training split"
        if self.config.get("on_bad_record", "error") == "error":
            more = "" if self.config.get("max_train_samples") is None else "raise --max_train_samples, "
            raise UserError(
                f"{where} (its labels: {', '.join(label_names[:20])}). Correct it, {more}or leave such records out "
                "with --on_bad_record skip."
            )
        note = f"skipped {several(is_known.count(False), 'record')} with an unknown label, the first {where}"
        return documents.select(np.flatnonzero(is_known)), (note,)

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
        """The document as one example, with the tokenizer's start and end marks."""
        lost = max(0, len(ids) - (room := self.room(tokenizer)))
        head = {"keep_head": room, "keep_tail": 0}.get(self.data.truncation, (room + 1) // 2)
        tokens = np.array(self.framed(ids[:head] + ids[head + lost :] if lost else ids, tokenizer), dtype=np.int32)
        yield {"tokens": tokens, "length": len(tokens), "document_length": len(tokens) + lost, "label": label}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens and the number of their class."""
        return torch.tensor(example["tokens"], dtype=torch.long), torch.tensor(int(example["label"]))

    def check_metrics(self, label_names: Sequence[str]) -> None:
        """Loads them once, before the first step."""
        load_metrics(self.config.output.metrics, len(label_names))

    def metrics(self, table: np.ndarray, examples: Dataset, label_names: Sequence[str]) -> dict[str, Any]:
        """Loss, accuracy, macro F1, confusions, and the further metrics asked for by name."""
        metrics = super().metrics(table, examples, label_names)
        del metrics["perplexity"]
        predictions, references = table[:, 4:].T.astype(int)
        metrics |= class_metrics(predictions, references, len(label_names))
        for metric in load_metrics(self.config.output.metrics, len(label_names)):
            metrics |= metric.compute(predictions=predictions, references=references) or {}
        return metrics

    def describe(self, examples: Examples) -> tuple[str, ...]:
        """How much of the text was cut."""
        kept, before = column(examples.train, "length"), column(examples.train, "document_length")
        classes = f"{len(examples.label_names)} classes: {', '.join(examples.label_names[:20])}"
        alike = Counter(" ".join(name.casefold().split()) for name in examples.label_names)
        if same := [repr(n) for n in examples.label_names if alike[" ".join(n.casefold().split())] > 1]:
            classes += f" (of these {', '.join(same[:4])} differ only in case or spaces)"
        if not (cut := int((before > kept).sum())):
            return (classes,)
        return classes, (
            f"truncation ({self.data.truncation}): {cut} of {len(kept)} documents are longer than "
            f"{self.data.max_length} tokens; {100 * (1 - kept.sum() / before.sum()):.1f} % of all tokens are lost"
        )


def class_metrics(predictions: np.ndarray, references: np.ndarray, num_classes: int) -> dict[str, Any]:
    """Accuracy, macro F1 and, of few classes, ``confusion_matrix[reference][prediction]``; arguments (examples,)."""
    right = references == predictions
    num_classes = max(num_classes, predictions.max() + 1)  # a model of one's own may have outputs to spare
    hits = np.bincount(references[right], minlength=num_classes)
    there = np.bincount(references, minlength=num_classes) + np.bincount(predictions, minlength=num_classes)
    f1 = 2 * hits[there > 0] / there[there > 0]  # the mean is over classes that were there or were predicted
    metrics: dict[str, Any] = {"accuracy": float(right.mean()), "macro_f1": float(f1.mean())}
    if num_classes <= MATRIX_CLASSES:
        counts = np.bincount(references * num_classes + predictions, minlength=num_classes**2)
        metrics["confusion_matrix"] = counts.reshape(num_classes, num_classes).tolist()
    return metrics


@functools.cache
def load_metrics(names: tuple[str, ...], num_classes: int) -> list[Any]:
    """Further metrics by name on the Hub or by folder, each tried once, before the first step rather than after it.

    Raises UserError for one that cannot be loaded, or not be computed from predicted classes.
    """
    loaded, classes = [], list(range(num_classes))
    for name in names:
        try:
            import evaluate  # here: it takes two seconds

            loaded.append(evaluate.load(name, keep_in_memory=True))
            loaded[-1].compute(predictions=classes, references=classes)
        except Exception as error:  # metric scripts fail in their own ways
            raise UserError(
                f"metrics: {name!r} cannot be used: {one_line(error)} Metrics on the Hub need a "
                "connection; accuracy, macro F1 and the confusion matrix are computed without one."
            ) from None
    return loaded


def _place(name: str) -> tuple[float, str]:
    """By what names are sorted: numbers by value, whether a file gives them as such or, like CSV, as text."""
    return (float(name) if re.fullmatch(r"-?\d+(\.\d+)?", name) else math.inf), name
