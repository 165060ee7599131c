"""Where text comes from: local files, the Hub, the standard library's own text, ListOps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from train.extras.readers import files, hub, listops, stdlib
from train.extras.readers.splits import HELD_OUT_OF_STREAM, Splits, hold_out, hold_out_head, limit
from train.records import Corpus, UsageError, UserError

if TYPE_CHECKING:
    from train.config import Data

GENERATED = ("stdlib", "stdlib_packages", "listops")


def load_corpus(data: Data, labelled: bool) -> Corpus:
    """The documents that ``data`` asks for, by split, with columns ``text``, ``source`` and, if labelled, ``label``.

    The training split is a stream under ``data.streaming``; the others never are. Where the data brings no validation
    split, some documents are held out, the same ones in every run and on every machine.

    Raises:
        UsageError: flags that do not go together.
        UserError: data that is not there or cannot be used; says where, and which flag would help.
    """
    _check(data, labelled)
    splits = _load(data, labelled)
    if data.validation_dataset is not None:
        validation, notes = files.load_validation(data, labelled)
        splits = replace(splits, validation=validation, notes=splits.notes + notes)
    if splits.validation is None:
        splits = _with_validation(splits, data, labelled)
    assert splits.validation is not None
    return Corpus(
        name=data.dataset,
        train=limit(splits.train, data.max_train_samples),
        validation=limit(splits.validation, data.max_eval_samples),
        test=splits.test,
        notes=splits.notes,
    )


def _check(data: Data, labelled: bool) -> None:
    """Raises UsageError for flags that the kind of dataset does not know."""
    if data.streaming and data.dataset in GENERATED:
        raise UsageError(f"streaming: {data.dataset} is made on this machine; there is nothing to stream.")
    if data.dataset_options is not None and data.dataset != "listops":
        raise UsageError(f"dataset_options: {data.dataset} has none; they are for listops.")
    if labelled and data.dataset == "stdlib":
        raise UserError("stdlib has no labels: take --dataset stdlib_packages, or records with a label.")


def _load(data: Data, labelled: bool) -> Splits:
    if data.dataset == "stdlib":
        return stdlib.load(data)
    if data.dataset == "stdlib_packages":
        return stdlib.load_packages(data, labelled)
    if data.dataset == "listops":
        return listops.load(data, labelled)
    if files.local_path(data.dataset).exists():
        return files.load(data, labelled)
    if files.looks_like_path(data.dataset):
        raise UserError(f"--dataset {data.dataset}: no such file or folder.")
    if not hub.is_name(data.dataset):
        raise UserError(
            f"--dataset {data.dataset}: no such file or folder, and not a name on the Hub (user/name). "
            f"Made on the spot are {', '.join(GENERATED)}."
        )
    return hub.load(data, labelled)


def _with_validation(splits: Splits, data: Data, labelled: bool) -> Splits:
    """The splits with some training documents held out."""
    if data.streaming:
        count = data.max_eval_samples or HELD_OUT_OF_STREAM
        train, validation = hold_out_head(splits.train, count, data.dataset)  # pyright: ignore[reportArgumentType]
        note = f"streaming: the first {count} documents are held out for validation"
    else:
        train, validation, note = hold_out(
            splits.train,  # pyright: ignore[reportArgumentType]
            data.validation_fraction,
            labelled,
            data.dataset,
        )
    return replace(splits, train=train, validation=validation, notes=(*splits.notes, note))
