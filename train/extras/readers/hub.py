"""Datasets by their name on the Hub, through ``datasets.load_dataset``; code that comes with a dataset never runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from train.extras.readers import rows
from train.extras.readers.splits import HELD_OUT_OF_STREAM, Splits, choose, gather, in_memory
from train.records import UserError

if TYPE_CHECKING:
    import datasets

    from train.config import Data

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SECRET = re.compile(r"hf_\w+|(?<=\?)\S+|(?i:(?<=bearer )\S+)")
_LONGEST_REASON = 400

Result = TypeVar("Result")


def is_name(name: str) -> bool:
    """Whether ``name`` can be that of a dataset on the Hub."""
    return _NAME.fullmatch(name) is not None


def load(data: Data, labelled: bool) -> Splits:
    """The splits of the dataset ``data.dataset``; under ``data.streaming`` nothing is downloaded ahead.

    Raises:
        UserError: it cannot be reached or has no such configuration, split or column; or a bad record.
    """
    from datasets import get_dataset_split_names

    names = _ask(data, lambda: get_dataset_split_names(data.dataset, data.dataset_config))
    chosen = choose(names, data, data.dataset)
    if data.streaming:
        # Its validation split comes over the network too, so it is cut short; a test split is not worth the wait.
        chosen.pop("test", None)

    def load_split(role: str, split: str) -> tuple[Any, tuple[str, ...]]:
        if not data.streaming:
            return _documents(split, data, labelled)
        stream = _stream(split, data, labelled)
        if role == "train":
            return stream, ()
        head = in_memory(list(islice(stream, data.max_eval_samples or HELD_OUT_OF_STREAM)))
        return head, (f"streaming: validating on the first {len(head)} documents of {_what(data, split)}",)

    return gather(chosen, load_split)


def _ask(data: Data, question: Callable[[], Result]) -> Result:
    """What ``question`` answers; any failure of it as one message.

    Raises:
        UserError: whatever stands between us and the dataset.
    """
    try:
        return question()
    except UserError:
        raise
    except Exception as error:
        # The causes come from half a dozen libraries (HTTP, file system, Parquet, YAML) with no common class.
        raise UserError(_explain(data, error)) from None


def _explain(data: Data, error: Exception) -> str:
    from datasets import config

    reason = _SECRET.sub("***", " ".join(f"{error}".split())) or type(error).__name__
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON] + " ..."
    advice = "A local file or folder is given by its path; a configuration by --dataset_config."
    if config.HF_HUB_OFFLINE:
        advice = "HF_HUB_OFFLINE is set: unset it to download, or give a local file or folder."
    elif isinstance(error, ConnectionError | TimeoutError):
        advice = "Without a network, set HF_HUB_OFFLINE=1 for what is cached, or give a local file or folder."
    elif "gated" in reason.lower() or "authent" in reason.lower():
        advice = "A private or gated dataset needs `hf auth login` by someone who was granted access."
    return f"the dataset {data.dataset!r} on the Hub: {reason.rstrip('.')}. {advice}"


def _what(data: Data, split: str) -> str:
    return f"{data.dataset}[{split}]"


def _load_dataset(split: str, data: Data) -> Any:
    from datasets import load_dataset

    return _ask(data, lambda: load_dataset(data.dataset, data.dataset_config, split=split, streaming=data.streaming))


def _arguments(loaded: Any, split: str, data: Data, labelled: bool) -> dict[str, Any]:
    label_column = data.label_column if labelled else None
    return {
        "text_column": data.text_column,
        "label_column": label_column,
        "names": rows.class_names(loaded.features, label_column),
        "what": _what(data, split),
        "version": rows.FORMAT,
    }


def _documents(split: str, data: Data, labelled: bool) -> tuple[datasets.Dataset, tuple[str, ...]]:
    loaded = _load_dataset(split, data)
    what, arguments = _what(data, split), _arguments(loaded, split, data, labelled)
    wanted = [column for column in (arguments["text_column"], arguments["label_column"]) if column is not None]
    if missing := [column for column in wanted if column not in loaded.column_names]:
        raise UserError(
            f"{what}: no column {missing[0]!r}; the columns are {', '.join(loaded.column_names)}. "
            "Name the right ones with --text_column and --label_column."
        )
    if len(loaded) == 0:
        raise UserError(f"{what}: no document to learn from.")
    judged = loaded.select_columns(wanted).map(
        judge,
        with_indices=True,
        remove_columns=wanted,
        features=rows.features(),
        fn_kwargs=arguments,
        writer_batch_size=rows.ROWS_IN_MEMORY,
        desc=f"Checking {what}",
    )
    return rows.settle(judged, data, labelled, what)


def _stream(split: str, data: Data, labelled: bool) -> datasets.IterableDataset:
    loaded = _load_dataset(split, data)
    arguments = _arguments(loaded, split, data, labelled)
    columns = list(loaded.features) if loaded.features else None
    judged = loaded.map(judge, with_indices=True, remove_columns=columns, features=rows.features(), fn_kwargs=arguments)
    return _ask(data, lambda: rows.settle_stream(judged, data, labelled, _what(data, split)))


def judge(
    record: Mapping[str, Any],
    index: int,
    text_column: str,
    label_column: str | None,
    names: Sequence[str] | None,
    what: str,
    version: int,
) -> dict[str, Any]:
    """One record of a dataset as a row, its class by name; ``version`` only tells cache entries apart."""
    named = rows.name_class(dict(record), label_column, names)
    return rows.row(named, what, index, text_column, label_column)
