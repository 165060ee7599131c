"""Conversations: their documents, and a task whose targets are what the assistant says. No code is needed.

Use it with ``task: recipes/chat.py:Task``, ``dataset: recipes/chat.py:documents`` and ``dataset_options: {path: …}``,
as recipes/qwen3_0.6b_chat_t4.yaml does. The tokenizer needs a chat template, which writes every mark.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.config import HF_DATASETS_CACHE
from torch import Tensor

from train.checkpoint import digest
from train.config import Config
from train.records import IGNORE, UsageError, UserError, one_line
from train.tasks import Tokenizer, causal_lm, load_task

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
NAMES = {"from": "role", "value": "content"}  # of ShareGPT
ROLES = {"human": "user", "gpt": "assistant"}
PLAIN = {"role", "content", "weight", "train"}  # keys of a message that call nothing
# Modules of tasks that take a document as plain text.
OF_TEXT = tuple(f"train.tasks.{name}" for name in ("causal_lm", "masked_lm", "sequence_classification"))
KNOWN = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Options:
    """``dataset_options``."""

    path: str  # a .jsonl, .json or .parquet file, a folder of them or of save_to_disk, or a name on the Hub
    config: str | None = None  # of a folder or name with several
    split: str = "train"  # of a file, too: train[:90%]
    validation_split: str | None = None  # None: the one of that name; without one, --validation_fraction is held out
    prompt: str = "prompt"  # its column
    completion: str = "completion"


def documents(config: Config) -> dict[str, datasets.Dataset]:
    """Conversations as JSON, in the column ``text``; without a message it is empty.

    A row has ``messages``, each with ``role`` and ``content``; or ``conversations``, each with ``from`` and ``value``;
    or a ``prompt`` and its ``completion``, as texts or as messages; or, as Alpaca, an ``instruction``, perhaps an
    ``input`` and a ``history`` of earlier pairs, and the ``output``. ``tools`` and a text ``system`` may come along.
    Completions with the ``label`` false, as for KTO, are left out.

    Raises UserError for another row; UsageError for unknown options, or a task that would read the JSON as plain text.
    """
    if load_task(config.data.task).cut.__module__ in OF_TEXT:
        what = f"task: {config.data.task} would train on the JSON that recipes/chat.py:documents gives"
        raise UsageError(f"{what}: give --task recipes/chat.py:Task, or one of your own that reads it.")
    given, known = config.data.dataset_options or {}, [field.name for field in dataclasses.fields(Options)]
    if "path" not in given or not all(name in known and isinstance(value, str) for name, value in given.items()):
        raise UsageError(f"dataset_options: recipes/chat.py takes {', '.join(known)}; path is needed.")
    options = Options(**given)
    named = {"prompt": options.prompt, "completion": options.completion}

    def read(row: Mapping[str, Any], where: str) -> dict[str, Any]:
        return conversation_of({**row, **{name: row[own] for name, own in named.items() if own in row}}, where)

    return load(options.path, read, options.split, options.validation_split, options.config)


def load(
    path: str,
    read: Callable[[Mapping[str, Any], str], dict[str, Any]],
    split: str,
    validation_split: str | None = None,
    config: str | None = None,
) -> dict[str, datasets.Dataset]:
    """Rows of splits as JSON in the column ``text``, as ``read(row, where)`` gives them; empty without messages."""

    def texts(found: datasets.Dataset) -> datasets.Dataset:
        has_structs = "Json(" not in str(found.features)  # in which a row has every key of any row, most of them None

        def as_text(row: Any, number: int) -> dict[str, str]:
            conversation = read(given_only(row) if has_structs else row, f"{path}, row {number + 1}")
            return {"text": json.dumps(conversation, ensure_ascii=False) if conversation["messages"] else ""}

        return found.map(as_text, with_indices=True, remove_columns=found.column_names, desc="Reading conversations")

    try:
        source = source_of(Path(path).expanduser(), config)
        tables: Any = datasets.load_dataset(**source)
        wanted = {"train": split}
        is_apart = split != "all" and "validation" not in split  # what is trained on tests nothing
        if validation_split or ("validation" in tables and is_apart):
            wanted["validation"] = validation_split or "validation"
        found: Any = {name: datasets.load_dataset(**source, split=which) for name, which in wanted.items()}
        return {name: texts(table) for name, table in found.items()}
    except UserError:
        raise
    except Exception as error:  # of many libraries
        why = f"{type(error).__name__}: {one_line(error.__cause__ or error, 300)}"
        several = " Its config is one of dataset_options." if "Config name is missing" in why else ""
        give = "Give a UTF-8 .jsonl, .json or .parquet file, a folder of them, or a name on the Hub"
        raise UserError(f"dataset_options: {path!r} cannot be read ({why}). {give}.{several}") from None


def source_of(path: Path, config: str | None) -> dict[str, Any]:
    """What 🤗 Datasets loads: the splits of a folder that save_to_disk wrote, other files or folders, or a Hub name."""
    is_saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if config and (is_saved or path.is_file()):
        raise ValueError(f"it has no configuration {config!r}")
    if path.is_file():  # all of it is its split train
        own = {"data_files": {"train": str(path)}, "cache_dir": cache_for(path)}
        return {"path": KINDS[path.suffix.lower()], **own}
    if is_saved:
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {"train": saved}
        files = {name: [file["filename"] for file in split.cache_files] for name, split in splits.items()}
        return {"path": "arrow", "data_files": files, "cache_dir": cache_for(path)}
    if path.is_dir():
        return {"path": str(path), "name": config, "cache_dir": cache_for(path)}
    if path.suffix.lower() in KINDS or path.is_absolute():
        raise FileNotFoundError("no such file or folder")  # and the Hub is not asked for it
    return {"path": path.as_posix(), "name": config}


def given_only(value: Any) -> Any:
    """``value`` without what is None in it, at any depth; top-level columns stay."""

    def kept(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {name: kept(part) for name, part in inner.items() if part is not None}
        return [kept(part) for part in inner] if isinstance(inner, list) else inner

    return {name: kept(column) for name, column in value.items()}


def cache_for(path: Path) -> str:
    """A cache folder for this content of a file or folder: 🤗 Datasets itself looks at the time of a file alone."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    contents = hashlib.sha256("".join(f"{file} {digest(file)}\n" for file in files).encode(errors="backslashreplace"))
    return str(Path(HF_DATASETS_CACHE, f"content-{contents.hexdigest()[:32]}"))


