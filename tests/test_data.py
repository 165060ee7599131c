"""Documents and functions of one's own: what ``module:function`` may return, and what is said of anything else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from train.config import Config
from train.data import corpus_of, load_function
from train.extras.readers import Extra
from train.launch import Launch
from train.records import UsageError, UserError
from train.tasks import load_task


def corpus(found: Any, **options: Any) -> Any:
    return corpus_of(found, Config().changed(dataset="my_data:documents", **options))


def made_of(*texts: str, **columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(texts), **columns})


def test_part_of_a_single_dataset_is_held_out_and_always_the_same() -> None:
    whole = made_of(*(f"t{i}" for i in range(20)))
    first, second = corpus(whole, validation_fraction=0.25), corpus({"train": whole}, validation_fraction=0.25)
    assert len(first.train) == 15 and len(first.validation) == 5 and first.test is None
    assert first.validation["text"][:] == second.validation["text"][:]
    assert sorted([*first.train["text"], *first.validation["text"]]) == sorted(whole["text"])


@pytest.mark.parametrize(("fraction", "held_out"), [(0.01, 1), (0.99, 3)])
def test_both_parts_have_a_document_at_least(fraction: float, held_out: int) -> None:
    found = corpus(made_of("a", "b", "c", "d"), validation_fraction=fraction)
    assert (len(found.train), len(found.validation)) == (4 - held_out, held_out)


def test_splits_are_taken_as_they_are() -> None:
    splits = datasets.DatasetDict({name: made_of(name) for name in ("train", "validation", "test")})
    found = corpus(splits)
    assert [split["text"][:] for split in (found.train, found.validation, found.test)] == [
        ["train"],
        ["validation"],
        ["test"],
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (["a", "b"], "returned list: return a 🤗 Dataset"),
        ({"validation": made_of("a")}, "returned dict: return .* keys train, validation, test"),
        ({"train": ["a"]}, "returned dict"),
        (datasets.Dataset.from_dict({"body": ["a"]}), r"the train split has no column 'text', only \['body'\]"),
        (made_of("a").to_iterable_dataset(), "returned IterableDataset: return a 🤗 Dataset"),
        (made_of("only one"), r"1 document\(s\) cannot be split in two: return a validation split"),
    ],
)
def test_a_function_that_returns_something_else_is_told(found: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"dataset 'my_data:documents'.*{message}"):
        corpus(found)


def test_a_task_with_labels_needs_them_from_the_function_too() -> None:
    with pytest.raises(UserError, match="dataset 'my_data:documents': the train split has no column 'label'"):
        corpus({"train": made_of("a"), "validation": made_of("b")}, task="sequence_classification")
    assert corpus(made_of("a", "b", "c", label=[0, 1, 0]), task="sequence_classification").train.num_rows == 2


def test_an_unknown_label_of_a_function_is_named_without_a_source() -> None:
    task = load_task("sequence_classification")(Config().changed(task="sequence_classification"))
    with pytest.raises(UserError, match=r"document 1: label 'z' does not occur in the training split"):
        task.accepted(made_of("a", "b", label=["x", "z"]), ("x", "y"))


FILE = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Shape:
    width: int = 3

def build():
    return Shape()
"""


def test_a_function_is_found_in_a_file_and_in_a_module_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_shapes_for_test.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    for source in (f"{tmp_path}/own_shapes_for_test.py", "own_shapes_for_test.py", "own_shapes_for_test"):
        assert load_function(f"{source}:build", "model")().width == 3


def test_a_function_imports_what_lies_next_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("early", "late"):
        (tmp_path / f"{name}_helper_for_test.py").write_text(f"WORD = {name!r}")
    lines = ["from early_helper_for_test import WORD", "def documents():", "    import late_helper_for_test as late"]
    (tmp_path / "own_data_for_test.py").write_text("\n".join([*lines, "    return WORD, late.WORD"]))
    assert load_function(f"{tmp_path}/own_data_for_test.py:documents", "dataset")() == ("early", "late")
    with pytest.raises(UserError, match=r"dataset ':x': .*Give module:function"):
        load_function(":x", "dataset")


