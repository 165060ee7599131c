"""Conversations and summaries as people have them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from support import ROOT
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from train.config import Config
from train.extras.readers.own_tokenizers import build_tokenizer
from train.main import main
from train.memory import __main__ as memory
from train.records import EXIT_DONE, UsageError, UserError

QUESTION, ANSWER = {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}
ASKED = {**QUESTION, "weight": 0}  # of a prompt, of which nothing is a target
OWN_READER = """
import json

from train.tasks import causal_lm


class Task(causal_lm.Task):
    def cut(self, text, ids, label, tokenizer):
        yield from super().cut(str(json.loads(text)), ids, label, tokenizer)
"""


def documents(recipe: ModuleType, **options: Any) -> dict[str, Any]:
    return recipe.documents(Config().changed(dataset_options=options, task=f"{recipe.__file__}:Task"))


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"of": "x"}}}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [QUESTION, ANSWER], "id": 1}, [QUESTION, ANSWER]),
        ({"prompt": "two?", "completion": "2"}, [ASKED, ANSWER]),
        ({"prompt": "two?", "completion": "2", "label": True}, [ASKED, ANSWER]),
        (
            {"prompt": "two?", "completion": "2", "system_prompt": "short"},
            [{"role": "system", "content": "short"}, ASKED, ANSWER],
        ),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [ASKED, ANSWER]),
        (  # what the prompt says for the assistant is not trained on
            {"prompt": [QUESTION, {"from": "gpt", "value": "2"}, QUESTION], "completion": [ANSWER]},
            [ASKED, {**ANSWER, "weight": 0}, ASKED, ANSWER],
        ),
        ({"instruction": "two?", "input": "", "output": "2"}, [ASKED, ANSWER]),  # of Alpaca
        ({"instruction": "", "input": "two?", "output": "2", "history": None}, [ASKED, ANSWER]),
        (
            {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "short", "history": [["two?", "2"]]},
            [{"role": "system", "content": "short"}, ASKED, ANSWER, {**ASKED, "content": "Add.\n\n1 + 1"}, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}], "system": "short"},
            [{"role": "system", "content": "short"}, QUESTION, ANSWER],
        ),
        ({"messages": [{**QUESTION, "name": "Åsa"}, ANSWER]}, [{**QUESTION, "name": "Åsa"}, ANSWER]),
        (  # which 🤗 Datasets reads as a time
            {"messages": [{**message, "sent": "2024-01-01T10:00:00"} for message in (QUESTION, ANSWER)]},
            [QUESTION, ANSWER],
        ),
        ({"messages": [QUESTION, CALL]}, [QUESTION, {**CALL, "content": ""}]),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o?"}]}
                ]
            },
            [QUESTION],
        ),
    ],
)
def test_conversations_of_every_kind(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, row: dict[str, Any], expected: list[Any]
) -> None:
    """Keys that only some messages have are not there in the others."""
    found = documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", row, row)))
    assert list(found) == ["train"] and found["train"].column_names == ["text"]
    assert [json.loads(text)["messages"] for text in found["train"]["text"]] == [expected, expected]


def test_rows_of_several_kinds_in_a_file_are_all_read_and_one_without_an_answer_is_empty(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Columns that only other rows have are None."""
    rows: list[dict[str, Any]] = [
        {"messages": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2"}]},
        {"prompt": "two?", "completion": "2"},
        {"prompt": "two?", "completion": None},
        {"prompt": "", "completion": "2"},
        {"instruction": "two?", "input": "", "output": "2"},
        {"instruction": "two?", "input": "", "output": None},
        {"prompt": "two?", "completion": "3", "label": False},  # of KTO: not to be learned
        {"prompt": "", "completion": "2", "system": "short"},
    ]
    found = documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", *rows)))["train"]["text"]
    assert [json.loads(text)["messages"] for text in (*found[:3], found[5])] == [
        *[[QUESTION, ANSWER]] * 2,
        *[[ASKED, ANSWER]] * 2,
    ]
    assert [*found[3:5], *found[6:]] == [""] * 5


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_a_file_with_other_content_of_the_same_time_is_read_again(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    recipe, folder = load_recipe(name), tmp_path / "rows"
    folder.mkdir()
    for path in (folder / "rows.jsonl", folder):
        seen = []
        for said in ("one", "two", "two and more"):
            row = {"prompt": "?", "completion": said, "document": "long", "summary": said}
            written(folder / "rows.jsonl", row)
            os.utime(folder / "rows.jsonl", (1e9, 1e9))
            seen += [said in text for text in documents(recipe, path=str(path))["train"]["text"]]
        assert seen == [True] * 3


def test_summaries_are_texts_as_they_are_in_the_file(load_recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    recipe = load_recipe("summaries")
    (tmp_path / "rows.csv").write_text("document,summary,other\n007,2020-01-01,1\nNA,None,2\nlong, ,3\nlong,,4\n")
    found = documents(recipe, path=str(tmp_path / "rows.csv"))["train"]["text"]
    assert [json.loads(text or "null") for text in found] == [
        {"document": "007", "summary": "2020-01-01"},
        {"document": "NA", "summary": "None"},
        None,
        None,
    ]
    years = "".join(f"a,b,{'' if n == 15_000 else 1999}\n" for n in range(20_000))  # a column that is not read
    (tmp_path / "years.csv").write_text(f"document,summary,year\n{years}")
    assert len(documents(recipe, path=str(tmp_path / "years.csv"))["train"]) == 20_000
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.csv").write_text("document,summary\n007,None\n")
    (tmp_path / "folder" / "validation.csv").write_text("document,summary\nNA,008\n")
    found = documents(recipe, path=str(tmp_path / "folder"), validation_split="validation")
    assert [json.loads(split["text"][0]) for split in found.values()] == [
        {"document": "007", "summary": "None"},
        {"document": "NA", "summary": "008"},
    ]
    path = written(tmp_path / "rows.jsonl", {"document": "a", "summary": ["b"]})
    with pytest.raises(UserError, match=r"row 1: 'summary' holds list; it has to be text"):
        documents(recipe, path=str(path))


def test_tools_come_along_and_conversations_without_a_message_are_empty(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = {"messages": [QUESTION], "tools": json.dumps(tools)}, {"messages": [], "tools": ""}
    found = documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", *rows)))["train"]["text"]
    expected = {"messages": [QUESTION], "tools": tools, "chat_template_kwargs": None}
    assert json.loads(found[0]) == expected and found[1] == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "two?"}, "chats.jsonl, row 1: no messages, .*, prompt and completion, or .*; the columns are text"),
        ({"messages": ["two?"]}, "row 1: no messages"),
        ({"instruction": "a", "input": ["b"], "output": "c"}, "row 1: instruction and input have to be texts"),
        ({"instruction": "a", "output": "c", "history": [["b"]]}, "row 1: .* history pairs of them"),
        ({"messages": [QUESTION], "tools": "search"}, "row 1: its tools are not JSON"),
        ({"messages": [{"content": "two?"}]}, "row 1: a message of the role None: rename it to one of system, "),
        ({"messages": [{**QUESTION, "role": ["user"]}]}, r"row 1: a message of the role \['user'\]: rename it"),
        ({"conversations": [{"from": "bot", "value": "2"}]}, "row 1: a message of the role 'bot': rename it"),
        ({"messages": [{**QUESTION, "content": [{"type": "image", "text": None}]}]}, "row 1: .* user has a content"),
        ({"prompt": "When?", "completion": "2024-01-01"}, "row 1: .* not text but datetime: .* save them as Parquet"),
    ],
)
def test_rows_without_a_conversation_are_named(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        documents(load_recipe("chat"), path=str(written(tmp_path / "chats.jsonl", row)))


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_a_file_has_splits_too(load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str) -> None:
    """Its rows are the split train; another name is refused, and not what the model trains on."""
    recipe = load_recipe(name)
    rows = [{"messages": [QUESTION, ANSWER], "document": "long", "summary": str(n)} for n in range(10)]
    path = str(written(tmp_path / "rows.jsonl", *rows))
    found = documents(recipe, path=path, split="train[:80%]", validation_split="train[80%:]")
    assert {split: len(rows) for split, rows in found.items()} == {"train": 8, "validation": 2}
    with pytest.raises(UserError, match=r'rows.jsonl. cannot be read .*Unknown split "validation"'):
        documents(recipe, path=path, validation_split="validation")


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows that both recipes read."""
    numbers = range(first, first + count)
    return [{"prompt": f"{n}?", "completion": f"{n}", "document": f"{n}", "summary": f"{n}"} for n in numbers]


def numbers_in(split: datasets.Dataset) -> list[int]:
    return [int(re.findall(r"\d+", text)[0]) for text in split["text"]]


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_a_folder_that_save_to_disk_wrote(load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str) -> None:
    """Its splits by their names, without what 🤗 Datasets has cached next to them; nothing is written into it."""
    recipe, folder = load_recipe(name), str(tmp_path / "saved")
    splits = {"train": rows_of(6), "validation": rows_of(2, 10), "train_gen": rows_of(4, 20)}
    saved: Any = {key: datasets.Dataset.from_list(rows) for key, rows in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(folder)
    datasets.load_from_disk(folder).map(lambda row: {**row, "more": 1})
    before = sorted(Path(folder).rglob("*"))
    assert any("cache-" in file.name for file in before)
    found = documents(recipe, path=folder)
    assert {key: numbers_in(rows) for key, rows in found.items()} == {"train": [*range(6)], "validation": [10, 11]}
    found = documents(recipe, path=folder, split="train_gen", validation_split="train[:50%]")
    assert {key: numbers_in(rows) for key, rows in found.items()} == {
        "train": [20, 21, 22, 23],
        "validation": [0, 1, 2],
    }
    for split in ("train+validation", "all"):  # what is trained on is not validated on as well
        assert set(documents(recipe, path=folder, split=split)) == {"train"}
    with pytest.raises(UserError, match="it has no configuration 'main'"):
        documents(recipe, path=folder, config="main")
    assert sorted(Path(folder).rglob("*")) == before
    datasets.Dataset.from_list(rows_of(3)).save_to_disk(str(tmp_path / "one"))
    assert {key: numbers_in(rows) for key, rows in documents(recipe, path=str(tmp_path / "one")).items()} == {
        "train": [0, 1, 2]
    }


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_a_folder_with_several_configurations_is_read_by_the_name_of_one(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    """As on the Hub; its validation split is taken, without which some of train is held out."""
    recipe, lines = load_recipe(name), ["---", "configs:"]
    for number, config in enumerate(("main", "other")):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, first in (("train", 0), ("validation", 5)):
            (tmp_path / config).mkdir(exist_ok=True)
            written(tmp_path / config / f"{split}.jsonl", *rows_of(2, 100 * number + first))
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (tmp_path / "README.md").write_text("\n".join([*lines, "---", ""]))
    found = documents(recipe, path=str(tmp_path), config="other")
    assert {key: numbers_in(rows) for key, rows in found.items()} == {"train": [100, 101], "validation": [105, 106]}
    with pytest.raises(UserError, match=r"Config name is missing.*main.*other.*Its config is one of dataset_options"):
        documents(recipe, path=str(tmp_path))


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_a_file_in_another_encoding_is_one_message(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    text = (
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_of(3))
        .replace("2?", "é")
        .replace('"2"', '"é"')
    )
    (tmp_path / "latin.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.jsonl' cannot be read .*Give a UTF-8 \.jsonl"):
        documents(load_recipe(name), path=str(tmp_path / "latin.jsonl"))


def test_columns_of_other_names_and_a_system_text_that_looks_like_a_date(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    recipe, path = load_recipe("chat"), str(written(tmp_path / "rows.jsonl", {"question": "two?", "answer": "2"}))
    [text] = documents(recipe, path=path, prompt="question", completion="answer")["train"]["text"]
    assert json.loads(text)["messages"] == [ASKED, ANSWER]
    with pytest.raises(
        UserError, match=r"the columns are question, answer\. Name .* as prompt and completion of --data"
    ):
        documents(recipe, path=path)
    dated = written(tmp_path / "dated.jsonl", {"prompt": "two?", "completion": "2", "system": "2024-01-02"})
    with pytest.raises(UserError, match=r"row 1: its system is not text but datetime: .* save them as Parquet"):
        documents(recipe, path=str(dated))
    table = datasets.Dataset.from_list([{"prompt": "two?", "completion": "2", "system": "2024-01-02"}])
    table.to_parquet(tmp_path / "dated.parquet")  # the remedy
    [row] = documents(recipe, path=str(tmp_path / "dated.parquet"))["train"]["text"]
    assert json.loads(row)["messages"][0] == {"role": "system", "content": "2024-01-02"}


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_documents_and_task_belong_together(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    """One without the other would train on JSON, or cannot read a text."""
    recipe, own = load_recipe(name), f"recipes/{name}.py"
    row = {"messages": [QUESTION, ANSWER], "document": "long", "summary": "short"}
    config = Config().changed(dataset_options={"path": str(written(tmp_path / "rows.jsonl", row))})
    with pytest.raises(UsageError, match=f"task: causal_lm would train on the JSON that .*: give --task {own}:Task"):
        recipe.documents(config)
    (tmp_path / "own.py").write_text(OWN_READER)
    assert len(recipe.documents(config.changed(task=f"{tmp_path / 'own.py'}:Task"))["train"]) == 1
    task = recipe.Task(config.changed(model_config={"decoder_start_token_id": 0}))
    for text in ("a text", '{"a": "JSON"}', "[]"):
        with pytest.raises(UserError, match=f"a text that is not .* as JSON, .*: give --dataset {own}:documents"):
            list(task.cut(text, [], None, tokenizer_with(CHATML)))


@pytest.mark.parametrize("name", ["chat", "summaries"])
def test_what_cannot_be_read_and_options_that_are_not_there(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path, name: str
) -> None:
    recipe = load_recipe(name)
    for options in ({}, {"path": "chats.jsonl", "splits": "train"}, {"path": 3}):
        with pytest.raises(UsageError, match=f"dataset_options: recipes/{name}.py takes path, .*; path is needed"):
            documents(recipe, **options)
    (tmp_path / "damaged.jsonl").write_text("{")
    for path in ("damaged.jsonl", "no_such_folder/chats.jsonl", "chats.tsv"):
        (tmp_path / "chats.tsv").write_text("messages")
        with pytest.raises(UserError, match=rf"dataset_options: '.*{path}' cannot be read \(.*Give a UTF-8 \.js"):
            documents(recipe, path=str(tmp_path / path))


@pytest.mark.parametrize("name", ["chat", "summaries"])
@pytest.mark.parametrize("path", ["misspelt.jsonl", "/no/such/folder"])
def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(
    load_recipe: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    def asked(*names: str, **options: Any) -> None:
        raise AssertionError(f"the Hub was asked for {names}")

    monkeypatch.setattr("datasets.load_dataset", asked)
    with pytest.raises(UserError, match=rf"options: '{path}' cannot be read \(FileNotFoundError: no such file or fol"):
        documents(load_recipe(name), path=path)


MARKS = "<|system|>", "<|user|>", "<|assistant|>"
CHATML = (
    "{% if tools %}[{{ tools[0].name }}]{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Only the last question gets the system message; and earlier answers lose what Qwen3's do, an empty thought.
FORGETS = (
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}: {% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = CHATML.replace("{{ m.content }}", "{{ '<>' if loop.last and m.role == 'assistant' }}{{ m.content }}")


def tokenizer_with(template: str, end: str = "<|endoftext|>") -> Any:
    letters = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    bytes_ = Tokenizer(models.BPE({**letters, "th": 256}, [("t", "h")]))
    bytes_.pre_tokenizer, bytes_.decoder = ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    marks: Any = [*MARKS, "<|end|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token=end, additional_special_tokens=marks)
    tokenizer.chat_template = template
    return tokenizer


def examples(recipe: ModuleType, conversation: list[Any], template: str = CHATML, **more: Any) -> list[Any]:
    """The examples of a conversation as text, targets in brackets, with their lengths."""
    tokenizer = tokenizer_with(template, "<|end|>")
    text, task = json.dumps({"messages": conversation, **more}), recipe.Task(Config().changed(max_length=30))
    found = []
    for example in task.cut(text, [], None, tokenizer):
        shown, before = "", False
        for token, is_target in zip(example["tokens"], example["is_target"].tolist(), strict=True):
            shown += "]" * (before and not is_target) + "[" * (is_target and not before) + str(tokenizer.decode(token))
            before = is_target
        found.append((shown + "]" * before, example["length"], example["document_length"]))
    return found


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_what_the_assistant_says_is_the_target(load_recipe: Callable[[str], ModuleType]) -> None:
    recipe, ask, say = load_recipe("chat"), partial(message, "user"), partial(message, "assistant")
    two = [ask("e?"), say("1"), ask("b?"), say("2")]
    whole = "<|user|>e?<|end|><|assistant|>[1<|end|>]<|user|>b?<|end|><|assistant|>[2<|end|>]"
    assert examples(recipe, two) == [(whole, 13, 13)]
    assert examples(recipe, [ask("a"), say("1"), say("2")]) == [
        ("<|user|>a<|end|><|assistant|>[1<|end|>]<|assistant|>[2<|end|>]", 8, 8)
    ]
    assert examples(recipe, [say("hi"), ask("a")]) == [] == examples(recipe, [ask("a")])
    # Weights, tools, and an answer whose beginning is one token with the end of the prompt.
    assert examples(recipe, [ask("a"), say("1", weight=0), ask("b"), say("2")])[0][0].count("[") == 1
    assert examples(recipe, [ask("a"), say(" "), ask("b"), say("2")])[0][0].count("[") == 1
    assert examples(recipe, [ask("a"), say("", tool_calls=[]), ask("b"), say("2")])[0][0].count("[") == 1
    assert examples(recipe, [ask("a"), say("", tool_calls=[{"function": {"name": "f"}}])])[0][0].count("[") == 1
    assert examples(recipe, two, tools=[{"name": "f"}])[0][0].startswith("[f]<|user|>")
    joined = CHATML.replace("<|assistant|>{% endif %}", "<|assistant|>t{% endif %}").replace(
        "{{ m.content }}", "{{ 't' if m.role == 'assistant' }}{{ m.content }}"
    )
    assert examples(recipe, [ask("a"), say("he")], joined) == [("<|user|>a<|end|><|assistant|>[the<|end|>]", 6, 6)]
    # Longer than max_length: the end is lost, and with it an answer that begins there.
    assert examples(recipe, [ask("a" * 10), say("1" * 30)])[0][1:] == (30, 43)
    assert examples(recipe, [ask("a" * 40), say("1")]) == []


def test_templates_that_rewrite_what_was_said(load_recipe: Callable[[str], ModuleType]) -> None:
    recipe, ask, say = load_recipe("chat"), partial(message, "user"), partial(message, "assistant")
    two = [ask("a?"), say("1"), ask("b?"), say("2")]
    assert [shown for shown, *_ in examples(recipe, two, THINKS)] == [
        "<|user|>a?<|end|><|assistant|>[<>1<|end|>]",
        "<|user|>a?<|end|><|assistant|>1<|end|><|user|>b?<|end|><|assistant|>[<>2<|end|>]",
    ]
    assert len(examples(recipe, two, FORGETS)) == 1  # no system message, nothing is rewritten
    with pytest.raises(UserError, match=r"writes a question in another way .* conversation of system, user, assistant"):
        examples(recipe, [message("system", "be short"), *two], FORGETS)
    fails = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match=r"template fails: System role not supported\. It was a .* that begins 'a\?'"):
        examples(recipe, two, fails)


def test_a_summary_leaves_room_for_its_document(load_recipe: Callable[[str], ModuleType]) -> None:
    config = Config().changed(max_length=20, model_config={"model_type": "t5", "decoder_start_token_id": 0})
    task = load_recipe("summaries").Task(config.changed(dataset_options={"path": "papers.jsonl"}))
    text = json.dumps({"document": "d" * 50, "summary": "s" * 30})
    [example] = task.cut(text, [], None, build_tokenizer("bytes", ()))
    assert (len(example["tokens"]), len(example["summary"])) == (10, 10)
    assert (example["length"], example["document_length"]) == (20, 84)
    text = json.dumps({"document": "d" * 5, "summary": "s" * 3})
    [example] = task.cut(text, [], None, build_tokenizer("bytes", ()))
    assert example["length"] == example["document_length"] == 12


@pytest.mark.slow
def test_a_plan_of_chats_is_of_the_longest_one_and_guesses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = [
        "--dataset_options",
        '{"path": "chats.jsonl"}',
        "--tokenizer",
        "bytes",
        "--max_length",
        "64",
        "--model_config",
    ]
    words += ['{"model_type": "gpt2", "n_embd": 16, "n_head": 1, "n_layer": 1}', "--mixed_precision", "no"]
    peaks = []
    for task in (("recipes/chat.py:Task", "recipes/chat.py:documents"), ("causal_lm", "stdlib")):
        own = ["--task", task[0], "--dataset", task[1]]
        assert (
            memory.main(["predict", "--device", "cpu", "--json", *own, *words[0 if ":" in task[1] else 2 :]])
            == EXIT_DONE
        )
        said = json.loads(capsys.readouterr().out)
        peaks.append(said["prediction"]["peak_bytes"])
        assert "longest_example" not in json.dumps(said)
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_a_plan_of_summaries_is_of_the_longest_summary_and_a_document_that_fills_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    model = {"model_type": "longt5", "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    rows = [{"document": "d" * 50, "summary": "s" * 30}] * 9
    path = written(tmp_path / "papers.jsonl", *rows)
    words = ["--task", "recipes/summaries.py:Task", "--dataset", "recipes/summaries.py:documents", "--max_length", "60"]
    words += ["--dataset_options", json.dumps({"path": str(path), "max_summary_length": 20}), "--tokenizer", "bytes"]
    words += ["--model_config", json.dumps({**model, "decoder_start_token_id": 0}), "--mixed_precision", "no"]
    assert memory.main(["predict", "--device", "cpu", "--json", *words]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert main([*words, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]) == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["max_length"] == 60 and found["prediction"]["peak_bytes"] == summary["predicted_peak_bytes"]
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_allocated_bytes"], rel=0.001)


def test_summaries_have_columns_of_any_name(load_recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    recipe, row = load_recipe("summaries"), {"article": "long", "abstract": "short", "id": 1}
    path = str(written(tmp_path / "papers.jsonl", row))
    found = documents(recipe, path=path, document="article", summary="abstract", validation_split="train")
    assert list(found) == ["train", "validation"]
    assert json.loads(found["train"]["text"][0]) == {"document": "long", "summary": "short"}
    with pytest.raises(UserError, match=r"papers\.jsonl: no column 'document'; the columns are article, abstract, id"):
        documents(recipe, path=path)
    for most in (-1, 2):
        with pytest.raises(UsageError, match=f"dataset_options: max_summary_length: {most} is less than 3 tokens"):
            documents(recipe, path=path, max_summary_length=most)
    with pytest.raises(UsageError, match="model_config: summaries need its decoder_start_token_id"):
        recipe.Task(Config().changed(model_config={"model_type": "t5"}))
    assert recipe.Task(Config().changed(model_config={"model_type": "t5", "decoder_start_token_id": 0})).data.max_length


def test_messages_that_are_not_to_be_trained_on_and_words_for_the_template(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    recipe, ask, say = load_recipe("chat"), partial(message, "user"), partial(message, "assistant")
    shown = examples(recipe, [ask("a"), say("1", train=False), ask("b"), say("2", train=True)])[0][0]
    assert shown == "<|user|>a<|end|><|assistant|>1<|end|><|user|>b<|end|><|assistant|>[2<|end|>]"
    rows = [{"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}]
    [text] = documents(recipe, path=str(written(tmp_path / "chats.jsonl", *rows)))["train"]["text"]
    assert json.loads(text)["chat_template_kwargs"] == {"enable_thinking": False}
    rows = [{"messages": [QUESTION, ANSWER], "chat_template_kwargs": '{"enable_thinking": true}'}]
    [text] = documents(recipe, path=str(written(tmp_path / "texts.jsonl", *rows)))["train"]["text"]
    assert json.loads(text)["chat_template_kwargs"] == {"enable_thinking": True}
    for bad, said in (("[1]", "are not names with values"), ("{", "are not JSON")):
        file = written(tmp_path / f"{len(bad)}.jsonl", {"messages": [QUESTION, ANSWER], "chat_template_kwargs": bad})
        with pytest.raises(UserError, match=f"row 1: its chat_template_kwargs {said}"):
            documents(recipe, path=str(file))
    says = "{% if loud %}!{% endif %}" + CHATML
    tokenizer = tokenizer_with(says)
    task = recipe.Task(Config().changed(max_length=40, dataset_options={"path": "chats.jsonl"}))
    found = {"messages": [ask("a"), say("1")], "chat_template_kwargs": {"loud": True}}
    [example] = task.cut(json.dumps(found), [], None, tokenizer)
    assert tokenizer.decode(example["tokens"]).startswith("!")


def test_a_system_text_next_to_a_system_message(load_recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    recipe, system = load_recipe("chat"), {"role": "system", "content": "Be brief."}
    row = {"messages": [system, QUESTION, ANSWER], "system": "Be brief. "}
    [text] = documents(recipe, path=str(written(tmp_path / "chats.jsonl", row)))["train"]["text"]
    assert json.loads(text)["messages"] == [system, QUESTION, ANSWER]
    with pytest.raises(UserError, match=r"row 1: a system text and a system message that differ"):
        documents(recipe, path=str(written(tmp_path / "others.jsonl", {**row, "system": "Be long."})))


def test_what_parquet_fills_up_with_nothing_is_not_there(
    load_recipe: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """Its rows have every key of any row: arguments of other tools would be trained on as null."""
    calls = [{"city": "Paris"}, {"zone": "CET"}]
    rows = [{"messages": [QUESTION, {**ANSWER, "tool_calls": [{"arguments": call}]}]} for call in calls]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "chats.parquet"))
    found = documents(load_recipe("chat"), path=str(tmp_path / "chats.parquet"))["train"]["text"]
    assert [json.loads(text)["messages"][1]["tool_calls"] for text in found] == [[{"arguments": c}] for c in calls]


def test_final_ends_where_an_answer_ends(load_recipe: Callable[[str], ModuleType]) -> None:
    recipe, tokenizer = load_recipe("chat"), tokenizer_with(CHATML)
    task = recipe.Task(Config().changed(max_length=40, dataset_options={"path": "chats.jsonl"}))
    assert (tokenizer.eos_token, task.stand_alone(tokenizer).eos_token) == ("<|endoftext|>", "<|end|>")
    politely = "{% if messages %}answer politely<|system|>{% endif %}" + CHATML
    assert task.stand_alone(tokenizer_with(politely)).eos_token == "<|end|>"
    assert task.stand_alone(tokenizer_with("{{ raise_exception('no') }}")).eos_token == "<|endoftext|>"
    unnamed = tokenizer_with(CHATML.replace("<|end|>", "<|eot_id|>"))  # as in Llama 3's file
    unnamed.add_tokens([AddedToken("<|eot_id|>", special=True)], special_tokens=True)
    assert "<|eot_id|>" not in unnamed.all_special_tokens
    assert task.stand_alone(unnamed).eos_token == "<|eot_id|>"
