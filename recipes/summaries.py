"""Summaries by an encoder-decoder (LED, LongT5, Pegasus-X): documents with their summaries, and the task to write them.

Use it with ``task: recipes/summaries.py:Task``, ``dataset: recipes/summaries.py:documents`` and ``dataset_options``
(:class:`Options`), such as ``{path: ccdv/arxiv-summarization, document: article, summary: abstract}``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from train import tasks
from train.config import Config
from train.records import IGNORE, MicroBatch, UsageError, UserError

KINDS = {".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Options:
    """``dataset_options``; the last is read by the task."""

    path: str  # a .jsonl, .json, .csv or .parquet file, a folder of such files, or a name on the Hub
    document: str = "document"  # its column
    summary: str = "summary"
    split: str = "train"
    validation_split: str | None = None  # None: --validation_fraction is held out
    max_summary_length: int = 512  # in tokens


def options_of(config: Config) -> Options:
    """The options of a run; raises UsageError where they are unknown."""
    try:
        return Options(**(config.data.dataset_options or {}))
    except TypeError:
        known = ", ".join(field.name for field in dataclasses.fields(Options))
        raise UsageError(f"dataset_options: recipes/summaries.py takes {known}; path is needed.") from None


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Documents and their summaries as JSON, in the column ``text``; raises UserError for data without them."""
    options = options_of(config)
    wanted = {"train": options.split, "validation": options.validation_split}
    return {name: _load(options, split) for name, split in wanted.items() if split}


def _load(options: Options, split: str) -> datasets.Dataset:
    path, columns = Path(options.path).expanduser(), {"document": options.document, "summary": options.summary}
    try:
        if path.is_file():
            kind = KINDS.get(path.suffix, "json")
            found: Any = datasets.load_dataset(kind, data_files={split: str(path)}, split=split)
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else options.path, split=split)
    except Exception as error:  # of many libraries
        give = "Give a .jsonl, .csv or .parquet file, a folder of them, or a name on the Hub."
        raise UserError(f"dataset_options: path {options.path!r} cannot be read: {error} {give}") from None
    if missing := [column for column in columns.values() if column not in found.column_names]:
        names = ", ".join(found.column_names)
        raise UserError(f"{options.path}: no column {missing[0]!r}; the columns are {names}.")

    def as_text(row: Any) -> dict[str, str]:
        return {"text": json.dumps({name: row[column] or "" for name, column in columns.items()}, ensure_ascii=False)}

    return found.map(as_text, remove_columns=found.column_names, desc="Reading summaries")


class Task(tasks.Task):
    """``length`` counts what encoder and decoder read, so that ``max_length`` bounds both together."""

    auto_class = "AutoModelForSeq2SeqLM"
    title = "summarization"
    headline_metric = "perplexity"
    encode_settings = ("max_length", "dataset_options")
    example_columns = ("tokens", "summary", "length")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        own, name = config.architecture, "decoder_start_token_id"
        self._start = getattr(tasks.stored_config(own), name) if own.model else (own.model_config or {}).get(name)
        if self._start is None:
            raise UsageError(f"model_config: summaries need its {name}: that of the token with which summaries begin.")

    def token_ids(self, texts: Sequence[str], tokenizer: tasks.Tokenizer) -> Iterator[list[int]]:
        """None: :meth:`cut` makes them, of both parts."""
        return ([] for _ in texts)

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
        """The beginning of the document, and the summary."""
        parts, most = json.loads(text), options_of(self.config).max_summary_length
        document, summary = (tokenizer.encode(parts[k], add_special_tokens=False) for k in ("document", "summary"))
        written = np.array(self.framed(summary[:most], tokenizer), dtype=np.int32)
        tokens = self.framed(document[: max(0, self.room(tokenizer) - len(written))], tokenizer)
        if summary and document:
            read = np.array(tokens, dtype=np.int32)
            yield {"tokens": read, "summary": written, "length": len(read) + len(written)}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens of the document (S,), and of the summary (T,)."""
        return torch.tensor(example["tokens"]).long(), torch.tensor(example["summary"]).long()

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Adds what the decoder has written so far, ``decoder_input_ids`` (B, T): the labels, one later."""
        batch = super().collate(examples, seed, pad_id)
        written = batch.labels.roll(1, dims=1)
        written[:, 0] = self._start
        batch.inputs["decoder_input_ids"] = written.masked_fill(written == IGNORE, pad_id)
        return batch