def conversation_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``messages``, ``tools`` and ``chat_template_kwargs`` of one row; UserError for no messages, or unusual ones.

    Without a question or its answer there are no messages. Columns that only other rows of a file have are None.
    """
    names = [name for name in ("messages", "conversations") if name in row]
    found = next((row[name] for name in names if row[name] is not None), [] if names else None)
    if {"prompt", "completion"} <= row.keys() and not found:
        found = [] if row.get("label") is False else _pair(row["prompt"], row["completion"])  # False: KTO's bad answers
    if {"instruction", "output"} <= row.keys() and not found:
        try:
            question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
            earlier = [message for asked, said in row.get("history") or () for message in _pair(asked, said)]
        except (TypeError, ValueError):
            raise UserError(f"{where}: instruction and input have to be texts, and history pairs of them.") from None
        found = [*earlier, *found] if (found := _pair(question, row["output"])) else []
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        what = "no messages, conversations, prompt and completion, or instruction and output"
        name = "Name a question's and its answer's columns as prompt and completion of --dataset_options"
        raise UserError(f"{where}: {what}; the columns are {', '.join(row)}. {name}.")
    messages = [message_of(message, where) for message in found]
    system = row.get("system") or row.get("system_prompt") or ""  # the latter is OpenOrca's
    if not isinstance(system, str):
        raise UserError(f"{where}: its system is not text but {kind_of(system)}.")
    if system.strip() and found:
        if messages[0]["role"] == "system" and messages[0]["content"].strip() != system.strip():
            raise UserError(f"{where}: a system text and a system message that differ. Keep one of them.")
        is_there = messages[0]["role"] == "system"
        messages = messages if is_there else [{"role": "system", "content": system}, *messages]
    others = {name: row.get(name) for name in ("tools", "chat_template_kwargs")}
    for name, text in others.items():
        if isinstance(text, str):
            try:
                others[name] = json.loads(text or "null")
            except ValueError as error:
                raise UserError(f"{where}: its {name} are not JSON ({error}).") from None
    if not isinstance(others["chat_template_kwargs"] or {}, Mapping):
        raise UserError(f"{where}: its chat_template_kwargs are not names with values.")
    return {"messages": messages, **others}


def _pair(question: Any, answer: Any) -> list[Any]:
    """A question and its answer, each a text or messages, as messages; of the question none is trained on."""
    if not question or not answer:
        return []
    asked = question if isinstance(question, list) else [{"role": "user", "content": question}]
    asked = [{**message, "weight": 0} if isinstance(message, Mapping) else message for message in asked]
    return [*asked, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]


def message_of(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``role``, ``content`` as text, and other keys that have a value."""
    # 🤗 Datasets reads texts that look like a time as one; a template does not write when a message was sent.
    named = {NAMES.get(key, key): value for key, value in found.items() if value is not None}
    message = {key: value for key, value in named.items() if key == "content" or not isinstance(value, date)}
    role = message["role"] = ROLES.get(str(message.get("role")), message.get("role"))
    if role not in KNOWN:
        raise UserError(f"{where}: a message of the role {role!r}: rename it to one of {', '.join(KNOWN)}.")
    content = message.get("content", "")
    if isinstance(content, list):  # parts, of which a model of text can read texts alone
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise UserError(f"{where}: a message of {role} has a content that is not text but {kind_of(content)}.")
    return {**message, "content": content}


