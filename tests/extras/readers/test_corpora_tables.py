"""Datasets by name. A local folder stands in for the Hub: ``load_dataset`` takes either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import datasets.exceptions
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.extras.readers import Source
from train.extras.readers.corpus import load_corpus
from train.records import UserError


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that answers for the dataset ``user/name``."""
    folder = tmp_path / "repository"
    folder.mkdir()
    load_dataset, get_names = datasets.load_dataset, datasets.get_dataset_split_names

    def loaded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name == "user/name"
        assert not kwargs.get("trust_remote_code")
        return load_dataset(str(folder), *args, **kwargs)

    def split_names(name: str, *args: Any, **kwargs: Any) -> list[str]:
        assert name == "user/name"
        return get_names(str(folder), *args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    monkeypatch.setattr(datasets, "get_dataset_split_names", split_names)
    return folder


def write(folder: Path, split: str, records: list[dict[str, Any]]) -> None:
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def load(labelled: bool = False, dataset: str = "user/name", **options: Any) -> Any:
    return load_corpus(Source(dataset=dataset, labelled=labelled, **options))


def message(labelled: bool = False, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        load(labelled, **options)
    assert raised.value.__cause__ is None
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_splits_columns_and_rows(named: Path) -> None:
    write(named, "train", [{"body": f"t{i}", "y": f"c{i % 2}", "id": i} for i in range(4)])
    write(named, "validation", [{"body": "v", "y": "c0", "id": 9}])
    write(named, "test", [{"body": "z", "y": "c1", "id": 10}])
    corpus = load(True, text_column="body", label_column="y")
    assert corpus.splits["train"][1] == {"text": "t1", "label": "c1"}
    assert corpus.splits["validation"][:] == {"text": ["v"], "label": ["c0"]}
    assert corpus.splits["test"]["text"][:] == ["z"]
    assert corpus.name == "user/name"
    assert load(text_column="body").splits["train"].column_names == ["text"]


def test_a_second_call_is_known_as_the_same_and_nothing_is_copied(named: Path) -> None:
    write(named, "train", [{"text": f"t{i}"} for i in range(4)])
    first, second = load(), load()
    assert first.splits["train"]._fingerprint == second.splits["train"]._fingerprint
    assert not list(Path(datasets.config.HF_DATASETS_CACHE).rglob("rows-*"))


def test_without_a_validation_split_some_is_held_out(named: Path) -> None:
    write(named, "train", [{"text": f"t{i:02}"} for i in range(40)])
    corpus = load(max_train_samples=5)
    assert [len(corpus.splits["train"]), len(corpus.splits["validation"])] == [5, 2]
    assert set(corpus.splits["train"]["text"]).isdisjoint(corpus.splits["validation"]["text"])
    sliced = load(dataset_split="train[:10]", validation_split="train[10:13]")
    assert sliced.splits["train"]["text"][:] == [f"t{i:02}" for i in range(10)]
    assert sliced.splits["validation"]["text"][:] == ["t10", "t11", "t12"]


def test_validation_dataset_overrides(named: Path, tmp_path: Path) -> None:
    write(named, "train", [{"text": "t"}])
    write(named, "validation", [{"text": "v"}])
    (tmp_path / "own.txt").write_text("mine")
    assert load(validation_dataset=str(tmp_path / "own.txt")).splits["validation"]["text"][:] == ["mine"]


def saved(folder: Path, **splits: list[str]) -> str:
    """A folder written by ``save_to_disk``."""
    kinds: Any = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    datasets.DatasetDict(kinds).save_to_disk(folder)
    return str(folder)


def test_the_validation_dataset_is_validated_on_in_place_of_the_datas_own_splits(tmp_path: Path) -> None:
    own = saved(tmp_path / "own", train=["t"], dev=[" "], test=["z"])
    other = saved(tmp_path / "other", train=["no"], dev=["d"], blind=["b"])
    found = load(dataset=own, validation_dataset=other, on_empty_document="error")
    assert {name: split["text"][:] for name, split in found.splits.items()} == {
        "train": ["t"],
        "validation": ["d"],
        "test": ["z"],
    }
    assert found.notes == (f"{own}: splits that are not used: dev",)
    found = load(dataset=own, validation_dataset=other, validation_split="blind")
    assert found.splits["validation"]["text"][:] == ["b"]


def test_classes_become_names_and_hidden_ones_are_bad(named: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    train = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"], "label": [0, 1, -1, 1]}, features=features)
    train.to_parquet(named / "train.parquet")
    assert "user/name[train], row 2: no label. Correct it" in message(True)
    corpus = load(True, on_bad_record="skip")
    assert {d["label"] for split in (corpus.splits["train"], corpus.splits["validation"]) for d in split} == {
        "no",
        "yes",
    }
    assert corpus.classes == ("no", "yes")


def test_classes_are_those_that_are_trained_on(tmp_path: Path) -> None:
    """Names of validation data alone would become outputs that nothing trains."""
    for name, classes in ("own", ["neg", "pos"]), ("other", ["negative", "positive"]):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=classes)})
        rows = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
        rows.save_to_disk(tmp_path / name)
    data = Source(dataset=str(tmp_path / "own"), validation_dataset=str(tmp_path / "other"), labelled=True)
    assert load_corpus(data).classes == ("neg", "pos")


