"""Digests of examples: what is the same data to a run that resumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from train.extras.cache import code_digest, examples_digest

ROWS: list[dict[str, Any]] = [
    {"tokens": [1, 2, 3], "label": 0, "members": [[1], [2, 3]]},
    {"tokens": [4], "label": 1, "members": [[4]]},
    {"tokens": [5, 6], "label": 0, "members": [[5, 6]]},
]
OTHER_ROWS = {
    "a value": [{**ROWS[0], "tokens": [1, 2, 4]}, *ROWS[1:]],
    "another column": [{**ROWS[0], "label": 1}, *ROWS[1:]],
    "where examples end": [{**ROWS[0], "tokens": [1, 2]}, {**ROWS[1], "tokens": [3, 4]}, ROWS[2]],
    "where inner lists end": [{**ROWS[0], "members": [[1, 2], [3]]}, *ROWS[1:]],
    "order": [ROWS[1], ROWS[0], ROWS[2]],
    "one less": ROWS[:2],
    "one more": [*ROWS, ROWS[0]],
    "name of a column": [{("ids" if name == "tokens" else name): row[name] for name in row} for row in ROWS],
}


def on_disk(rows: list[dict[str, Any]], folder: Path) -> datasets.Dataset:
    """``rows`` as a data set with a cache of its own."""

    def generate() -> Iterator[dict[str, Any]]:
        yield from rows

    found = datasets.Dataset.from_generator(generate, cache_dir=str(folder))
    assert isinstance(found, datasets.Dataset)
    return found


@pytest.mark.parametrize("change", OTHER_ROWS)
def test_any_change_gives_another_digest(change: str) -> None:
    same = examples_digest(datasets.Dataset.from_list([dict(row) for row in ROWS]))
    assert same == examples_digest(datasets.Dataset.from_list(ROWS))
    assert examples_digest(datasets.Dataset.from_list(OTHER_ROWS[change])) != same


@pytest.mark.parametrize(
    "kind", [datasets.List(datasets.Value("int64"), length=2000), datasets.LargeList(datasets.Value("int64"))]
)
def test_one_token_among_thousands_counts_in_lists_of_any_kind(kind: Any) -> None:
    def digest(middle: int) -> str:
        tokens, features = [*range(1000), middle, *range(1001, 2000)], datasets.Features({"tokens": kind})
        return examples_digest(datasets.Dataset.from_dict({"tokens": [tokens]}, features=features))

    assert digest(1000) != digest(7)


def test_lists_that_are_missing_count() -> None:
    found = [examples_digest(datasets.Dataset.from_list([{"ids": [1]}, {"ids": ids}])) for ids in (None, [], [2])]
    assert len({found[0], found[2]}) == len({found[1], found[2]}) == 2


def test_code_is_told_apart_by_its_files_and_what_has_none_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = tmp_path / "told_apart.py", set[str]()
    monkeypatch.setitem(sys.modules, "told_apart", SimpleNamespace(__file__=str(path)))
    for code in ("1", "2"):
        path.write_text(code)
        found |= {code_digest("told_apart"), code_digest(str(path))}
    assert len(found) == 2  # by name as by path
    assert code_digest("no file") != code_digest("another")


def test_place_pieces_and_selection_do_not_matter(tmp_path: Path) -> None:
    rows = [{"tokens": list(range(number % 5 + 1))} for number in range(200)]  # more than are read at once
    whole = datasets.Dataset.from_list(rows)
    digest = examples_digest(whole)
    pieces = datasets.concatenate_datasets([datasets.Dataset.from_list(rows[:7]), datasets.Dataset.from_list(rows[7:])])
    assert examples_digest(pieces) == digest
    backwards = datasets.Dataset.from_list(rows[::-1])
    assert examples_digest(backwards) != digest
    assert examples_digest(backwards.select(range(199, -1, -1))) == digest
    assert examples_digest(on_disk(rows, tmp_path / "a")) == examples_digest(on_disk(rows, tmp_path / "b")) == digest
