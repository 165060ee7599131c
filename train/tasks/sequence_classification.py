"""One label for a whole document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import numpy as np
import torch

from train.errors import UserError
from train.records import Corpus, Examples, MicroBatch, column
from train.tasks.base import Task, attention_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHOLE = re.compile(r"(-?\d+)\.0+")


class SequenceClassification(Task):
    """Each document is one example; what does not fit ``max_length`` is cut as ``truncation`` says."""

    name: ClassVar[str] = "sequence_classification"
    title: ClassVar[str] = "sequence classification"
    pipeline_tag: ClassVar[str] = "text-classification"
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
                f"{self.data.label_column!r}; classification needs two or more. Is it the right --label_column?"
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
        where = f"{first['source']}: label {first['label']!r} does not occur in the training split"
        if self.data.on_bad_record == "error":
            more = "" if self.data.max_train_samples is None else "raise --max_train_samples, "
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