def test_numbers_of_one_split_are_the_classes_of_another(tmp_path: Path) -> None:
    rows = {"train": [0.5, 1.0, 1.5, 2.0], "validation": [1.0, 2.0], "test": [float("nan"), 2.0]}
    splits: Any = {n: datasets.Dataset.from_dict({"text": [*"abcd"][: len(v)], "label": v}) for n, v in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "own")
    corpus = load(True, dataset=str(tmp_path / "own"), on_bad_record="skip")
    assert {name: split["label"][:] for name, split in corpus.splits.items()} == {
        "train": ["0.5", "1", "1.5", "2"],
        "validation": ["1", "2"],
        "test": ["2"],
    }


def test_a_blank_label_is_none(tmp_path: Path) -> None:
    rows = {"text": ["a", "b", "c", " "], "label": ["x", " ", "", "y"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "own")
    with pytest.raises(UserError, match="row 1: no label"):
        load(True, dataset=str(tmp_path / "own"))
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "held")
    corpus = load(True, dataset=str(tmp_path / "own"), on_bad_record="skip", validation_dataset=str(tmp_path / "held"))
    assert corpus.splits["train"]["label"][:] == ["x"]
    assert any("skipped 2 bad records" in note for note in corpus.notes)
    assert any("skipped 1 empty document" in note for note in corpus.notes)


@pytest.mark.parametrize(
    ("labels", "classes"), [([True, False], {"1", "0"}), ([1.0, 0.0], {"1", "0"}), ([0.5, 1.0], {"0.5", "1"})]
)
def test_numbers_and_truth_are_the_classes_that_they_are_in_files(
    labels: list[Any], classes: set[str], tmp_path: Path
) -> None:
    datasets.Dataset.from_dict({"text": list("abcd"), "label": labels * 2}).save_to_disk(tmp_path / "own")
    corpus = load(True, dataset=str(tmp_path / "own"), validation_fraction=0.0)
    assert {str(label) for label in corpus.splits["train"]["label"]} == classes


def test_bad_and_empty_records(named: Path) -> None:
    table = pa.table({"text": ["a", None, " ", "d", "e"], "label": [1, 2, 3, 1, 5]})
    pq.write_table(table, named / "train.parquet")
    assert "user/name[train], row 1: no text. Correct it" in message(True)
    corpus = load(True, on_bad_record="skip")
    assert corpus.notes[:2] == (
        "skipped 1 bad record of user/name[train], the first user/name[train], row 1: no text",
        "skipped 1 empty document of user/name[train], the first user/name[train], row 2: empty document",
    )


def test_missing_columns_and_splits(named: Path) -> None:
    write(named, "train", [{"body": "a", "y": 1}])
    assert "no column 'text'; the columns are body, y" in message()
    assert "no column 'label'" in message(True, text_column="body")
    assert "Unknown split \"trian\". Should be one of ['train']" in message(dataset_split="trian")
    assert 'Unknown split "dev"' in message(validation_split="dev")


def test_a_missing_configuration(named: Path) -> None:
    write(named, "train", [{"text": "a"}])
    assert "BuilderConfig 'nope' not found. Available: ['default']" in message(dataset_config="nope")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (datasets.exceptions.DatasetNotFoundError("Dataset 'user/name' doesn't exist"), "doesn't exist. A local file"),
        (
            ConnectionError("Couldn't reach 'user/name'\non the Hub"),
            "Couldn't reach 'user/name' on the Hub. A local file",
        ),
        (datasets.exceptions.DatasetNotFoundError("Dataset is a gated dataset"), "hf auth login"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts are no longer supported"),
        (KeyError("splits"), "'splits'"),
        (OSError(f"403 for https://x/y?sig=abc with hf_{'a' * 30}"), "https://x/y?sig=… with hf_…. A local file"),
    ],
)
def test_whatever_the_hub_says_is_one_message(monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    said = message()
    assert said.startswith("the dataset 'user/name' on the Hub: ")
    assert expected in said


def test_offline_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Offline mode is enabled.")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    assert "HF_HUB_OFFLINE is set: unset it" in message()


@pytest.mark.parametrize("name", ["two words", "user/na:me", "?"])
def test_a_name_that_cannot_be_on_the_hub(name: str) -> None:
    assert "not a name on the Hub" in message(dataset=name)


@pytest.mark.parametrize("kind", ["torch", "numpy", "arrow", "pandas"])
def test_the_format_that_a_dataset_was_saved_with_does_not_change_it(kind: str, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": list("abcdef"), "label": [0, 5, 7] * 2, "more": [[1.0]] * 6})
    table.with_format(kind).save_to_disk(tmp_path / "own")
    corpus = load(True, dataset=str(tmp_path / "own"))
    rows = sorted((row["text"], row["label"]) for split in corpus.splits.values() for row in split)
    assert rows == list(zip("abcdef", [0, 5, 7] * 2, strict=True))


def test_nul_bytes_and_one_column_for_both_are_refused(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": ["a", "b\0c"], "label": ["x", "y"]})
    table.save_to_disk(tmp_path / "own")
    assert "own[train], row 1: a NUL byte in its text" in message(dataset=str(tmp_path / "own"))
    said = message(True, dataset=str(tmp_path / "own"), label_column="text")
    assert said == "--label_column text: it is also --text_column. Give another."
