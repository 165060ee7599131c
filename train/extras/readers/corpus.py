"""Where text comes from: local files, datasets of 🤗 Datasets, the standard library's own text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from train.extras.readers import files, tables
from train.extras.readers.rows import some
from train.records import Corpus, UsageError, UserError

if TYPE_CHECKING:
    import datasets

    from train.extras.readers import Source

RECIPES = ("listops", "stdlib_packages")
"""Datasets that functions in recipes/ generate."""
NEARBY = 2000
"""A text is cut at the end of a line if there is one within so many characters."""


def load_corpus(data: Source) -> Corpus:
    """The documents that ``data`` asks for, by split, with columns ``text``, ``source`` and, if labelled, ``label``.

    The training split is a stream under ``data.streaming``; the others never are. Where the data brings no validation
    split, some documents are held out, the same ones in every run and on every machine.

    Raises:
        UsageError: flags that contradict each other.
        UserError: data that is not there or cannot be used; says where, and which flag would help.
    """
    if data.dataset in RECIPES:
        raise UsageError(f"dataset: {data.dataset} is generated. Write --dataset recipes/{data.dataset}.py:documents.")
    if data.dataset_options is not None:
        raise UsageError("dataset_options: only a function takes them, as --dataset recipes/listops.py:documents.")
    splits = _load(data)
    if data.validation_dataset is not None:
        splits["validation"] = files.load_validation(Path(data.validation_dataset), data)
    if "validation" not in splits:
        splits["train"], splits["validation"] = _hold_out(splits["train"], data)
    train = _limit(splits["train"], data.max_train_samples)
    validation = _limit(splits["validation"], data.max_eval_samples)
    return Corpus(data.dataset, train, validation, splits.get("test"), tuple(data.notes))


def _load(data: Source) -> dict[str, Any]:
    name = data.dataset
    if name == "stdlib":
        if data.streaming:
            raise UsageError("streaming: stdlib is on this machine already; there is nothing to stream.")
        if data.labelled:
            raise UserError("stdlib has no labels. Write --dataset recipes/stdlib_packages.py:documents.")
        return {"train": files.load_stdlib(data)}
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where there is no home folder
    if tables.is_saved(path):
        return tables.load_saved(path, data)
    if path.exists():
        return files.load(path, data)
    if not files.may_be_on_hub(name):
        raise UserError(f"--dataset {name}: no such file or folder, and not a name on the Hub (user/name).")
    return tables.load_named(data)


def _hold_out(documents: Any, data: Source) -> tuple[Any, Any]:
    """Documents to train on, and documents held out for validation.

    Of a stream the first ones are held out. A single document without a label is cut in two near its end; every label
    keeps a document to train on. Raises UserError where there is too little for two splits.
    """
    if data.streaming:
        return _hold_out_head(documents, data)
    if len(documents) == 1 and not data.labelled:
        return _divide(documents, data)
    order = np.random.default_rng(0).permutation(len(documents))
    count = min(max(round(len(documents) * data.validation_fraction), 1), len(documents) - 1)
    labels = list(documents["label"]) if data.labelled else []
    if labels:
        last = {labels[position]: position for position in order}
        order = np.array([position for position in order if last[labels[position]] != position], dtype=int)
    validation = np.sort(order[:count])
    if not len(validation):
        raise UserError(
            f"{data.dataset}: every label is that of a single record, which training needs. Add records, or "
            "--validation_dataset; or choose another --label_column."
        )
    note = f"held out {len(validation):,} of {len(documents):,} documents for validation"
    if labels and (unseen := set(labels) - {labels[i] for i in validation}):
        note += f", none of them with the label {some([repr(label) for label in sorted(unseen)])}"
    data.notes.append(note)
    return documents.select(np.delete(np.arange(len(documents)), validation)), documents.select(validation)


def _divide(document: datasets.Dataset, data: Source) -> tuple[Any, Any]:
    name, fraction = data.dataset, data.validation_fraction

    def halves(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        text = batch["text"][0]
        cut = _line_boundary(text, round(len(text) * (1 - fraction)))
        parts = [part for part in (text[:cut], text[cut:]) if part.strip()]
        return {"text": parts, "source": [batch["source"][0]] * len(parts)}

    # Through map, the parts land in the cache next to the document instead of in memory.
    parts = document.map(halves, batched=True, desc="Splitting one document")
    if len(parts) < 2:
        raise UserError(f"{name}: one document, too short to be split in two. Add text, or --validation_dataset.")
    data.notes.append(f"{name} is one document: its last {fraction:.0%} is the validation split")
    return parts.select([0]), parts.select([1])


def _line_boundary(text: str, position: int) -> int:
    """The start of a line near ``position`` that leaves something on both sides, else ``position``."""
    before = text.rfind("\n", max(position - NEARBY, 0), position) + 1
    after = text.find("\n", position, position + NEARBY) + 1
    good = [at for at in (before, after) if at and text[:at].strip() and text[at:].strip()]
    return min(good, key=lambda at: abs(at - position), default=position)


def _hold_out_head(stream: datasets.IterableDataset, data: Source) -> tuple[Any, Any]:
    from datasets import Dataset

    count = data.held_out_of_stream
    head = list(islice(stream, count + 1))
    if len(head) <= count:
        raise UserError(
            f"{data.dataset}: the first {count} documents of a stream are held out for validation, and it has "
            f"{len(head)}. Lower --max_eval_samples, give --validation_dataset, or do without --streaming."
        )
    data.notes.append(f"streaming: the first {count} documents are held out for validation")
    return stream.skip(count), Dataset.from_list(head[:count])


def _limit(documents: Any, count: int | None) -> Any:
    """``count`` documents: of a stream the first, of a Dataset, which may be sorted, evenly spaced ones; None: all."""
    if count is None:
        return documents
    if hasattr(documents, "select"):
        count = min(count, len(documents))
        return documents.select([number * len(documents) // count for number in range(count)])
    return documents.take(count)
