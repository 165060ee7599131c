"""Conversations: their documents, and a task whose targets are what the assistant says. No code is needed.

Use it with ``task: recipes/chat.py:Task``, ``dataset: recipes/chat.py:documents`` and ``dataset_options: {path: …}``,
as recipes/qwen3_0.6b_chat_t4.yaml does. The tokenizer needs a chat template, which writes every mark.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from train.config import Config
from train.records import IGNORE, UsageError, UserError
from train.tasks import Tokenizer, causal_lm

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Options:
    """``dataset_options``."""

    path: str  # a .jsonl, .json or .parquet file, a folder of such files, or a name on the Hub
    split: str = "train"
    validation_split: str | None = None  # None: --validation_fraction is held out


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Conversations as JSON, in the column ``text``.

    A row has ``messages``, each with ``role`` and ``content``; or ``conversations``, each with ``from`` and ``value``;
    or a ``prompt`` and its ``completion``. Raises UserError for another row, and UsageError for unknown options.
    """
    try:
        options = Options(**(config.data.dataset_options or {}))
    except TypeError:
        known = ", ".join(field.name for field in dataclasses.fields(Options))
        raise UsageError(f"dataset_options: recipes/chat.py takes {known}; path is needed.") from None
    wanted = {"train": options.split, "validation": options.validation_split}
    return {name: _load(options.path, split) for name, split in wanted.items() if split}


def _load(path: str, split: str) -> datasets.Dataset:
    file = Path(path).expanduser()
    try:
        if file.is_file():
            found: Any = datasets.load_dataset(
                KINDS.get(file.suffix, "json"), data_files={split: str(file)}, split=split
            )
        else:
            found = datasets.load_dataset(str(file) if file.is_dir() else path, split=split)
    except Exception as error:  # of many libraries
        give = "Give a .jsonl or .parquet file, a folder of them, or a name on the Hub."
        raise UserError(f"dataset_options: path {path!r} cannot be read: {error} {give}") from None

    def as_text(row: Any, number: int) -> dict[str, str]:
        return {"text": json.dumps(messages_of(row, f"{path}, row {number}"), ensure_ascii=False)}

    return found.map(as_text, with_indices=True, remove_columns=found.column_names, desc="Reading conversations")


def messages_of(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of one row; raises UserError where it has none."""
    found = row.get("messages") or row.get("conversations")
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        found = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        columns = ", ".join(row)
        raise UserError(f"{where}: no messages, conversations, or prompt and completion; the columns are {columns}.")
    named = [{{"from": "role", "value": "content"}.get(k, k): v for k, v in m.items() if v is not None} for m in found]
    if any("role" not in message for message in named):
        raise UserError(f"{where}: a message without a role (or from).")
    return [{**message, "role": ROLES.get(message["role"], message["role"])} for message in named]


class Task(causal_lm.Task):
    """A document is a list of messages as JSON; a conversation longer than ``max_length`` loses its end."""

    title = "chat"
    headline_metric = "perplexity"
    example_columns = ("tokens", "length", "is_target")

    def token_ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
        """None: the template makes them, in :meth:`cut`."""
        return ([] for _ in texts)

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The conversation as one example; as several where the template rewrites earlier answers."""
        messages, tokens, is_target = json.loads(text), list[int](), list[bool]()
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number == 0:  # templates begin with a question
                continue
            before, after = (templated(tokenizer, messages[:end], asks=end == number) for end in (number, number + 1))
            if before[: len(tokens)] != tokens:  # Qwen3's drops the thoughts of earlier answers
                yield from self._example(tokens, is_target)
                is_target = []
            # The prompt for an answer may end in what the history does not have, such as the start of a thought.
            start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))  # noqa: B905
            is_target += [False] * (start - len(is_target)) + [True] * (len(after) - start)
            tokens = after
        yield from self._example(tokens, is_target)

    def _example(self, tokens: list[int], is_target: list[bool]) -> Iterator[dict[str, Any]]:
        most = self.data.max_length + 1
        if any(is_target[1:most]):
            kept = np.array(tokens[:most], dtype=np.int32)
            yield {"tokens": kept, "length": len(kept) - 1, "is_target": is_target[:most]}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens, and the next ones where the assistant says them."""
        tokens, labels = super().inputs_and_labels(example, seed)
        return tokens, labels.masked_fill(~torch.tensor(example["is_target"][1:]), IGNORE)

    def stand_alone(self, tokenizer: Tokenizer) -> Tokenizer:
        """``tokenizer`` as it is: the template writes every mark."""
        return tokenizer


def templated(tokenizer: Any, messages: list[dict[str, Any]], asks: bool) -> list[int]:
    """Tokens of ``messages``, with the prompt for an answer where the template ``asks`` for one."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
    except Exception as error:  # a template is a program
        raise UserError(f"chat: the tokenizer's template cannot take a conversation: {error}") from None
