"""Summaries by an encoder-decoder (LED, LongT5, Pegasus-X): documents with their summaries, and the task to write them.

Use it with ``task: recipes/summaries.py:Task``, ``dataset: recipes/summaries.py:documents`` and ``dataset_options``
(:class:`Options`), such as ``{path: ccdv/arxiv-summarization, document: article, summary: abstract}``.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.config import HF_DATASETS_CACHE
from torch import Tensor

from train import tasks
from train.checkpoint import digest
from train.config import Config
from train.records import IGNORE, MicroBatch, UsageError, UserError, one_line

# Modules of tasks that take a document as plain text.
OF_TEXT = tuple(f"train.tasks.{name}" for name in ("causal_lm", "masked_lm", "sequence_classification"))
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Options:
    """``dataset_options``; ``max_summary_length`` is read by the task."""

    path: str  # a .jsonl, .json, .csv or .parquet file, a folder of them or of save_to_disk, or a name on the Hub
    config: str | None = None  # of a folder or name with several
    document: str = "document"  # its column
    summary: str = "summary"
    split: str = "train"  # of a file, too: train[:90%]
    validation_split: str | None = None  # None: the one of that name; without one, --validation_fraction is held out
    max_summary_length: int = 512  # in tokens; at most half of --max_length


def options_of(config: Config) -> Options:
    """The options of a run; raises UsageError where they are unknown."""
    given, known = config.data.dataset_options or {}, [field.name for field in dataclasses.fields(Options)]
    kinds = {**dict.fromkeys(known, str), "max_summary_length": int}
    if "path" not in given or not all(isinstance(value, kinds.get(name, ())) for name, value in given.items()):
        raise UsageError(f"dataset_options: recipes/summaries.py takes {', '.join(known)}; path is needed.")
    if (options := Options(**given)).max_summary_length < 3:
        raise UsageError(f"dataset_options: max_summary_length: {options.max_summary_length} is less than 3 tokens.")
    return options


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Documents and their summaries as JSON, in the column ``text``; raises UserError for data without them.

    Raises UsageError for unknown options, or a task that would read the JSON as plain text.
    """
    if tasks.load_task(config.data.task).cut.__module__ in OF_TEXT:
        what = f"task: {config.data.task} would train on the JSON that recipes/summaries.py:documents gives"
        raise UsageError(f"{what}: give --task recipes/summaries.py:Task, or one of your own that reads it.")
    options = options_of(config)
    columns = {"document": options.document, "summary": options.summary}
    try:
        source = source_of(Path(options.path).expanduser(), options.config)
        tables: Any = datasets.load_dataset(**source)
        wanted = {"train": options.split}
        is_apart = options.split != "all" and "validation" not in options.split  # what is trained on tests nothing
        if options.validation_split or ("validation" in tables and is_apart):
            wanted["validation"] = options.validation_split or "validation"
        found: Any = {name: datasets.load_dataset(**source, split=which) for name, which in wanted.items()}
        return {name: as_json(table, columns, options.path) for name, table in found.items()}
    except UserError:
        raise
    except Exception as error:  # of many libraries
        why = f"{type(error).__name__}: {one_line(error.__cause__ or error, 300)}"
        several = " Its config is one of dataset_options." if "Config name is missing" in why else ""
        give = "Give a UTF-8 .jsonl, .json, .csv or .parquet file, a folder of them, or a name on the Hub"
        raise UserError(f"dataset_options: {options.path!r} cannot be read ({why}). {give}.{several}") from None


def source_of(path: Path, config: str | None) -> dict[str, Any]:
    """What 🤗 Datasets loads: the splits of a folder that save_to_disk wrote, other files or folders, or a Hub name."""
    is_saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if config and (is_saved or path.is_file()):
        raise ValueError(f"it has no configuration {config!r}")
    if path.is_file():  # all of it is its split train
        own = {"data_files": {"train": str(path)}, "cache_dir": cache_for(path), **as_texts([path])}
        return {"path": KINDS[path.suffix.lower()], **own}
    if is_saved:
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {"train": saved}
        files = {name: [file["filename"] for file in split.cache_files] for name, split in splits.items()}
        return {"path": "arrow", "data_files": files, "cache_dir": cache_for(path)}
    if path.is_dir():
        own = as_texts([file for file in path.rglob("*") if file.suffix.lower() in KINDS])
        return {"path": str(path), "name": config, "cache_dir": cache_for(path), **own}
    if path.suffix.lower() in KINDS or path.is_absolute():
        raise FileNotFoundError("no such file or folder")  # and the Hub is not asked for it
    return {"path": path.as_posix(), "name": config}


