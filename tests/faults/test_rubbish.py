"""Whole runs on data that something is wrong with: an error with file and line, or a count, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults.processes import Ended, run
from support import write_recipe

from train.records import EXIT_DONE, EXIT_ERROR

GOOD = [json.dumps({"text": f"document {n}: " + "abc def " * (n % 7), "label": n % 3}).encode() for n in range(25)]
CLASSIFY = ("--task", "sequence_classification")
BAD: dict[str, tuple[bytes, tuple[Any, ...], str]] = {
    "broken JSON": (b'{"text": "a', (), ":4"),
    "another encoding": (b'{"text": "caf\xe9"}', (), ":4"),
    "NUL bytes": (b"\0" * 100, (), ":4"),
    "half a character": (b'{"text": "\\ud800"}', (), ":4"),
    "no text": (b'{"title": "x"}', (), ":4"),
    "text that is a number": (b'{"text": 3}', (), ":4"),
    "twice the same key": (b'{"text": "a", "text": 5}', (), ":4"),
    "no label": (b'{"text": "a"}', CLASSIFY, ":4"),
    "a label that is a list": (b'{"text": "a", "label": [1]}', CLASSIFY, ":4"),
}
"""A fourth line, flags, and where the message says that it is."""


def train(folder: Path, lines: list[bytes], *flags: Any, name: str = "data.jsonl") -> Ended:
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    its = ("--config", write_recipe(folder), "--output_dir", folder / "run", "--dataset", folder / name, *flags)
    [end] = run(its, folder / "logs")
    assert "Traceback" not in end.said, end.said
    return end


QUICK = ("broken JSON", "a label that is a list")


@pytest.mark.parametrize("what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in BAD])
def test_bad_record_is_an_error_or_is_skipped_and_counted(tmp_path: Path, what: str) -> None:
    line, flags, where = BAD[what]
    lines = [*GOOD[:3], line, *GOOD[3:]]
    end = train(tmp_path, lines, *flags)
    assert end.status == EXIT_ERROR
    assert f"data.jsonl{where}" in end.said, end.said
    end = train(tmp_path, lines, *flags, "--on_bad_record", "skip")
    assert end.status == EXIT_DONE, end.said
    notes = json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]
    assert any("skipped" in note and f"data.jsonl{where}" in note for note in notes), notes


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("data.csv", "text,text\na,b\n", "text"),
        ("data.csv", "title\na\nb\n", "text"),
        ("data.jsonl", "", "data.jsonl"),
        ("data.jsonl", '{"text": ""}\n' * 30, "data.jsonl"),
        ("data.json", "{}", "data.json"),
        ("data.parquet", "PAR1 and nothing else", "data.parquet"),
        ("data.txt", "", "data.txt"),
    ],
)
def test_file_without_anything_to_learn(tmp_path: Path, name: str, content: str, words: str) -> None:
    end = train(tmp_path, [content.encode()], name=name)
    assert end.status == EXIT_ERROR
    assert words in end.said.rpartition("error:")[2], end.said


def test_empty_and_blank_documents_are_counted(tmp_path: Path) -> None:
    end = train(tmp_path, [*GOOD, b'{"text": ""}', b'{"text": " \\n\\t"}'], "--on_bad_record", "skip")
    assert end.status == EXIT_DONE, end.said
    assert "2" in end.said and "empty" in end.said


@pytest.mark.slow
def test_document_of_100_megabytes(tmp_path: Path) -> None:
    long = json.dumps({"text": "all of it " * 10_000_000}).encode()
    flags = ("--num_epochs", "None", "--max_steps", 2, "--max_length", 1024, "--max_eval_samples", 4)
    end = train(tmp_path, [*GOOD, long], *flags)
    assert end.status == EXIT_DONE, end.said
