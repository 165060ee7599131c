"""Training and validation documents from one pile: which are held out never depends on the run or the machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from train.extras.readers.rows import some
from train.records import UserError

if TYPE_CHECKING:
    import datasets

    from train.config import Data

HELD_OUT_OF_STREAM = 100
"""Documents at the head of a stream that become the validation split, where max_eval_samples says nothing else."""

NEARBY = 2000
"""A text is cut at the end of a line if there is one within so many characters."""


@dataclass(frozen=True)
class Splits:
    """What a source found; a split that it does not have is None."""

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


def gather(chosen: Mapping[str, str], load_split: Callable[[str, str], tuple[Any, tuple[str, ...]]]) -> Splits:
    """The splits that ``load_split(role, split)`` gives, and all notes.

    Raises:
        UserError: what ``load_split`` raises for training and validation.
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


def held_out(count: int, fraction: float, labels: Sequence[Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Positions to train on and to validate on, each in ascending order and neither empty; ``count`` is at least 2.

    With ``labels``, each keeps a position to train on; where every one stands once, none is left to validate on.
    """
    validation_count = min(max(round(count * fraction), 1), count - 1)
    order = np.random.default_rng(0).permutation(count)
    if labels is None:
        validation = order[:validation_count]
    else:
        validation = np.fromiter(islice(_spared(order, labels), validation_count), dtype=int)
    return np.delete(np.arange(count), validation), np.sort(validation)


def _spared(order: np.ndarray, labels: Sequence[Any]) -> Iterator[int]:
    """Positions in this order, but for the last of each label."""
    left = Counter(labels)
    for position in order:
        left[labels[position]] -= 1
        if left[labels[position]]:
            yield position


def hold_out(
    documents: datasets.Dataset, fraction: float, labelled: bool, name: str
) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    """Training documents, validation documents, and a note on how they were parted.

    A single document without a label is cut in two near its end; every label keeps a document to train on.

    Raises:
        UserError: there is too little for two splits.
    """
    if len(documents) == 1 and not labelled:
        return _divide(documents, fraction, name)
    if len(documents) < 2:
        raise UserError(f"{name}: one labelled record cannot be split in two. Add records, or --validation_dataset.")
    labels = list(documents["label"]) if labelled else None
    train, validation = held_out(len(documents), fraction, labels)
    if not len(validation):
        raise UserError(
            f"{name}: every label is that of a single record, and training needs that one. Add records, or "
            "--validation_dataset; or choose another --label_column."
        )
    note = f"held out {len(validation):,} of {len(documents):,} documents for validation"
    if labels is not None and (unseen := set(labels) - {labels[i] for i in validation}):
        note += f", none of them with the label {some([repr(label) for label in sorted(unseen)])}"
    return documents.select(train), documents.select(validation), note


def _divide(document: datasets.Dataset, fraction: float, name: str) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    # Through map, the parts land in the cache beside the document instead of in memory.
    parts = document.map(_halves, batched=True, fn_kwargs={"fraction": fraction}, desc="Splitting one document")
    if len(parts) < 2:
        raise UserError(f"{name}: one document, too short to be split in two. Add text, or --validation_dataset.")
    note = f"{name} is one document: its last {fraction:.0%} is the validation split"
    return parts.select([0]), parts.select([1]), note


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


def hold_out_head(
    stream: datasets.IterableDataset, count: int, name: str
) -> tuple[datasets.IterableDataset, datasets.Dataset]:
    """The stream after its first ``count`` documents, and those documents.

    Raises:
        UserError: the stream ends before anything is left to train on.
    """
    head = list(islice(stream, count + 1))
    if len(head) <= count:
        raise UserError(
            f"{name}: the first {count} documents of a stream are held out for validation, and it has {len(head)}. "
            "Lower --max_eval_samples, give --validation_dataset, or do without --streaming."
        )
    return stream.skip(count), in_memory(head[:count])


def in_memory(documents: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """A few documents as a Dataset."""
    from datasets import Dataset

    return Dataset.from_list([dict(document) for document in documents])


def limit(documents: Any, count: int | None) -> Any:
    """``count`` documents: of a stream the first, of a Dataset, which may be sorted, evenly spaced ones; None: all."""
    if documents is None or count is None:
        return documents
    if hasattr(documents, "select"):
        count = min(count, len(documents))
        return documents.select([number * len(documents) // count for number in range(count)])
    return documents.take(count)
