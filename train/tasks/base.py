"""The contract of a task: how documents become examples, and examples a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from train.errors import UserError
from train.records import Corpus, Examples, MicroBatch

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from train.config import Data

BYTES_AT_ONCE = 2**20
"""Text that a tokenizer gets in one call, or one document: until the call ends it holds some 100 bytes a token."""


class Task:
    """Base of all tasks. A subclass says how a document is cut into examples and how examples form a batch.

    Every task is a choice among classes at some positions: the loss is the cross-entropy of ``logits (..., C)``
    with ``labels (...)``, summed over the labels that are not ``IGNORE``. So a task only shapes batches; step,
    evaluation and the loss are the same for all.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """What kind of model it trains, for "a … model"; the name if empty."""
    pipeline_tag: ClassVar[str] = ""
    """The Hub's name for what such a model does, if there is one."""
    auto_class: ClassVar[str]
    """Class of transformers that builds the model for this task, by name."""
    default_metric: ClassVar[str]
    """The metric that says which checkpoint is best."""
    headline_metric: ClassVar[str]
    """The metric that a person reads first."""
    labelled: ClassVar[bool] = False
    """Documents need a label."""
    encode_settings: ClassVar[tuple[str, ...]] = ("max_length",)
    """Fields of ``Data`` that :meth:`encode` depends on; examples cached under other values are not reused."""
    example_columns: ClassVar[tuple[str, ...]]
    """Columns that :meth:`encode` returns; ``length``, the positions a model sees, is one of them."""

    def __init__(self, data: Data) -> None:
        self.data = data

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

    def references(self, texts: Sequence[str]) -> dict[str, float]:
        """Figures to hold the result against, by name."""
        return {}

    def sample(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, seed: int) -> str | None:
        """Something the trained model makes, to look at."""
        return None

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
        """Tokens of text in one example, beside those that :meth:`framed` adds.

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
