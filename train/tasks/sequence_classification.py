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

MATRIX_CLASSES = 100
"""Up to this many have a confusion matrix."""
CONFUSIONS = 20
"""Named where there is none."""
_WHOLE = re.compile(r"(-?\d+)\.0+")


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
        if self.data.truncation == "keep_head":
            return ids[:room]
        if self.data.truncation == "keep_tail":
            return ids[len(ids) - room :]
        return ids[: (room + 1) // 2] + ids[len(ids) - room // 2 :]

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
        more = load_metrics(self.config.output.metrics, len(label_names)).values()
        for metric in [ClassMetrics(len(label_names), keep_in_memory=True), *more]:
            metric.add_batch(predictions=table[:, 4].astype(int), references=table[:, 5].astype(int))
            metrics.update(metric.compute() or {})
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


@functools.cache
def load_metrics(names: tuple[str, ...], num_classes: int) -> dict[str, Any]:
    """Further metrics by name on the Hub or by folder, each tried once, before the first step rather than after it.

    Raises:
        UserError: one cannot be loaded, or not be computed from predicted classes.
    """
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


def _numbering(names: Sequence[str]) -> Callable[[Any], int | None]:
    """The number of a label's class: by its name, or by its plain name where only one class has that."""
    shared = Counter(map(_plain, names))
    exact = {name: i for i, name in enumerate(names)}
    plain = {_plain(name): i for i, name in enumerate(names) if shared[_plain(name)] == 1}
    return lambda label: exact.get(str(label), plain.get(_plain(str(label))))


def _plain(name: str) -> str:
    """``name`` as any format of files gives it: ``true``, which JSON gives as 1, and ``1.0`` are 1."""
    if name.lower() in ("true", "false"):
        return str(int(name.lower() == "true"))
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name
