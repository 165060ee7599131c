"""The standard library as text."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from train.extras.readers import Source, corpus
from train.extras.readers.corpus import load_corpus
from train.records import UserError

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library instead of this Python's."""
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    return tmp_path


def write(library: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def load(dataset: str, labelled: bool = False, **options: Any) -> Any:
    return load_corpus(Source(dataset=dataset, labelled=labelled, **options))


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
    sources = corpus.splits["train"]["source"][:] + corpus.splits["validation"]["source"][:]
    assert sorted(sources) == ["a.txt", "pkg/b.rst", "pkg/c.html", "pkg/copy.py"]
    assert corpus.splits["train"]["source"][:] == sorted(corpus.splits["train"]["source"][:])
    assert len(corpus.splits["validation"]) == 1
    assert corpus.notes[0].startswith("stdlib: 4 of 7 files of Python 3.")


def test_this_pythons_library() -> None:
    first, second = load("stdlib", max_train_samples=200), load("stdlib", max_train_samples=200)
    assert first.splits["train"]["text"][:] == second.splits["train"]["text"][:]
    assert first.splits["validation"]["source"][:] == second.splits["validation"]["source"][:]
    assert set(first.splits["validation"]["text"]).isdisjoint(first.splits["train"]["text"])
    document = first.splits["train"][3]
    assert document["text"] == (LIBRARY / document["source"]).read_text(encoding="utf-8")


def test_no_labels_and_no_library(library: Path) -> None:
    with pytest.raises(UserError, match=r"--dataset recipes/stdlib_packages\.py:documents"):
        load("stdlib", labelled=True)
    with pytest.raises(UserError, match="holds no source files"):
        load("stdlib")
