"""Documents that were tokenised elsewhere: token ids as they are, with nothing added.

Use it with ``--task recipes/token_ids.py:Task --dataset recipes/token_ids.py:documents --dataset_options '{"path":
"ids.parquet"}'`` and the ``--model`` whose tokenizer made the ids. A document longer than ``--max_length`` is cut into
windows; with ``--packing`` short ones share a row and do not see each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets

from train.config import Config
from train.records import UsageError, UserError, one_line
from train.tasks import Tokenizer, causal_lm, load_task, num_ids

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Modules of tasks that take a document as plain text.
OF_TEXT = {"train.tasks", *(f"train.tasks.{name}" for name in ("causal_lm", "masked_lm", "sequence_classification"))}


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Each row's ids as JSON, in the column ``text``, by split.

    ``dataset_options``: ``path``, a .jsonl, .json or .parquet file, a folder that ``save_to_disk`` wrote, or a name on
    the Hub; ``column`` of the ids, by default ``input_ids``. Raises UsageError for other options, or a task that would
    read the JSON as text; UserError for data that cannot be read or has no such column.
    """
    task = load_task(config.data.task)
    if {task.cut.__module__, task.token_ids.__module__} <= OF_TEXT:
        what = f"task: {config.data.task} would train on the JSON that recipes/token_ids.py:documents gives"
        raise UsageError(f"{what}: give --task recipes/token_ids.py:Task, or one of your own that reads it.")
    given = {"column": "input_ids", **(config.data.dataset_options or {})}
    if given.keys() != {"path", "column"} or not all(isinstance(value, str) for value in given.values()):
        raise UsageError("dataset_options: recipes/token_ids.py takes path, which is needed, and column.")
    path = Path(given["path"]).expanduser()
    try:
        if path.suffix.lower() in KINDS:
            loaded: Any = datasets.load_dataset(KINDS[path.suffix.lower()], data_files=str(path))
        else:
            loaded = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.load_dataset(given["path"])
    except Exception as error:  # of many libraries
        raise UserError(f"recipes/token_ids.py: {given['path']}: {one_line(error, 300)}") from None
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if absent := [name for name, split in splits.items() if given["column"] not in split.column_names]:
        known = ", ".join(splits[absent[0]].column_names)
        raise UserError(f"recipes/token_ids.py: no column {given['column']!r}; the columns are {known}. Name it.")
    return {name: as_json(splits[name], given["column"]) for name in ("train", "validation", "test") if name in splits}


def as_json(split: datasets.Dataset, column: str) -> datasets.Dataset:
    """A dataset of texts: the lists of ``column`` as JSON."""

    def written(rows: dict[str, Sequence[Any]]) -> dict[str, list[str]]:
        return {"text": [json.dumps(ids or []) for ids in rows[column]]}  # an empty document gives no example

    plain = split.with_format(None)  # else it may give tensors
    return plain.map(written, batched=True, remove_columns=split.column_names, desc="Reading ids")


class Task(causal_lm.Task):
    """Next-token prediction over ids; every one but a document's first is predicted once."""

    headline_metric = "perplexity"  # bits per byte would count the bytes of JSON
    example_columns = ("tokens", "length")

    def token_ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
        """The ids of each document; UserError for one that is beyond the tokenizer's vocabulary, or no number."""
        size = num_ids(tokenizer)
        for text in texts:
            ids = None
            with suppress(ValueError):
                ids = json.loads(text)
            if not isinstance(ids, list):
                what = f"token_ids.py: a row holds {text[:40]!r}, not a list of ids"
                raise UserError(f"{what}. Name their column, and give --dataset recipes/token_ids.py:documents.")
            if wrong := [i for i in ids if not isinstance(i, int) or not 0 <= i < size]:
                what = f"token id {wrong[0]!r} in a document that begins {ids[:8]}"
                raise UserError(f"{what}: the tokenizer has {size:,} entries. Give the tokenizer that made the ids.")
            yield ids

    def framed(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """The ids alone: whoever tokenised has added what marks a beginning and an end."""
        return ids

    def stand_alone(self, tokenizer: Tokenizer) -> Tokenizer:
        """For ``final/``: the tokenizer as it was given."""
        return tokenizer
