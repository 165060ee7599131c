"""One label for a whole document."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import evaluate
import numpy as np
import torch

from train import tasks
from train.records import Corpus, Examples, MicroBatch, UserError, column
from train.tasks import attention_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MATRIX_CLASSES = 100  # up to this many have a confusion matrix
CONFUSIONS = 20  # named where there is none


class Task(tasks.Task):
    """Each document is one example; what does not fit ``max_length`` is cut as ``truncation`` says."""

    name: ClassVar[str] = "sequence_classification"
    title: ClassVar[str] = "sequence classification"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    default_metric: ClassVar[str] = "accuracy"
    headline_metric: ClassVar[str] = "accuracy"
    labelled: ClassVar[bool] = True
    encode_settings: ClassVar[tuple[str, ...]] = ("max_length", "truncation")
    example_columns: ClassVar[tuple[str, ...]] = ("tokens", "length", "document_length", "label")

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """The training split's labels, numbers in order of value, names in order of the alphabet.

        Raises:
            UserError: fewer than two classes.
        """
        labels = set(corpus.train["label"])  # of a stream, too: it is read once for this
        if len(labels) < 2:
            raise UserError(
                f"{corpus.name}: the training split has only the label {', '.join(map(repr, labels))} in column "
                f"{self.config.get('label_column', 'label')!r}; classification needs two or more. Is it the right "
                "--label_column?"
            )
        return tuple(str(label) for label in sorted(labels))

    def accepted(
        self, documents: datasets.Dataset, label_names: Sequence[str]
    ) -> tuple[datasets.Dataset, tuple[str, ...]]:
        """The documents whose label the training split knows.

        Raises:
            UserError: another label, unless ``on_bad_record`` is skip.
        """
        number = _numbering(label_names)
        unknown = [i for i, label in enumerate(documents["label"]) if number(label) is None]
        if not unknown:
            return documents, ()
        first = documents[unknown[0]]
        place = first.get("source", f"document {unknown[0]}")
        where = f"{place}: label {first['label']!r} does not occur in the training split"
        if self.config.get("on_bad_record", "error") == "error":
            more = "" if self.config.get("max_train_samples") is None else "raise --max_train_samples, "
            raise UserError(
                f"{where} (its labels: {', '.join(label_names[:20])}). Correct it, {more}or leave such records out "
                "with --on_bad_record skip."
            )
        kept = sorted(set(range(len(documents))) - set(unknown))
        return documents.select(kept), (f"skipped {len(unknown)} records with an unknown label, the first {where}",)

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """One example a document, cut to ``max_length`` with the tokenizer's start and end marks kept."""
        number = _numbering(label_names)
        room = self.room(tokenizer)
        examples: dict[str, list[Any]] = {column: [] for column in self.example_columns}
        for ids, label in zip(self.token_ids(documents["text"], tokenizer), documents["label"], strict=True):
            tokens = self.framed(self._cut(ids, room), tokenizer)
            examples["tokens"].append(np.array(tokens, dtype=np.int32))
            examples["length"].append(len(tokens))
            examples["document_length"].append(len(tokens) + max(0, len(ids) - room))
            examples["label"].append(number(label))
        return examples

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if len(ids) <= room:
            return ids
        head = {"keep_head": room, "keep_tail": 0}.get(self.data.truncation, (room + 1) // 2)
        return ids[:head] + ids[len(ids) - room + head :]

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """``input_ids`` (B, S) with an attention mask where there is padding, ``labels`` (B,)."""
        tokens = [torch.tensor(example["tokens"], dtype=torch.long) for example in examples]
        return MicroBatch(
            inputs=attention_inputs(tokens, pad_id),
            labels=torch.tensor([int(example["label"]) for example in examples]),
            num_targets=len(examples),
            example_ids=tuple(int(example["id"]) for example in examples),
            num_tokens=sum(map(len, tokens)),
        )

    def check_metrics(self, label_names: Sequence[str]) -> None:
        """Loads them once, before the first step."""
        load_metrics(self.config.output.metrics, len(label_names))

    def metrics(self, table: np.ndarray, examples: datasets.Dataset, label_names: Sequence[str]) -> dict[str, Any]:
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
        assert isinstance(examples.train, datasets.Dataset)
        kept, before = column(examples.train, "length"), column(examples.train, "document_length")
        lost = 1 - kept.sum() / before.sum()
        cut = int((before > kept).sum())
        lines = [f"{len(examples.label_names)} classes: {', '.join(examples.label_names[:20])}"]
        if cut:
            lines.append(
                f"truncation ({self.data.truncation}): {cut} of {len(kept)} documents are longer than "
                f"{self.data.max_length} tokens; {100 * lost:.1f} % of all tokens are lost"
            )
        return tuple(lines)


def class_metrics(predictions: np.ndarray, references: np.ndarray, num_classes: int) -> dict[str, Any]:
    """Accuracy, macro F1 and the confusion matrix ``[reference][prediction]``; arguments (examples,).

    Many classes have their most frequent confusions in its place: nobody reads a matrix of millions, and every
    evaluation would write it.
    """
    right = references == predictions
    hits = np.bincount(references[right], minlength=num_classes)
    there = np.bincount(references, minlength=num_classes) + np.bincount(predictions, minlength=num_classes)
    f1 = 2 * hits[there > 0] / there[there > 0]  # the mean is over classes that were there or were predicted
    metrics: dict[str, Any] = {"accuracy": float(right.mean()), "macro_f1": float(f1.mean())}
    if num_classes <= MATRIX_CLASSES:
        matrix = np.zeros((num_classes, num_classes), dtype=np.int64)
        np.add.at(matrix, (references, predictions), 1)
        return {**metrics, "confusion_matrix": matrix.tolist()}
    wrong = Counter(zip(references[~right].tolist(), predictions[~right].tolist(), strict=True))
    most = sorted(wrong.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS]
    rows = [{"reference": reference, "prediction": found, "count": count} for (reference, found), count in most]
    return {**metrics, "most_frequent_confusions": rows}


@functools.cache
def load_metrics(names: tuple[str, ...], num_classes: int) -> list[evaluate.EvaluationModule]:
    """Further metrics by name on the Hub or by folder, each tried once, before the first step rather than after it.

    Raises:
        UserError: one cannot be loaded, or not be computed from predicted classes.
    """
    loaded, classes = [], list(range(num_classes))
    for name in names:
        try:
            loaded.append(evaluate.load(name, keep_in_memory=True))
            loaded[-1].compute(predictions=classes, references=classes)
        except Exception as error:  # metric scripts fail in their own ways
            raise UserError(
                f"metrics: {name!r} cannot be used: {' '.join(str(error).split())[:300]} Metrics on the Hub need a "
                "connection; accuracy, macro F1 and the confusion matrix are computed without one."
            ) from None
    return loaded


def _numbering(names: Sequence[str]) -> Callable[[Any], int | None]:
    """Gives a label the number of its class: by its name, or by its plain name where only one class has that."""
    shared = Counter(map(_plain, names))
    exact = {name: i for i, name in enumerate(names)}
    plain = {_plain(name): i for i, name in enumerate(names) if shared[_plain(name)] == 1}
    return lambda label: exact.get(str(label), plain.get(_plain(str(label))))


def _plain(name: str) -> str:
    """``name`` as any format of files gives it: ``true``, which JSON gives as 1, and ``1.0`` are 1."""
    if name.lower() in ("true", "false"):
        return str(int(name.lower() == "true"))
    whole = re.fullmatch(r"(-?\d+)\.0+", name)
    return whole[1] if whole else name
