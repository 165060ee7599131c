"""Generated ListOps, checked by an evaluator of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

from train.config import Config, Data
from train.figures import gib, read_metrics
from train.records import UsageError, UserError

SMALL = {"train": 60, "validation": 10, "test": 10, "min_length": 20, "max_length": 100}
Load = Callable[..., dict[str, Any]]


@pytest.fixture
def listops(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return load_recipe("listops")


@pytest.fixture
def load(listops: ModuleType) -> Load:
    """The splits with these options instead of the small ones."""
    return lambda **options: listops.documents(Config(data=Data(dataset_options=SMALL | options)))


def work_out(text: str) -> tuple[int, int]:
    """Value and depth by rewriting the innermost brackets, nothing shared with the generator."""
    stack: list[list[Any]] = [["", []]]
    deepest = 0
    for token in text.split(" "):
        if token.startswith("["):
            stack.append([token[1:], []])
            deepest = max(deepest, len(stack) - 1)
        elif token == "]":
            name, values = stack.pop()
            values = sorted(values)
            count = len(values)
            middle = values[count // 2] if count % 2 else (values[count // 2 - 1] + values[count // 2]) / 2
            result = {"MIN": values[0], "MAX": values[-1], "SM": sum(values) % 10, "MED": int(middle)}[name]
            stack[-1][1].append(result)
        else:
            stack[-1][1].append(int(token))
    ((_, (value,)),) = stack
    return value, deepest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MIN 3 8 ]", 3),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 8 3 ]", 3),
        ("[MED 1 2 ]", 1),
        ("[MED 9 4 [SM 7 8 ] 6 ]", 5),
        ("[SM [MAX 1 5 ] [MED 7 7 0 ] [MIN 6 2 ] ]", 4),
    ],
)
def test_evaluator_of_this_test_and_the_generator_agree_by_hand(listops: ModuleType, text: str, value: int) -> None:
    assert work_out(text)[0] == value
    if text.count("[") == 1:
        name, *digits = text[1:-2].split(" ")
        assert listops.evaluate(name, [int(digit) for digit in digits]) == value


def test_labels_are_the_values_and_shapes_are_in_range(load: Load) -> None:
    corpus = load(max_depth=4, max_args=5)
    for split in (corpus["train"], corpus["validation"], corpus["test"]):
        for document in split:
            value, depth = work_out(document["text"])
            assert document["label"] == value
            assert 1 <= depth <= 3
            assert 20 < len(document["text"].split(" ")) < 100
    assert corpus["train"].column_names == ["text", "label", "source"]
    assert {type(label) for label in corpus["train"]["label"]} == {int}


def test_sizes_distinct_examples_and_all_operators(load: Load) -> None:
    corpus = load()
    assert [len(corpus["train"]), len(corpus["validation"]), len(corpus["test"])] == [60, 10, 10]
    texts = [text for split in (corpus["train"], corpus["validation"], corpus["test"]) for text in split["text"]]
    assert len(set(texts)) == 80
    assert {token for text in texts for token in text.split() if token[0] == "["} == {"[MIN", "[MAX", "[MED", "[SM"}


def test_the_seed_is_its_own(load: Load) -> None:
    first, again, other = load(), load(), load(seed=1)
    assert first["train"]["text"][:] == again["train"]["text"][:]
    assert set(first["train"]["text"]).isdisjoint(other["train"]["text"])


def test_an_expression_follows_from_its_draws(listops: ModuleType) -> None:
    draws = [0.8, 0.0, 0.9, 0.35, 0.1, 0.3, 0.12, 0.9, 0.77]
    tokens, value = listops.expression(iter(draws).__next__, max_depth=3, max_args=4, max_length=99)
    assert (" ".join(tokens), value) == ("[SM 3 [MAX 9 7 ] ]", 2)


def test_a_smaller_training_split_is_the_head_of_a_larger_one(load: Load) -> None:
    small, large = load(train=5), load(train=20)
    assert large["train"]["text"][:5] == small["train"]["text"][:]
    assert large["test"]["text"][:] == small["test"]["text"][:]


def test_published_defaults(listops: ModuleType) -> None:
    assert listops.Options() == listops.Options(96_000, 2_000, 2_000, 500, 2_000, 10, 10, 0)
    splits = listops.documents(Config(data=Data(dataset_options={"train": 20, "validation": 2, "test": 2})))
    assert all(500 < len(text.split(" ")) < 2_000 for text in splits["train"]["text"])


def test_generated_once(listops: ModuleType, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load()
    monkeypatch.setattr(listops, "TRIES", 0)  # nothing could be drawn
    assert load()["train"]._fingerprint == first["train"]._fingerprint


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_lenght": 5}, "Did you mean min_length?"),
        ({"zzz": 5}, "listops knows train, validation"),
        ({"train": "5"}, "train: '5' is not a whole number"),
        ({"train": True}, "not a whole number"),
        ({"train": 0}, "train: 0 must be from 1"),
        ({"min_length": 50, "max_length": 50}, "max_length: 50 must be from 52"),
        ({"max_depth": 1}, "max_depth: 1 must be from 2"),
        ({"max_args": 1}, "max_args: 1 must be from 2"),
        ({"seed": -1}, "seed: -1 must be from 0"),
    ],
)
def test_wrong_options(load: Load, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(**options)
    assert expected in str(raised.value)


def test_options_that_allow_too_few_examples(listops: ModuleType, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listops, "TRIES", 2_000)
    with pytest.raises(UserError, match=r"of 1,020 distinct examples with 0 < length < 5 found: widen"):
        load(train=1_000, min_length=0, max_length=5)
    with pytest.raises(UserError, match=r"only 0 of 80 distinct"):
        load(min_length=900, max_length=1000, max_depth=2)


def test_the_header_of_the_long_task_has_the_figures_of_its_run() -> None:
    rows = read_metrics(ROOT / "docs" / "results" / "listops-nvidia-h200" / "metrics.jsonl")
    header = (ROOT / "recipes" / "listops_lra.yaml").read_text(encoding="utf-8")
    first, last = rows[-3], rows[-1]  # before them the card had other work
    times = [datetime.fromisoformat(row["time"]) for row in (first, last)]
    seconds_per_step = (times[1] - times[0]).total_seconds() / (last["step"] - first["step"])
    assert f"about {5000 * seconds_per_step / 60:.0f} minutes on an H200, by its first {last['step']} steps" in header
    assert f"# peak:      {gib(max(row['peak_allocated_bytes'] for row in rows))} there" in header