def as_json(found: datasets.Dataset, columns: dict[str, str], path: str) -> datasets.Dataset:
    """Both ``columns`` of each row as JSON, in the column ``text``."""
    if missing := [column for column in columns.values() if column not in found.column_names]:
        names = ", ".join(found.column_names)
        raise UserError(f"{path}: no column {missing[0]!r}; the columns are {names}.")

    def as_text(row: Any, number: int) -> dict[str, str]:
        found = {name: row[column] or "" for name, column in columns.items()}
        if other := next((name for name in columns if not isinstance(found[name], str)), None):
            kind = type(found[other]).__name__
            raise UserError(f"{path}, row {number + 1}: {columns[other]!r} holds {kind}; it has to be text.")
        return {"text": json.dumps(found, ensure_ascii=False) if all(map(str.strip, found.values())) else ""}

    return found.map(as_text, with_indices=True, remove_columns=found.column_names, desc="Reading summaries")


def as_texts(files: Sequence[Path]) -> dict[str, Any]:
    """What 🤗 Datasets needs to leave 007 and None in tables the texts that they are; of other files nothing."""
    if {file.suffix.lower() for file in files} != {".csv"}:
        return {}
    with files[0].open(encoding="utf-8-sig", newline="") as file:  # the columns of all of them are equal
        return {"converters": dict.fromkeys(next(csv.reader(file), []), str), "keep_default_na": False}


def cache_for(path: Path) -> str:
    """A cache folder for this content of a file or folder: 🤗 Datasets itself looks at the time of a file alone."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    contents = hashlib.sha256("".join(f"{file} {digest(file)}\n" for file in files).encode(errors="backslashreplace"))
    return str(Path(HF_DATASETS_CACHE, f"content-{contents.hexdigest()[:32]}"))


class Task(tasks.Task):
    """``length`` counts what encoder and decoder read, so that ``max_length`` bounds both together."""

    auto_class = "AutoModelForSeq2SeqLM"
    title = "summarization"
    headline_metric = "perplexity"
    encode_settings = ("max_length", "dataset_options")
    example_columns = ("tokens", "summary", "length", "document_length")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        own, name = config.architecture, "decoder_start_token_id"
        if own.model is None and name not in (own.model_config or {}):
            raise UsageError(f"model_config: summaries need its {name}: that of the token with which summaries begin.")
        self._start = (own.model_config or {}).get(name)  # of a function's model: None, so the padding token
        if own.model and not own.is_function:
            self._start = getattr(tasks.stored_config(own), name, None)

    def token_ids(self, texts: Sequence[str], tokenizer: tasks.Tokenizer) -> Iterator[list[int]]:
        """No ids yet: :meth:`cut` makes them, of both parts."""
        return ([] for _ in texts)

    def parts_of(self, text: str) -> dict[str, str]:
        """What :func:`documents` has written as ``text``; UserError for what something else has."""
        with suppress(ValueError):
            if isinstance(found := json.loads(text), dict) and {"document", "summary"} <= found.keys():
                return found
        what = f"a text that is not a document and its summary as JSON, {text[:60]!r}"
        raise UserError(f"{what}: give --dataset recipes/summaries.py:documents, and your file as its path.")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: tasks.Tokenizer) -> Iterator[dict[str, Any]]:
        """The beginning of the document, and the summary."""
        parts, most = self.parts_of(text), min(options_of(self.config).max_summary_length, self.data.max_length // 2)
        document, summary = (tokenizer.encode(parts[k], add_special_tokens=False) for k in ("document", "summary"))
        marks = len(self.framed([], tokenizer))
        written = self.framed(summary[: most - marks], tokenizer)
        read = self.framed(document[: self.room(tokenizer) - len(written)], tokenizer)
        arrays = {"tokens": np.array(read, dtype=np.int32), "summary": np.array(written, dtype=np.int32)}
        whole = len(self.framed(document, tokenizer)) + len(self.framed(summary, tokenizer))
        yield {**arrays, "length": len(read) + len(written), "document_length": whole}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens of the document (S,), and of the summary (T,)."""
        return torch.tensor(example["tokens"]).long(), torch.tensor(example["summary"]).long()

    def longest_example(self) -> dict[str, Any]:
        """What a plan, without data, takes for an example: the longest summary, and a document that fills the rest."""
        written = min(options_of(self.config).max_summary_length, self.data.max_length // 2)
        return {"tokens": [0] * (self.data.max_length - written), "summary": [0] * written}

    def collate(self, examples: Sequence[Mapping[str, Any]], seed: Sequence[int], pad_id: int) -> MicroBatch:
        """Adds what the decoder has written so far, ``decoder_input_ids`` (B, T): the labels, one later."""
        batch = super().collate(examples, seed, pad_id)
        written = batch.labels.roll(1, dims=1)
        written[:, 0] = pad_id if self._start is None else self._start  # transformers gives T5 the padding token
        batch.inputs["decoder_input_ids"] = written.masked_fill(written == IGNORE, pad_id)
        return batch
