"""What a function of one's own returns is read as closely as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from train.config import Config
from train.data import corpus_of
from train.extras.readers import Extra
from train.launch import Launch
from train.records import UsageError, UserError


def returned(tmp_path: Path, body: str, labelled: bool = False, **options: Any) -> Any:
    """What the readers make of a function with this ``body``."""
    lines = ["import datasets", "from datasets import ClassLabel, Dataset, Features, Value", "def documents(config):"]
    (tmp_path / "given.py").write_text("\n".join([*lines, f"    return {body}"]))
    task = "sequence_classification" if labelled else "causal_lm"
    config = Config().changed(dataset=f"{tmp_path}/given.py:documents", task=task, **options)
    return Extra().documents(config, labelled)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("['a', 'b']", "returned list: return a 🤗 Dataset"),
        (
            "{'validation': Dataset.from_dict({'text': ['a']})}",
            "returned dict of .*: return .* dict of them: train, validation, test",
        ),
        ("{'train': ['a']}", "returned dict"),
        ("Dataset.from_dict({'body': ['a']})", r"the train split has no column 'text', only \['body'\]"),
        ("Dataset.from_dict({'text': ['a']}).to_iterable_dataset()", "returned IterableDataset: return a 🤗 Dataset"),
    ],
)
def test_a_function_that_returns_something_else_is_told(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"dataset '.*given.py:documents'.*{message}"):
        returned(tmp_path, body)


def test_a_task_with_labels_needs_them_from_the_function_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the train split has no column 'label'"):
        returned(tmp_path, "Dataset.from_dict({'text': ['a', 'b']})", labelled=True)
    assert (
        returned(tmp_path, "Dataset.from_dict({'text': ['a', 'b', 'c'], 'label': [0, 1, 0]})", True)
        .splits["train"]
        .num_rows
        == 2
    )


def test_labels_of_a_function_may_be_fractional_numbers(tmp_path: Path) -> None:
    found = returned(tmp_path, "Dataset.from_dict({'text': ['a', 'b', 'c'], 'label': [2.566, -0.5, 3.0]})", True)
    assert {row["text"]: row["label"] for split in found.splits.values() for row in split} == {
        "a": 2.566,
        "b": -0.5,
        "c": 3.0,
    }


def test_classes_of_a_function_have_their_names(tmp_path: Path) -> None:
    features = "Features({'text': Value('string'), 'label': ClassLabel(names=['ham', 'spam'])})"
    split = f"Dataset.from_dict({{'text': ['a', 'b'], 'label': [1, 0]}}, features={features})"
    found = returned(tmp_path, f"{{'train': {split}, 'validation': {split}}}", labelled=True)
    assert (found.splits["train"]["label"][:], found.splits["validation"]["label"][:]) == (
        ["spam", "ham"],
        ["spam", "ham"],
    )
    assert found.splits["train"]["text"][:] == ["a", "b"] and found.notes == ()
    assert found.classes == ("ham", "spam")


def test_the_order_of_classes_is_that_of_the_split_to_train_on(tmp_path: Path) -> None:
    features = "Features({'text': Value('string'), 'label': ClassLabel(names=NAMES)})"
    split = f"Dataset.from_dict({{'text': ['a', 'b'], 'label': [1, 0]}}, features={features})"
    first, second = (split.replace("NAMES", names) for names in ("['neg', 'pos']", "['pos', 'neg']"))
    found = returned(tmp_path, f"{{'validation': {first}, 'train': {second}}}", labelled=True)
    assert found.classes == ("pos", "neg")
    assert (found.splits["train"]["label"][:], found.splits["validation"]["label"][:]) == (
        ["neg", "pos"],
        ["pos", "neg"],
    )


def test_a_hidden_test_split_of_a_function_is_left_out(tmp_path: Path) -> None:
    features = "Features({'text': Value('string'), 'label': ClassLabel(names=['ham', 'spam'])})"
    split = f"Dataset.from_dict({{'text': ['a', 'b'], 'label': LABELS}}, features={features})"
    train, test = (split.replace("LABELS", labels) for labels in ("[1, 0]", "[-1, -1]"))
    for hidden in (test, "Dataset.from_dict({'text': ['a']})"):
        found = returned(tmp_path, f"{{'train': {train}, 'validation': {train}, 'test': {hidden}}}", labelled=True)
        assert set(found.splits) == {"train", "validation"}
        assert found.notes[0].startswith("left out the test split: ")


def test_empty_documents_of_a_function_are_skipped_and_counted(tmp_path: Path) -> None:
    split = "Dataset.from_dict({'text': ['a', '', 'b', ' \\n'], 'extra': [1, 2, 3, 4]})"
    found = returned(tmp_path, f"{{'train': {split}, 'validation': {split}}}")
    assert found.splits["train"]["text"][:] == ["a", "b"] and found.splits["train"]["extra"][:] == [1, 3]
    assert found.notes[0].startswith("skipped 2 empty documents of dataset ")
    assert found.notes[0].endswith("the train split, row 1: empty document")


@pytest.mark.parametrize("form", [None, "torch", "numpy", "arrow", "pandas"])
def test_a_function_may_return_what_is_on_the_disk_in_any_format(form: str | None, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(20)]
    datasets.Dataset.from_dict({"text": texts, "label": [0, 1] * 10}).save_to_disk(tmp_path / "saved")
    stored: Any = datasets.load_from_disk(tmp_path / "saved").with_format(form)
    config = Config().changed(task="sequence_classification")
    body = f"datasets.load_from_disk({str(tmp_path / 'saved')!r}).with_format({form!r})"
    found: Any
    for found in (corpus_of(stored, config), returned(tmp_path, body, labelled=True)):
        assert (len(found.splits["train"]), len(found.splits["validation"])) == (19, 1)
        assert sorted([*found.splits["train"]["text"][:], *found.splits["validation"]["text"][:]]) == sorted(texts)
        assert set(found.splits["train"]["label"]) == {0, 1}


def test_every_label_of_a_function_keeps_a_document_to_train_on(tmp_path: Path) -> None:
    """Whichever row the rare label is in."""
    for rare in range(20):
        labels = ["rare" if row == rare else "usual" for row in range(20)]
        body = f"Dataset.from_dict({{'text': [str(row) for row in range(20)], 'label': {labels!r}}})"
        found = returned(tmp_path, body, labelled=True)
        assert set(found.splits["train"]["label"]) == {"rare", "usual"} and found.splits["validation"]["label"][:] == [
            "usual"
        ]
        assert found.notes == ("held out 1 of 20 documents for validation",)


def test_a_single_document_of_a_function_is_cut_in_two(tmp_path: Path) -> None:
    """As that of a file is."""
    text = "one line of a hundred\n" * 100
    found = returned(tmp_path, f"Dataset.from_dict({{'text': [{text!r}]}})")
    assert (
        found.splits["train"]["text"][0] + found.splits["validation"]["text"][0] == text
        and len(found.splits["validation"]["text"][0]) == 110
    )
    with pytest.raises(UserError, match=r"one document, too short to split or JSON: add text or a"):
        returned(tmp_path, "Dataset.from_dict({'text': ['a']})")


def test_a_single_document_that_is_json_is_not_cut_in_two(tmp_path: Path) -> None:
    """As a conversation of recipes/chat.py is: its task could read neither half."""
    text = json.dumps({"messages": [{"role": "user", "content": "word " * 2000}]})
    with pytest.raises(UserError, match=r"one document, too short to split or JSON: add text or a validation split"):
        returned(tmp_path, f"Dataset.from_dict({{'text': [{text!r}]}})")


def test_a_transform_is_not_dropped_without_a_word(tmp_path: Path) -> None:
    body = "Dataset.from_dict({'text': ['a', 'b']}).with_transform(lambda rows: {'text': ['A'] * len(rows['text'])})"
    with pytest.raises(UserError, match=r"the train split has a transform, which is not applied: use map\(\)"):
        returned(tmp_path, body)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{'text': ['a', None]}", "the train split, row 1: no text. Correct it"),
        ("{'text': [1, 2]}", "the train split: column 'text' holds int64; each row needs text"),
        ("{'text': [[1], [2]]}", r"holds list; each row needs text\."),
        ("{'text': [{'a': 1}, {'a': 2}]}", "column 'text' holds dict; each row needs text"),
        ("{'text': ['a', 'b'], 'label': ['x', None]}", "the train split, row 1: no label. Correct it"),
        ("{'text': ['a', 'b'], 'label': [0.5, float('nan')]}", "the train split, row 1: no label. Correct it"),
        ("{'text': ['a', 'b'], 'label': [[1], [2]]}", "column 'label' holds list; each row needs text or a number"),
    ],
)
def test_a_row_of_a_function_that_cannot_be_used_is_named(columns: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        returned(tmp_path, f"Dataset.from_dict({columns})", labelled="label" in columns)


def test_splits_of_a_function_have_known_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="returned dict of train, dev: return "):
        returned(tmp_path, "{'train': Dataset.from_dict({'text': ['a']}), 'dev': Dataset.from_dict({'text': ['b']})}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"max_train_samples": 3}, "max_train_samples"),
        ({"text_column": "body"}, "text_column"),
        ({"validation_dataset": "/nowhere"}, "validation_dataset"),
    ],
)
def test_options_that_a_function_would_not_heed_are_refused(flags: dict[str, Any], named: str) -> None:
    config = Config().changed(dataset="my_data:documents", **flags)
    with pytest.raises(UsageError, match=f"{named}: my_data:documents gives its documents as they are to be used"):
        Extra().check(config, Launch())
    heeded = {"on_bad_record": "skip", "on_empty_document": "error"}
    Extra().check(Config().changed(dataset="my_data:documents", **heeded), Launch())


def test_an_empty_document_of_a_function_can_be_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the train split, row 1: empty document"):
        returned(tmp_path, "Dataset.from_dict({'text': ['a', '', 'b', 'c']})", on_empty_document="error")


@pytest.mark.parametrize("name", ["https://host.org/data.jsonl", "hf://datasets/a/b/c.parquet", r"C:\data\train.csv"])
def test_an_address_and_a_path_of_windows_are_not_taken_for_functions(name: str) -> None:
    config = Config().changed(dataset=name, text_column="body")
    Extra().check(config, Launch())
    with pytest.raises(UserError, match=re.escape(f"--dataset {name}: no such file or folder, and not a name on")):
        Extra().documents(config, False)