def test_a_function_may_look_for_modules_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "lazy_helper_for_test.py").write_text("WORD = 'lazy'")
    lines = ["import sys", f"sys.path.insert(0, {str(tmp_path / 'lib')!r})", "def documents():"]
    lines += ["    import lazy_helper_for_test", "    return lazy_helper_for_test.WORD"]
    (tmp_path / "searching_for_test.py").write_text("\n".join(lines))
    assert load_function(f"{tmp_path}/searching_for_test.py:documents", "dataset")() == "lazy"
    assert sys.path == [str(tmp_path / "lib"), *before, str(tmp_path)]


def test_a_file_may_be_named_as_a_package_is(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text(FILE)
    assert load_function(f"{tmp_path}/datasets.py:build", "dataset")().width == 3
    assert sys.modules["datasets"] is datasets


@pytest.mark.parametrize(
    "spec",
    [
        "no_such_module_here:build",
        "no_such_file.py:build",
        "json:no_such_function",
        "nothing.at.all:build",
        ".relative:build",
    ],
)
def test_a_function_that_is_not_there_is_refused_in_one_line(spec: str) -> None:
    with pytest.raises(UserError, match=f"dataset '{spec}': .*Give module:function, .* or file.py:function") as caught:
        load_function(spec, "dataset")
    assert "\n" not in str(caught.value)


# With the extra that reads files, as closely as those


def returned(tmp_path: Path, body: str, labelled: bool = False) -> Any:
    """What the readers make of a function with this ``body``."""
    lines = ["import datasets", "from datasets import ClassLabel, Dataset, Features, Value", "def documents(config):"]
    (tmp_path / "given.py").write_text("\n".join([*lines, f"    return {body}"]))
    task = "sequence_classification" if labelled else "causal_lm"
    config = Config().changed(dataset=f"{tmp_path}/given.py:documents", task=task)
    return Extra().documents(config, labelled)


def test_classes_of_a_function_have_their_names(tmp_path: Path) -> None:
    features = "Features({'text': Value('string'), 'label': ClassLabel(names=['ham', 'spam'])})"
    split = f"Dataset.from_dict({{'text': ['a', 'b'], 'label': [1, 0]}}, features={features})"
    found = returned(tmp_path, f"{{'train': {split}, 'validation': {split}}}", labelled=True)
    assert (found.train["label"][:], found.validation["label"][:]) == (["spam", "ham"], ["spam", "ham"])
    assert found.train["text"][:] == ["a", "b"] and found.notes == ()


def test_empty_documents_of_a_function_are_skipped_and_counted(tmp_path: Path) -> None:
    split = "Dataset.from_dict({'text': ['a', '', 'b', ' \\n'], 'extra': [1, 2, 3, 4]})"
    found = returned(tmp_path, f"{{'train': {split}, 'validation': {split}}}")
    assert found.train["text"][:] == ["a", "b"] and found.train["extra"][:] == [1, 3]
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
    for found in (corpus_of(stored, config, True), returned(tmp_path, body, labelled=True)):
        assert (len(found.train), len(found.validation)) == (19, 1)
        assert sorted([*found.train["text"][:], *found.validation["text"][:]]) == sorted(texts)
        assert set(found.train["label"]) == {0, 1}


def test_a_transform_is_not_dropped_without_a_word(tmp_path: Path) -> None:
    body = "Dataset.from_dict({'text': ['a', 'b']}).with_transform(lambda rows: {'text': ['A'] * len(rows['text'])})"
    with pytest.raises(UserError, match=r"the train split has a transform, which is not applied: use map\(\)"):
        returned(tmp_path, body)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{'text': ['a', None]}", "the train split, row 1: no text. Correct it"),
        ("{'text': [1, 2]}", "the train split: column 'text' holds int64; each row needs text"),
        ("{'text': ['a', 'b'], 'label': ['x', None]}", "the train split, row 1: no label. Correct it"),
        ("{'text': ['a', 'b'], 'label': [0.5, 1.0]}", "column 'label' holds float64; each row needs text or a whole"),
        ("{'text': ['a', 'b'], 'label': [[1], [2]]}", "column 'label' holds list; each row needs text or a whole"),
    ],
)
def test_a_row_of_a_function_that_cannot_be_used_is_named(columns: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        returned(tmp_path, f"Dataset.from_dict({columns})", labelled="label" in columns)


def test_splits_of_a_function_have_known_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="returned a split 'dev': use train, validation, test"):
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
        Extra.check(config, Launch())
    Extra.check(Config().changed(dataset="my_data:documents", on_bad_record="skip"), Launch())
