"""The standard library as text."""

from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from train.config import Data
from train.errors import UserError
from train.extras.readers import stdlib
from train.extras.readers.corpus import load_corpus

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library instead of this Python's."""
    monkeypatch.setattr(stdlib.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def write(library: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def load(dataset: str, labelled: bool = False, **options: Any) -> Any:
    return load_corpus(Data(dataset=dataset, **options), labelled)


def test_which_files_are_read(library: Path) -> None:
    write(
        library,
        {
            "z.py": "z = 1",
            "a.txt": "a text",
            "pkg/b.rst": "b",
            "pkg/c.html": "<c>",
            "pkg/copy.py": "z = 1",
            "pkg/data.bin": "x",
            "pkg/empty.py": " \n",
            "test/latin.py": b"# \xe4",
            "site-packages/other.py": "other",
            "pkg/__pycache__/c.py": "cached",
        },
    )
    corpus = load("stdlib", validation_fraction=0.25)
    sources = corpus.train["source"][:] + corpus.validation["source"][:]
    assert sorted(sources) == ["a.txt", "pkg/b.rst", "pkg/c.html", "pkg/copy.py"]
    assert corpus.train["source"][:] == sorted(corpus.train["source"][:])
    assert len(corpus.validation) == 1
    assert corpus.notes[0].startswith("stdlib: 4 of 7 files, 0.0 MB")


def test_this_pythons_library() -> None:
    first, second = load("stdlib", max_train_samples=200), load("stdlib", max_train_samples=200)
    assert first.train["text"][:] == second.train["text"][:]
    assert first.validation["source"][:] == second.validation["source"][:]
    assert set(first.validation["text"]).isdisjoint(first.train["text"])
    document = first.train[3]
    assert document["text"] == (LIBRARY / document["source"]).read_text(encoding="utf-8")


def test_no_labels_and_no_library(library: Path) -> None:
    with pytest.raises(UserError, match="--dataset stdlib_packages"):
        load("stdlib", labelled=True)
    with pytest.raises(UserError, match="holds no source files"):
        load("stdlib")
    with pytest.raises(UserError, match="not enough source files"):
        load("stdlib_packages", labelled=True)


def test_packages_have_both_splits_and_nothing_that_gives_the_place_away() -> None:
    corpus = load("stdlib_packages", labelled=True, validation_fraction=0.1)
    train, validation = Counter(corpus.train["label"]), Counter(corpus.validation["label"])
    assert len(train) >= 4  # distributions of Python part with some of them, and newer ones have fewer
    assert train.keys() == validation.keys() <= stdlib.PACKAGES.keys()
    for label in train:
        total = train[label] + validation[label]
        assert total >= stdlib.FEWEST_FILES
        assert validation[label] == max(1, round(total * 0.1))
    texts = corpus.train["text"][:] + corpus.validation["text"][:]
    assert len(set(texts)) == len(texts)
    for document in corpus.train:
        assert not document["text"].startswith(("#", "\n"))
        assert document["source"] not in document["text"]
    assert load("stdlib_packages").train.column_names == ["text", "source"]


def test_tests_belong_to_their_package_and_small_classes_are_left_out(library: Path) -> None:
    body = "x = 'long enough to say something'\n" * 10
    files: dict[str, str | bytes] = {
        f"json/m{i}.py": f"#!python\n# -*- coding -*-\n\nn = {i}\n{body}" for i in range(15)
    }
    files |= {f"test/test_json/t{i}.py": f"import test.t{i}\n# test/test_json/t{i}.py\n{body}" for i in range(15)}
    files |= {f"email/m{i}.py": f"e = {i}\n{body}" for i in range(25)}
    files |= {f"xml/m{i}.py": f"x = {i}\n{body}" for i in range(5)}
    files |= {"email/copy.py": f"e = 1\n{body}", "email/__init__.py": "short"}
    write(library, files)
    corpus = load("stdlib_packages", labelled=True)
    documents = {d["source"]: d for split in (corpus.train, corpus.validation) for d in split}
    assert Counter(d["label"] for d in documents.values()) == {"json": 30, "email": 25}
    assert documents["json/m3.py"]["text"] == f"n = 3\n{body}"
    assert documents["test/test_json/t3.py"]["text"] == f"import test.t3\n{body}"
    assert corpus.notes[0] == "stdlib_packages: 55 files in 2 classes (email 25, json 30)"
    assert "too few files on this Python for asyncio" in corpus.notes[1]
