"""Source files of the standard library by package."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from train.config import Config, Data
from train.records import UserError


@pytest.fixture
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    return load_recipe("stdlib_packages")


@pytest.fixture
def library(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library instead of this Python's."""
    monkeypatch.setattr(recipe.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def load(recipe: ModuleType, **options: float) -> dict[str, Any]:
    return recipe.documents(Config(data=Data(**options)))  # type: ignore


def test_a_python_without_its_library(recipe: ModuleType, library: Path) -> None:
    with pytest.raises(UserError, match="not enough source files"):
        load(recipe)


def test_packages_have_both_splits_and_nothing_that_gives_the_place_away(recipe: ModuleType) -> None:
    splits = load(recipe, validation_fraction=0.1)
    train, validation = Counter(splits["train"]["label"]), Counter(splits["validation"]["label"])
    assert len(train) >= 4  # distributions of Python part with some of them, and newer ones have fewer
    assert train.keys() == validation.keys() <= recipe.PACKAGES.keys()
    for label in train:
        total = train[label] + validation[label]
        assert total >= recipe.FEWEST_FILES
        assert validation[label] == max(1, round(total * 0.1))
    texts = splits["train"]["text"][:] + splits["validation"]["text"][:]
    assert len(set(texts)) == len(texts)
    for document in splits["train"]:
        assert not document["text"].startswith(("#", "\n"))
        assert document["source"] not in document["text"]
    assert splits["train"].column_names == ["text", "label", "source"]
    assert load(recipe, validation_fraction=0.1)["train"]._fingerprint == splits["train"]._fingerprint


def test_tests_belong_to_their_package_and_small_classes_are_left_out(
    library: Path, recipe: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    body = "x = 'long enough to say something'\n" * 10
    files = {f"json/m{i}.py": f"#!python\n# -*- coding -*-\n\nn = {i}\n{body}" for i in range(15)}
    files |= {f"test/test_json/t{i}.py": f"import test.t{i}\n# test/test_json/t{i}.py\n{body}" for i in range(15)}
    files |= {f"email/m{i}.py": f"e = {i}\n{body}" for i in range(25)}
    files |= {f"xml/m{i}.py": f"x = {i}\n{body}" for i in range(5)}
    files |= {"email/copy.py": f"e = 1\n{body}", "email/__init__.py": "short"}
    for name, content in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(content)
    caplog.set_level(logging.INFO)
    splits = load(recipe)
    documents = {d["source"]: d for split in (splits["train"], splits["validation"]) for d in split}
    assert Counter(d["label"] for d in documents.values()) == {"json": 30, "email": 25}
    assert documents["json/m3.py"]["text"] == f"n = 3\n{body}"
    assert documents["test/test_json/t3.py"]["text"] == f"import test.t3\n{body}"
    left_out, counts = (record.getMessage() for record in caplog.records if record.name == recipe.__name__)
    assert counts == "stdlib_packages: 55 files in 2 classes (email 25, json 30)"
    assert "too few files on this Python for asyncio" in left_out
