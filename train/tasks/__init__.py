"""What is learned: the contract of a task, and how documents become its examples.

A task is a file in this folder with a class ``Task(train.tasks.Task)``; adding one is adding the file.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import evaluate
import numpy as np
import torch
from torch import Tensor, nn

from train.loss import Objective, Scores, cross_entropy_scores, cross_entropy_sum
from train.records import Corpus, Examples, MicroBatch, UsageError, UserError, column
from train.state import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from train.config import Config

BYTES_AT_ONCE = 2**20
"""Text that a tokenizer gets in one call, or one document: until the call ends it holds some 100 bytes a token."""
DOCUMENTS_AT_ONCE = 100
"""Documents whose examples are in memory together, or fewer where these would be more than BYTES_AT_ONCE of text."""
DOCUMENTS_PER_WORKER, BYTES_PER_WORKER = 2000, 2**24


def task_names() -> list[str]:
    """The tasks in this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def load_task(name: str) -> type[Task]:
    """The class of a task.

    Raises:
        UsageError: there is no such file.
    """
    if name not in task_names():
        raise UsageError(f"task: {name!r} is not one of {', '.join(task_names())}.")
    return importlib.import_module(f"train.tasks.{name}").Task


class Task:
    """How documents are cut into examples, how examples form a batch, what their loss is and how they are judged.

    The defaults are those of a choice among classes at some positions: the cross-entropy of ``logits (..., C)`` with
    ``labels (...)``, summed over the labels that are not ``IGNORE``.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    """Class of transformers that builds the model for this task, by name."""
    default_metric: ClassVar[str]
    """The metric that says which checkpoint is best."""
    headline_metric: ClassVar[str]
    """The metric that a person reads first."""
    title: ClassVar[str] = ""
    """What such a model is called in a sentence: a … model."""
    pipeline_tag: ClassVar[str | None] = None
    """Of the Hub's model cards."""
    is_causal: ClassVar[bool] = False
    """Tokens must not see later ones."""
    labelled: ClassVar[bool] = False
    """Documents need a label."""
    encode_settings: ClassVar[tuple[str, ...]] = ("max_length",)
    """Options that :meth:`encode` depends on; examples cached under other values are not reused."""
    example_columns: ClassVar[tuple[str, ...]]
    """Columns that :meth:`encode` returns; ``length``, the positions a model sees, is one of them."""

    def __init__(self, config: Config) -> None:
        self.config, self.data = config, config.data

    @staticmethod
    def loss_sum(logits: Tensor, labels: Tensor, objective: Objective) -> Tensor:
        """() the training loss, summed over targets."""
        return cross_entropy_sum(logits, labels, objective)

    @staticmethod
    def scores(logits: Tensor, labels: Tensor) -> Scores:
        """What an evaluation keeps of a batch."""
        return cross_entropy_scores(logits, labels)

    @classmethod
    def check_model(cls, model: nn.Module, name: str, vocabulary: int, max_length: int, has_weights: bool) -> None:
        """Raises UserError when the model cannot learn the task.

        Args:
            name: of the model, for the message.
            vocabulary: how many token ids there are.
            has_weights: without them only what the model says of itself is looked at.
        """

    def check_metrics(self, label_names: Sequence[str]) -> None:
        """Raises UserError when the metrics asked for cannot be computed."""
        if names := self.config.output.metrics:
            raise UserError(f"metrics: {', '.join(names)} would compare classes, and this task has none: leave it out.")

    def metrics(self, table: np.ndarray, examples: datasets.Dataset, label_names: Sequence[str]) -> dict[str, Any]:
        """Metrics of one pass over a split.

        Args:
            table: (examples, 6): example, loss sum, targets, correct, prediction, reference.
        """
        tokens, covered = TokenMetrics(keep_in_memory=True), np.zeros(len(table))
        if "num_bytes" in examples.column_names:
            covered = column(examples, "num_bytes")[table[:, 0].astype(int)]
        tokens.add_batch(loss_sum=table[:, 1], targets=table[:, 2], correct=table[:, 3], num_bytes=covered)
        return tokens.compute() or {}

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises UserError when the tokenizer lacks what the task needs."""
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise UserError(f"{self.name}: the tokenizer has neither a padding nor an end token; choose another one.")

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; empty where the vocabulary is the classes."""
        return ()

    def accepted(
        self, documents: datasets.Dataset, label_names: Sequence[str]
    ) -> tuple[datasets.Dataset, tuple[str, ...]]:
        """The documents that can be used, and notes about the others."""
        return documents, ()

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """A batch of documents (columns ``text``, ``label``) as examples, a row each (``example_columns``)."""
        raise NotImplementedError

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Examples, each with its ``id``, as one batch. Randomness may come only from ``seed`` and the ids."""
        raise NotImplementedError

    def describe(self, examples: Examples) -> tuple[str, ...]:
        """Lines about the tokenised data that a person should read before training."""
        return ()

    def token_ids(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        """Token ids of each text, without any special token; texts are tokenised as their ids are asked for."""
        for piece in _pieces(texts):
            ids = tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            yield from ids  # pyright: ignore[reportReturnType]

    def framed(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """``ids`` between the tokenizer's marks for the start and the end of a sequence, where it has them."""
        start = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        return [i for i in (start, *ids, end) if isinstance(i, int)]

    def room(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of text in one example, in addition to those that :meth:`framed` adds.

        Raises:
            UserError: there is none.
        """
        marks = len(self.framed([], tokenizer))
        if self.data.max_length <= marks:
            raise UserError(
                f"max_length: {self.data.max_length} leaves no room for text: {self.name} adds {marks} tokens for "
                f"start and end. Give {marks + 1} or more."
            )
        return self.data.max_length - marks


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


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, of as many bytes at a time as a tokenizer gets in one call."""
    piece: list[str] = []
    num_bytes = 0
    for text in texts:
        size = len(text.encode())
        if piece and num_bytes + size > BYTES_AT_ONCE:
            yield piece
            piece, num_bytes = [], 0
        piece.append(text)
        num_bytes += size
    if piece:
        yield piece


def pad(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    """Rows of different lengths as one (B, S) tensor, filled up at the end."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def attention_inputs(rows: Sequence[torch.Tensor], pad_id: int) -> dict[str, torch.Tensor]:
    """``input_ids`` (B, S), and ``attention_mask`` (B, S) only where some position is padding."""
    inputs = {"input_ids": pad(rows, pad_id)}
    if len({len(row) for row in rows}) > 1:
        inputs["attention_mask"] = pad([torch.ones_like(row) for row in rows], 0)
    return inputs


def tokenize(corpus: Corpus, task: Task, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """All splits of ``corpus`` as examples of ``task``.

    Raises:
        UserError: a split has no example, or a label that the training split lacks.
    """
    label_names = task.label_names(corpus)
    encode = _Encode(task, tokenizer, label_names)
    notes: list[str] = []
    splits: dict[str, Any] = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    for name, documents in splits.items():
        if documents is None:
            continue
        if isinstance(documents, datasets.IterableDataset):
            splits[name] = encode.stream(documents)
            continue
        documents, split_notes = task.accepted(documents, label_names)
        notes += split_notes
        splits[name] = encode.split(documents, name)
        if len(splits[name]) == 0:
            raise UserError(f"{corpus.name}: the {name} split has no example after tokenisation.")
    examples = Examples(**splits, label_names=label_names)
    if isinstance(examples.train, datasets.Dataset):
        notes += task.describe(examples)
    return replace(examples, notes=tuple(notes))


class _Encode:
    """The task's ``encode`` over whole splits."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, label_names: Sequence[str]) -> None:
        self.task, self.tokenizer, self.label_names, self.data = task, tokenizer, label_names, task.data
        settings = {name: task.config.get(name) for name in task.encode_settings}
        source = [inspect.getsource(cls) for cls in type(task).__mro__ if issubclass(cls, Task)]  # a fork changes it
        self.recipe = f"{source} {sorted(settings.items())} {list(label_names)} {tokenizer_digest(tokenizer)}"

    def __call__(self, documents: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return self.task.encode(documents, self.tokenizer, self.label_names)

    def split(self, documents: datasets.Dataset, name: str) -> datasets.Dataset:
        # Our own fingerprint: pickling a tokenizer gives another one after its first use, and the cache would miss.
        fingerprint = hashlib.sha256(f"{documents._fingerprint} {self.recipe}".encode()).hexdigest()[:32]
        num_bytes = documents.data.column("text").nbytes * len(documents) // max(1, documents.data.num_rows)
        # Many short documents and few long ones are both worth another process.
        useful = 1 + max(len(documents) // DOCUMENTS_PER_WORKER, num_bytes // BYTES_PER_WORKER)
        workers = self.data.preprocessing_num_workers or min(os.cpu_count() or 1, useful)
        return documents.map(
            self,
            batched=True,
            batch_size=min(max(BYTES_AT_ONCE * len(documents) // max(1, num_bytes), 1), DOCUMENTS_AT_ONCE),
            remove_columns=documents.column_names,
            num_proc=workers if workers > 1 else None,
            new_fingerprint=fingerprint,
            desc=f"Tokenising {name}",
        )

    def stream(self, documents: datasets.IterableDataset) -> datasets.IterableDataset:
        return documents.map(self, batched=True, batch_size=16, remove_columns=documents.column_names)
