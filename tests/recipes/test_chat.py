"""Conversations and summaries as people have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from train.config import Config
from train.records import UsageError, UserError

QUESTION, ANSWER = {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}


def documents(recipe: ModuleType, **options: Any) -> dict[str, Any]:
    return recipe.documents(Config().changed(dataset_options=options))


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [QUESTION, ANSWER], "id": 1}, [QUESTION, ANSWER]),
        ({"prompt": "two?", "completion": "2"}, [QUESTION, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}]},
            [QUESTION, ANSWER],
        ),
        ({"messages": [{**QUESTION, "name": "Åsa"}, ANSWER]}, [{**QUESTION, "name": "Åsa"}, ANSWER]),
    ],
)
def test_conversations_of_every_kind(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, row: dict[str, Any], expected: list[Any]
) -> None:
    """Keys that only some messages have are not there in the others."""
    found = documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", row, row)))
    assert list(found) == ["train"] and found["train"].column_names == ["text"]
    assert [json.loads(text) for text in found["train"]["text"]] == [expected, expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "two?"},
            "chats.jsonl, row 0: no messages, conversations, or prompt and completion; the columns are text",
        ),
        ({"messages": ["two?"]}, "row 0: no messages"),
        ({"messages": [{"content": "two?"}]}, "row 0: a message without a role"),
    ],
)
def test_rows_without_a_conversation_are_named(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", row)))


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_what_cannot_be_read_and_options_that_are_not_there(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    recipe = load_recipe(name)
    for options in ({}, {"path": "chats.jsonl", "splits": "train"}):
        with pytest.raises(UsageError, match=f"dataset_options: recipes/{name}.py takes path, .*; path is needed"):
            documents(recipe, **options)
    (tmp_path / "damaged.jsonl").write_text("{")
    for path in ("damaged.jsonl", "no_such_folder/chats.jsonl"):
        with pytest.raises(UserError, match=rf"dataset_options: path '.*{path}' cannot be read: .*Give a \.jsonl"):
            documents(recipe, path=str(tmp_path / path))


def test_summaries_have_columns_of_any_name(load_recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    recipe, row = load_recipe("summaries"), {"article": "long", "abstract": "short", "id": 1}
    path = str(written(tmp_path / "papers.jsonl", row))
    found = documents(recipe, path=path, document="article", summary="abstract", validation_split="train")
    assert list(found) == ["train", "validation"]
    assert json.loads(found["train"]["text"][0]) == {"document": "long", "summary": "short"}
    with pytest.raises(UserError, match=r"papers\.jsonl: no column 'document'; the columns are article, abstract, id"):
        documents(recipe, path=path)
    with pytest.raises(UsageError, match="model_config: summaries need its decoder_start_token_id"):
        recipe.Task(Config().changed(model_config={"model_type": "t5"}))
    assert recipe.Task(Config().changed(model_config={"model_type": "t5", "decoder_start_token_id": 0})).data.max_length
