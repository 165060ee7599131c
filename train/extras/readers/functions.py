"""Documents that a function of a fork returns, looked at as closely as those of files."""

from __future__ import annotations

import inspect
from dataclasses import replace

import datasets

from train.config import Config
from train.data import corpus_of, load_function
from train.extras.readers import Source
from train.extras.readers.tables import good_rows
from train.records import Corpus, UserError


def load_returned(config: Config, data: Source) -> Corpus:
    """What the function that ``--dataset`` names returns, without documents of only space; classes by their names.

    Raises UserError for a function that does not take the configuration, and for a row without text or label.
    """
    name = data.dataset
    function = load_function(name, "dataset")
    try:
        inspect.signature(function).bind(config)
    except TypeError:
        raise UserError(f"dataset {name!r}: it must take one argument, the configuration of the run.") from None
    found = function(config)
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    if unknown := splits.keys() - {"train", "validation", "test"}:
        raise UserError(f"dataset {name!r} returned a split {min(map(str, unknown))!r}: use train, validation, test.")
    needed = {"text", "label"} if data.labelled else {"text"}
    for split, documents in splits.items():
        if isinstance(documents, datasets.Dataset) and needed <= {*documents.column_names}:
            splits[split] = good_rows(documents, data, f"dataset {name!r}: the {split} split")
    corpus = corpus_of(splits if isinstance(found, dict) else splits["train"], config, data.labelled)
    return replace(corpus, notes=tuple(data.notes))