def kind_of(value: Any) -> str:
    """The type of ``value`` in a message, with what to do about a text that 🤗 Datasets has read as a time."""
    remedy = ": 🤗 Datasets reads texts of a JSON file so where all are dates; save them as Parquet, which keeps texts"
    return type(value).__name__ + (remedy if isinstance(value, date) else "")


class Task(causal_lm.Task):
    """A document is a conversation as JSON; one that is longer than ``max_length`` loses its end.

    Targets are the assistant's messages, as the template writes them after the prompt for an answer: with what it puts
    after them, such as the mark for their end. A message of a ``prompt`` is not a target, nor is one with ``weight: 0``
    or ``train: false``, one that says and calls nothing, or one that begins the conversation.
    """

    title = "chat"
    headline_metric = "perplexity"
    example_columns = ("tokens", "length", "document_length", "is_target")

    def token_ids(self, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
        """No ids yet: :meth:`cut` makes them, from the text that the template writes."""
        return ([] for _ in texts)

    def conversation_in(self, text: str) -> dict[str, Any]:
        """What :func:`documents` has written as ``text``; UserError for what something else has."""
        with suppress(ValueError):
            if isinstance(found := json.loads(text), dict) and "messages" in found:
                return found
        what = f"a text that is not a conversation as JSON, {text[:60]!r}"
        raise UserError(f"{what}: give --dataset recipes/chat.py:documents, and your file as its path.")

    def cut(self, text: str, ids: list[int], label: int | None, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The conversation as one example; as several where the template rewrites earlier answers.

        Qwen3's drops the thoughts of earlier answers, also empty ones: each answer has an example of its own.
        """
        if ids:  # of a plan, which has no conversations: an answer throughout
            lengths = dict.fromkeys(("length", "document_length"), len(ids) - 1)
            yield {"tokens": np.array(ids, dtype=np.int32), **lengths, "is_target": np.ones(len(ids), dtype=bool)}
            return
        found, written, spans = self.conversation_in(text), "", list[tuple[int, int]]()
        messages = found["messages"]
        others = {"tools": found.get("tools") or None, **(found.get("chat_template_kwargs") or {})}
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number == 0:  # templates begin with a question
                continue
            history, before = (templated(tokenizer, messages[:number], asks, **others) for asks in (False, True))
            after = templated(tokenizer, messages[: number + 1], False, **others)
            start = common(before, after)
            if start < common(before, history.rstrip()):
                raise UserError(
                    "chat: the tokenizer's template writes a question in another way once it is answered, such as "
                    "without the system message: a model could not be trained on what it is asked. Put that message "
                    f"into the first question, or change the template. {beginning(messages)}"
                )
            if not after.startswith(written):
                yield from self._example(written, spans, tokenizer)
                spans = []
            says = message["content"].strip() or any(message[k] for k in message.keys() - PLAIN)
            spans += [(start, len(after))] if says and message.get("weight", 1) and message.get("train", True) else []
            written = after
        yield from self._example(written, spans, tokenizer)

    def _example(self, written: str, spans: list[tuple[int, int]], tokenizer: Any) -> Iterator[dict[str, Any]]:
        """The tokens of a conversation; targets are those that reach into one of ``spans`` of characters."""
        if not spans:
            return
        found = tokenizer(written, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        firsts, ends = np.array(found["offset_mapping"]).T
        is_target = np.zeros(len(ends), dtype=bool)
        for start, end in spans:
            is_target |= (ends > start) & (firsts < end)
        kept = self.data.max_length + 1
        if is_target[1:kept].any():
            tokens = np.array(found["input_ids"][:kept], dtype=np.int32)
            lengths = {"length": len(tokens) - 1, "document_length": len(ends) - 1}
            yield {"tokens": tokens, **lengths, "is_target": is_target[:kept]}

    def inputs_and_labels(self, example: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens, and the next ones where the assistant says them."""
        tokens, labels = super().inputs_and_labels(example, seed)
        return tokens, labels.masked_fill(~torch.tensor(example["is_target"][1:]), IGNORE)

    def stand_alone(self, tokenizer: Tokenizer) -> Tokenizer:
        """``tokenizer``, whose end token is the mark that the template writes after an answer.

        A base model's is another one, such as ``<|endoftext|>``, which this training never shows: it would write on.
        """
        made, asked = copy.deepcopy(tokenizer), [{"role": "user", "content": "question"}]
        with suppress(UserError):  # of a template that wants more
            said = templated(made, [*asked, {"role": "assistant", "content": "answer"}], False)
            after: Any = made(said.rpartition("answer")[2], add_special_tokens=False)
            known = {i for i, token in made.added_tokens_decoder.items() if token.special}  # Llama's <|eot_id|>, too
            special = [i for i in after["input_ids"] if i in known | {*made.all_special_ids}]
            if special and made.eos_token_id not in special:
                made.eos_token = made.convert_ids_to_tokens(special[0])
        return made


def templated(tokenizer: Any, messages: list[dict[str, Any]], asks: bool, **others: Any) -> str:
    """``messages`` as the template writes them, with the prompt for an answer where it ``asks`` for one."""
    if not tokenizer.is_fast:
        raise UserError("chat: this tokenizer does not tell where its tokens lie in a text: give a fast one.")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **others)
    except Exception as error:  # a template is a program
        where = beginning(messages)
        raise UserError(f"chat: the tokenizer's template fails: {one_line(error, 300).rstrip('.')}. {where}") from None


def common(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: a loop over all characters would take seconds a conversation
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[:middle]) else (low, middle - 1)
    return low


def beginning(messages: list[dict[str, Any]]) -> str:
    roles, content = ", ".join(message["role"] for message in messages[:6]), messages[0].get("content", "")
    return f"It was a conversation of {roles} that begins {content[:60]!r}."
