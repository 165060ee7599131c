"""What is learned: the contract of a task, and how documents become its examples.

A task is a file in this folder with a class ``Task(train.tasks.Task)``; adding one is adding the file.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor, nn

from train.loss import Objective, Scores, cross_entropy_scores, cross_entropy_sum
from train.records import Corpus, Examples, MicroBatch, UsageError, UserError, column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from train.config import Config

# Text that a tokenizer gets in one call, or one document: until the call ends it holds some 100 bytes a token.
BYTES_AT_ONCE = 2**20
# Documents whose examples are in memory together; fewer where these would be more than BYTES_AT_ONCE of text.
DOCUMENTS_AT_ONCE = 100
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
    auto_class: ClassVar[str]  # of transformers: builds the model for this task
    default_metric: ClassVar[str]  # says which checkpoint is best
    headline_metric: ClassVar[str]  # what a person reads first
    title: ClassVar[str] = ""  # what such a model is called in a sentence: a … model
    pipeline_tag: ClassVar[str | None] = None  # of the Hub's model cards
    is_causal: ClassVar[bool] = False  # tokens must not see later ones
    labelled: ClassVar[bool] = False  # documents need a label
    # Options that encode depends on; examples cached under other values are not reused.
    encode_settings: ClassVar[tuple[str, ...]] = ("max_length",)
    # Columns that encode returns; ``length``, the positions a model sees, is one of them.
    example_columns: ClassVar[tuple[str, ...]]

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

    def metrics(self, table: np.ndarray, examples: Dataset, label_names: Sequence[str]) -> dict[str, Any]:
        """Metrics of one pass over a split.

        Args:
            table: (examples, 6): example, loss sum, targets, correct, prediction, reference.
        """
        covered = np.zeros(len(table))
        if "num_bytes" in examples.column_names:
            covered = column(examples, "num_bytes")[table[:, 0].astype(int)]
        return token_metrics(*table[:, 1:4].T, num_bytes=covered)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises UserError when the tokenizer lacks what the task needs."""
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise UserError(f"{self.name}: the tokenizer has neither a padding nor an end token; choose another one.")

    def label_names(self, corpus: Corpus) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; empty where the vocabulary is the classes."""
        return ()

    def accepted(self, documents: Dataset, label_names: Sequence[str]) -> tuple[Dataset, tuple[str, ...]]:
        """The documents that can be used, and notes about the others."""
        return documents, ()

    def encode(
        self, documents: Mapping[str, Sequence[Any]], tokenizer: Tokenizer, label_names: Sequence[str]
    ) -> dict[str, list[Any]]:
        """A batch of documents (columns ``text``, ``label``) as examples, a row each (``example_columns``)."""
        raise NotImplementedError

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Examples, each with its ``id``, as one batch. Randomness may come only from ``seed`` and the ids."""
        raise NotImplementedError

    def describe(self, examples: Examples) -> tuple[str, ...]:
        """Lines about the tokenised data that a person should read before training."""
        return ()

    def token_ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
        """Token ids of each text, without any special token; texts are tokenised as their ids are asked for."""
        for piece in _pieces(texts):
            ids = tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            yield from ids  # pyright: ignore[reportReturnType]

    def framed(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """``ids`` between the tokenizer's marks for the start and the end of a sequence, where it has them."""
        start = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        return [i for i in (start, *ids, end) if isinstance(i, int)]

    def room(self, tokenizer: Tokenizer) -> int:
        """Tokens of text in one example, in addition to those that :meth:`framed` adds.

        Raises:
            UserError: there is none.
        """
        marks, length = len(self.framed([], tokenizer)), self.data.max_length
        if length <= marks:
            why = f"{self.name} adds {marks} tokens for start and end"
            raise UserError(f"max_length: {length} leaves no room for text: {why}. Give {marks + 1} or more.")
        return length - marks


def token_metrics(
    loss_sums: Iterable[float], targets: Iterable[float], correct: Iterable[float], num_bytes: Iterable[float]
) -> dict[str, float]:
    """Loss, perplexity and accuracy over all targets, and bits per byte of the text they cover; an entry an example."""
    loss_sum, count, covered = math.fsum(loss_sums), max(1.0, math.fsum(targets)), math.fsum(num_bytes)
    loss, accuracy = loss_sum / count, math.fsum(correct) / count
    bits_per_byte = {"bits_per_byte": loss_sum / math.log(2) / covered} if covered > 0 else {}
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy, **bits_per_byte}


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, of as many bytes at a time as a tokenizer gets in one call."""
    first = num_bytes = 0
    for i, text in enumerate(texts):
        size = len(text.encode())
        if i > first and num_bytes + size > BYTES_AT_ONCE:
            yield list(texts[first:i])
            first, num_bytes = i, 0
        num_bytes += size
    if texts:
        yield list(texts[first:])


def pad(rows: Sequence[Tensor], value: int) -> Tensor:
    """Rows of different lengths as one (B, S) tensor, filled up at the end."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def pad_token_id(tokenizer: Tokenizer) -> int:
    """The padding token, or the end token where there is none."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return found if isinstance(found, int) else 0


def attention_inputs(rows: Sequence[Tensor], pad_id: int) -> dict[str, Tensor]:
    """``input_ids`` (B, S), and ``attention_mask`` (B, S) only where some position is padding."""
    inputs = {"input_ids": pad(rows, pad_id)}
    if len({len(row) for row in rows}) > 1:
        inputs["attention_mask"] = pad([torch.ones_like(row) for row in rows], 0)
    return inputs


def tokenize(corpus: Corpus, task: Task, tokenizer: Tokenizer) -> Examples:
    """All splits of ``corpus`` as examples of ``task``.

    Raises:
        UserError: a split has no example, or a label that the training split lacks.
    """
    label_names = task.label_names(corpus)
    encode = partial(task.encode, tokenizer=tokenizer, label_names=label_names)
    settings = [(name, task.config.get(name)) for name in sorted(task.encode_settings)]
    source = [inspect.getsource(cls) for cls in type(task).__mro__ if issubclass(cls, Task)]  # a fork changes it
    recipe = f"{source} {settings} {list(label_names)} {tokenizer_digest(tokenizer)}"
    notes: list[str] = []
    splits: dict[str, Any] = {"train": corpus.train, "validation": corpus.validation, "test": corpus.test}
    for name, documents in splits.items():
        if isinstance(documents, IterableDataset):
            splits[name] = documents.map(encode, batched=True, batch_size=16, remove_columns=documents.column_names)
        elif documents is not None:
            documents, split_notes = task.accepted(documents, label_names)
            notes += split_notes
            splits[name] = _encoded(documents, encode, name, recipe, task.data.preprocessing_num_workers)
            if len(splits[name]) == 0:
                raise UserError(f"{corpus.name}: the {name} split has no example after tokenisation.")
    examples = Examples(**splits, label_names=label_names)
    if isinstance(examples.train, Dataset):
        notes += task.describe(examples)
    return replace(examples, notes=tuple(notes))


def _encoded(documents: Dataset, encode: Callable[..., Any], name: str, recipe: str, workers: int | None) -> Dataset:
    """A split as examples, from the cache where ``recipe`` was applied to the same documents before."""
    # Our own fingerprint: pickling a tokenizer gives another one after its first use, and the cache would miss.
    fingerprint = hashlib.sha256(f"{documents._fingerprint} {recipe}".encode()).hexdigest()[:32]
    num_bytes = documents.data.column("text").nbytes * len(documents) // max(1, documents.data.num_rows)
    # Many short documents and few long ones are both worth another process.
    useful = 1 + max(len(documents) // DOCUMENTS_PER_WORKER, num_bytes // BYTES_PER_WORKER)
    workers = workers or min(os.cpu_count() or 1, useful)
    return documents.map(
        encode,
        batched=True,
        batch_size=min(max(BYTES_AT_ONCE * len(documents) // max(1, num_bytes), 1), DOCUMENTS_AT_ONCE),
        remove_columns=documents.column_names,
        num_proc=workers if workers > 1 else None,
        new_fingerprint=fingerprint,
        desc=f"Tokenising {name}",
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that give equal ids: fast ones by their JSON, others by class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Truncation and padding are those of its last call.
        text = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    else:
        text = f"{type(tokenizer)}{sorted(tokenizer.get_vocab().items())}"
    return hashlib.sha256(f"{text}{sorted(tokenizer.special_tokens_map.items())}".encode()).hexdigest()[:16]
