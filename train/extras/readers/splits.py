"""Splits: choosing among those a dataset has, and holding out documents where it has none to validate on.

Which documents are held out never depends on the run or the machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from train.errors import UserError
from train.extras.readers.rows import Documents, some

if TYPE_CHECKING:
    import datasets

    from train.config import Data

HELD_OUT_OF_STREAM = 100
"""Documents at the head of a stream that become the validation split, unless max_eval_samples says otherwise."""

NEARBY = 2000
"""A text is cut at the end of a line if there is one within so many characters."""


@dataclass(frozen=True)
class Splits:
    """The splits of a source; one that it does not have is None."""

    train: datasets.Dataset | datasets.IterableDataset
    validation: datasets.Dataset | None = None
    test: datasets.Dataset | None = None
    notes: tuple[str, ...] = ()


def choose(names: Sequence[str], data: Data, name: str) -> dict[str, str]:
    """Which of a dataset's splits (``names``) to train on, validate on and test on, as far as it has them.

    Raises:
        UserError: a split that is not there, or one that would be trained and validated on.
    """
    train = data.dataset_split
    validation = data.validation_split
    if validation is None and "validation" in names and "validation" not in _names_in(train):
        validation = "validation"
    for flag, split in (("--dataset_split", train), ("--validation_split", validation)):
        if split is not None and not set(_names_in(split)) <= set(names):
            raise UserError(f"{name}: no split {split!r}; it has {', '.join(names)}. Name one with {flag}.")
    if train == validation:
        raise UserError(f"{name}: --dataset_split and --validation_split both name {train!r}.")
    used = {*_names_in(train), *_names_in(validation or "")}
    test = "test" if "test" in names and "test" not in used else None
    return {role: split for role, split in (("train", train), ("validation", validation), ("test", test)) if split}


def _names_in(split: str) -> list[str]:
    """The names in an expression such as ``train[:10%]+unsupervised``."""
    return re.sub(r"\[.*?\]", "", split).split("+")


def gather(chosen: Mapping[str, str], load_split: Callable[[str, str], Documents]) -> Splits:
    """The splits that ``load_split(role, split)`` gives, and all notes.

    Raises:
        UserError: ``load_split`` failed for training or validation.
    """
    loaded: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    for role, split in chosen.items():
        try:
            loaded[role], more = load_split(role, split)
        except UserError as error:
            # The test split of many public datasets has no labels; that must not stop a training.
            if role != "test":
                raise
            more = (f"left out the test split: {error}",)
        notes += more
    return Splits(**loaded, notes=notes)


def with_validation(splits: Splits, data: Data, labelled: bool) -> Splits:
    """The splits with some training documents held out for validation, and a note on how.

    Of a stream these are the first ones. A single document without a label is cut in two near its end; every label
    keeps a document to train on.

    Raises:
        UserError: there is too little for two splits.
    """
    documents: Any = splits.train
    if data.streaming:
        train, validation, note = _hold_out_head(documents, data.max_eval_samples or HELD_OUT_OF_STREAM, data.dataset)
    elif len(documents) == 1 and not labelled:
        train, validation, note = _divide(documents, data.validation_fraction, data.dataset)
    elif len(documents) == 1:
        raise UserError(
            f"{data.dataset}: one labelled record cannot be split in two. Add records, or --validation_dataset."
        )
    else:
        train, validation, note = _hold_out(documents, data.validation_fraction, labelled, data.dataset)
    return replace(splits, train=train, validation=validation, notes=(*splits.notes, note))


def _hold_out(documents: datasets.Dataset, fraction: float, labelled: bool, name: str) -> tuple[Any, Any, str]:
    labels = list(documents["label"]) if labelled else None
    order = np.random.default_rng(0).permutation(len(documents))
    count = min(max(round(len(documents) * fraction), 1), len(documents) - 1)
    spared = order if labels is None else _spared(order, labels)
    validation = np.sort(np.fromiter(islice(spared, count), dtype=int))
    if not len(validation):
        raise UserError(
            f"{name}: every label is that of a single record, and training needs that one. Add records, or "
            "--validation_dataset; or choose another --label_column."
        )
    note = f"held out {len(validation):,} of {len(documents):,} documents for validation"
    if labels is not None and (unseen := set(labels) - {labels[i] for i in validation}):
        note += f", none of them with the label {some([repr(label) for label in sorted(unseen)])}"
    return documents.select(np.delete(np.arange(len(documents)), validation)), documents.select(validation), note


def _spared(order: np.ndarray, labels: Sequence[Any]) -> Iterator[int]:
    """Positions in this order, without the last of each label."""
    left = Counter(labels)
    for position in order:
        left[labels[position]] -= 1
        if left[labels[position]]:
            yield position


def _divide(document: datasets.Dataset, fraction: float, name: str) -> tuple[Any, Any, str]:
    # Through map, the parts land in the cache next to the document instead of in memory.
    parts = document.map(_halves, batched=True, fn_kwargs={"fraction": fraction}, desc="Splitting one document")
    if len(parts) < 2:
        raise UserError(f"{name}: one document, too short to be split in two. Add text, or --validation_dataset.")
    return (
        parts.select([0]),
        parts.select([1]),
        f"{name} is one document: its last {fraction:.0%} is the validation split",
    )


def _halves(batch: Mapping[str, Sequence[Any]], fraction: float) -> dict[str, list[Any]]:
    text = batch["text"][0]
    cut = _line_boundary(text, round(len(text) * (1 - fraction)))
    parts = [part for part in (text[:cut], text[cut:]) if part.strip()]
    return {"text": parts, "source": [batch["source"][0]] * len(parts)}


def _line_boundary(text: str, position: int) -> int:
    """The start of a line near ``position`` that leaves something on both sides, else ``position``."""
    before = text.rfind("\n", max(position - NEARBY, 0), position) + 1
    after = text.find("\n", position, position + NEARBY) + 1
    good = [at for at in (before, after) if at and text[:at].strip() and text[at:].strip()]
    return min(good, key=lambda at: abs(at - position), default=position)


def _hold_out_head(stream: datasets.IterableDataset, count: int, name: str) -> tuple[Any, Any, str]:
    head = list(islice(stream, count + 1))
    if len(head) <= count:
        raise UserError(
            f"{name}: the first {count} documents of a stream are held out for validation, and it has {len(head)}. "
            "Lower --max_eval_samples, give --validation_dataset, or do without --streaming."
        )
    return (
        stream.skip(count),
        in_memory(head[:count]),
        f"streaming: the first {count} documents are held out for validation",
    )


def in_memory(documents: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """A few documents as a Dataset."""
    from datasets import Dataset

    return Dataset.from_list([dict(document) for document in documents])


def limit(documents: Any, count: int | None) -> Any:
    """``count`` documents: of a stream the first, of a Dataset, which may be sorted, evenly spaced ones; None: all."""
    if count is None:
        return documents
    if hasattr(documents, "select"):
        count = min(count, len(documents))
        return documents.select([number * len(documents) // count for number in range(count)])
    return documents.take(count)
