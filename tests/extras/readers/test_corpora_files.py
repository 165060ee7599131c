"""Local files and folders, through load_corpus."""

from __future__ import annotations

import codecs
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import config
from filelock import FileLock

from train.config import check, from_values
from train.extras.cache import ROWS_AT_ONCE, intact
from train.extras.readers import Source, readers
from train.extras.readers.corpus import load_corpus
from train.records import UsageError, UserError

Write = Callable[..., str]


def load(path: str | Path, labelled: bool = False, **options: Any) -> Any:
    return load_corpus(Source(dataset=str(path), labelled=labelled, **options))


def all_documents(corpus: Any) -> dict[str, dict[str, Any]]:
    """Every document of training and validation by its source, without the folder."""
    return {Path(d["source"]).name: d for split in (corpus.splits["train"], corpus.splits["validation"]) for d in split}


def texts(corpus: Any) -> set[str]:
    return {*corpus.splits["train"]["text"], *corpus.splits["validation"]["text"]}


def message(path: str | Path, labelled: bool = False, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        load(path, labelled, **options)
    assert raised.value.__cause__ is None
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Formats


def test_jsonl_gives_text_label_and_line(jsonl: Write) -> None:
    path = jsonl({"text": "eins", "label": "a", "x": 1}, "", {"text": "zwei\nü", "label": "a"})
    corpus = load(path, labelled=True)
    assert (
        corpus.splits["train"].column_names == corpus.splits["validation"].column_names == ["text", "label", "source"]
    )
    assert all_documents(corpus) == {
        "data.jsonl:1": {"text": "eins", "label": "a", "source": f"{path}:1"},
        "data.jsonl:3": {"text": "zwei\nü", "label": "a", "source": f"{path}:3"},
    }
    assert corpus.name == path
    assert "test" not in corpus.splits


def test_without_labels_there_is_no_label_column(jsonl: Write) -> None:
    corpus = load(jsonl({"text": "a"}, {"text": "b"}, name="d.ndjson"))
    assert corpus.splits["train"].column_names == ["text", "source"]
    assert texts(corpus) == {"a", "b"}


def test_column_names_are_chosen(jsonl: Write) -> None:
    corpus = load(jsonl({"t": "a", "y": 3}, {"t": "b", "y": 3}), True, text_column="t", label_column="y")
    assert {(d["text"], d["label"]) for d in all_documents(corpus).values()} == {("a", "3"), ("b", "3")}


@pytest.mark.parametrize(
    ("content", "sources"),
    [
        ('[\n {"text": "a"},\n\n {"text":\n "b"}]\n', {"d.json:[0]", "d.json:[1]"}),
        ('{"text": "a"}\n{"text": "b"}\n', {"d.json:1", "d.json:2"}),
        ('\ufeff[{"text": "a"},\n{"text": "b"}]', {"d.json:[0]", "d.json:[1]"}),
    ],
)
def test_json_as_list_or_lines(tmp_path: Path, content: str, sources: set[str]) -> None:
    (tmp_path / "d.json").write_text(content, encoding="utf-8")
    corpus = load(tmp_path / "d.json")
    assert texts(corpus) == {"a", "b"}
    assert set(all_documents(corpus)) == sources


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"text": "x"},\n{"text": ]', "d.json: not JSON (Expecting value: line 2"),
        ('[{"text": "x"} {"text": "y"}]', "d.json: not JSON"),
        ('[{"text": "x"}] trailing', "d.json: not JSON"),
        ('[{"text": "x"}, {"text": 5}]', "d.json:[1]: 'text' must be text, not 5"),
        ('["x", "y"]', "not a JSON object but str"),
        ('{"rows": [{"text": "x"}]}', "d.json:1: no column 'text'; the columns are rows"),
        ("nonsense", "not JSON"),
    ],
)
def test_json_that_is_none_of_these(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "d.json").write_text(content)
    assert reason in message(tmp_path / "d.json")


def test_lines_before_the_first_object_are_bad_records_each(jsonl: Write) -> None:
    corpus = load(jsonl("oops", "oops", {"text": "a"}, {"text": "b"}), on_bad_record="skip")
    assert texts(corpus) == {"a", "b"} and "skipped 2 bad records" in corpus.notes[0]


def test_csv_with_quotes_newlines_and_bom(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes('\ufefftext,label\r\n"one, ""two""\r\nthree",7\r\nfour,7\r\n'.encode())
    corpus = load(path, labelled=True)
    assert {source: (d["text"], d["label"]) for source, d in all_documents(corpus).items()} == {
        "d.csv:2": ('one, "two"\r\nthree', "7"),
        "d.csv:4": ("four", "7"),
    }


LINES = {"hello, you": "a", "h; i": "b", "cafe": "a", "y": "b"}


@pytest.mark.parametrize("above", ["", "\n"])
@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_csv_is_divided_where_its_header_names_the_columns(tmp_path: Path, delimiter: str, above: str) -> None:
    rows = [("label", "text"), *((label, f'"{text}"') for text, label in LINES.items())]
    (tmp_path / "data.csv").write_text(above + "".join(delimiter.join(row) + "\n" for row in rows))
    found = all_documents(load(tmp_path / "data.csv", labelled=True))
    assert {d["text"]: d["label"] for d in found.values()} == LINES


def test_the_columns_of_a_csv_without_the_one_that_is_wanted_are_told(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('review;stars\n"it was, in all, ""good""";5\n')
    for columns in ({}, {"text_column": "review"}):
        with pytest.raises(UserError, match=r"no column '(text|label)'; the columns are review, stars"):
            load(tmp_path / "data.csv", labelled=True, **columns)


PRETTY = [
    {"text": "one {with} braces\nand two lines", "label": 1, "meta": {"tags": ["a", {"b": 2}], "more": {}}},
    {"text": "zwei ü }", "label": "1", "meta": None},
    {"text": "drei\u2028{", "label": 2, "meta": [[], [{}]]},
    {"text": "four", "label": 2},
]


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
@pytest.mark.parametrize("indent", [1, 2, "\t"])
@pytest.mark.parametrize("between", ["\n", "\n\n", "\r\n"])
def test_objects_that_run_over_several_lines_are_read(
    tmp_path: Path, name: str, indent: int | str, between: str
) -> None:
    """As ``jq .`` and ``json.dump(…, indent=2)`` in a loop write them: no array, and not one a line."""
    objects = [json.dumps(record, indent=indent, ensure_ascii=False) for record in PRETTY]
    objects[3] = json.dumps(PRETTY[3])  # and one on a line
    (tmp_path / name).write_text(between + between.join(objects) + "\n", encoding="utf-8", newline="")
    found = all_documents(load(tmp_path / name, labelled=True))
    assert {(d["text"], d["label"]) for d in found.values()} == {(str(r["text"]), str(r["label"])) for r in PRETTY}
    lines = (tmp_path / name).read_bytes().splitlines()
    for source, document in found.items():
        begin = int(source.removeprefix(f"{name}:")) - 1
        assert lines[begin].startswith(b"{")
        assert json.dumps(document["text"], ensure_ascii=False).encode() in b"".join(lines[begin : begin + 2])


def test_an_object_over_several_lines_that_is_damaged_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('{\n "text": "a"\n}\n{\n "text": "b",\n "x": \n}\n{\n "text": "c"\n}\n{"text": "d"}\n')
    assert message(path).startswith(f"{path}:4: not JSON (Expecting value: line 4 column 1")
    corpus = load(path, on_bad_record="skip")
    assert texts(corpus) == {"a", "c", "d"}
    assert corpus.notes[0].startswith(f"skipped 1 bad record of {path}, the first {path}:4: not JSON")


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a"}{"text": "b"}\n',
        '{"text": "a"}\n{\n "text": "b"\n}\n',
        '{\n "text": "a"\n},\n{\n "text": "b"\n}\n',
        '  {\n "text": "a"\n  }\n  {\n "text": "b"\n  }\n',
        '{\n"text": "a",\n"meta":\n{\n"b": 1\n}\n}\n',
    ],
)
def test_objects_that_cannot_be_told_apart_are_refused_with_a_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.json").write_text(content)
    said = message(tmp_path / "d.json")
    assert "not JSON" in said and "An object begins at the start of a line; `jq -c . FILE` puts each on one." in said


def test_a_damaged_first_line_costs_no_other(jsonl: Write) -> None:
    corpus = load(jsonl('{"text": "a', {"text": "b"}, {"text": "c"}), on_bad_record="skip")
    assert texts(corpus) == {"b", "c"}
    assert "skipped 1 bad record" in corpus.notes[0]


@pytest.mark.parametrize(
    ("encoding", "name"), [("cp1252", "a.csv"), ("latin-1", "a.jsonl"), ("cp1252", "a.json"), ("latin-1", "a.txt")]
)
def test_another_encoding_is_read_when_it_is_named(tmp_path: Path, encoding: str, name: str) -> None:
    lines = [f'{{"text": "{text}"}}' for text in LINES]
    lines = {"a.csv": ["text", *LINES], "a.json": [f"[{','.join(lines)}]"], "a.txt": list(LINES)}.get(name, lines)
    (tmp_path / name).write_bytes(
        "".join(f"{line.replace('cafe', 'café')}\n" for line in lines).replace(", ", " ").encode(encoding)
    )
    assert texts(load(tmp_path / name, encoding=encoding, sample_by="line")) == {"hello you", "h; i", "café", "y"}
    assert "not UTF-8" in (said := message(tmp_path / name, sample_by="line")) and "--encoding cp1252" in said


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_after_a_byte_order_mark_is_read_whole(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps([{"text": t} for t in LINES], indent=indent).encode()
    )
    assert texts(load(tmp_path / "a.jsonl")) == set(LINES)


def test_a_file_that_says_that_it_is_utf_8_is_read_so_whatever_the_others_are(tmp_path: Path) -> None:
    for name, mark, encoding in ("a.jsonl", b"", "cp1251"), ("b.jsonl", b"\xef\xbb\xbf", "utf-8"):
        text = json.dumps({"text": f"привет {name}"}, ensure_ascii=False)
        (tmp_path / name).write_bytes(mark + text.encode(encoding))
    assert texts(load(tmp_path, encoding="cp1251")) == {"привет a.jsonl", "привет b.jsonl"}


@pytest.mark.parametrize(("encoding", "text"), [("cp932", "①㈱髙～"), ("cp949", "똠방각하"), ("cp1256", "سلام")])
def test_code_pages_of_windows_and_unix(tmp_path: Path, encoding: str, text: str) -> None:
    (tmp_path / "a.csv").write_bytes(f"text\n{text}\n{text}2\n".encode(encoding))
    config = from_values({"encoding": encoding})
    assert texts(load(tmp_path / "a.csv", encoding=config.get("encoding"))) == {text, f"{text}2"}


@pytest.mark.parametrize(("encoding", "bad"), [("utf-8", b"\xff"), ("euc_kr", b"\xff"), ("shift_jis", b"\xfd")])
def test_an_undecodable_csv_costs_only_its_record(tmp_path: Path, encoding: str, bad: bytes) -> None:
    (tmp_path / "d.csv").write_bytes(b"text\na\nx" + bad + b"\nb\n")
    assert "d.csv:3: character 2 of 'text' is unreadable" in message(tmp_path / "d.csv", encoding=encoding)
    assert texts(load(tmp_path / "d.csv", encoding=encoding, on_bad_record="skip")) == {"a", "b"}


def test_quotes_that_are_only_characters_are_read_when_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "glue.tsv").write_text('text\tlabel\n"a said\t1\nb "c"\t0\n"d"\t1\ne"\t0\n')
    assert "--quoting none" in message(tmp_path / "glue.tsv", labelled=True)
    found = load(tmp_path / "glue.tsv", labelled=True, quoting="none")
    assert texts(found) == {'"a said', 'b "c"', '"d"', 'e"'}


def test_a_csv_without_a_header_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{'an article ' * 500},1\nb,0\n")
    assert len(said := message(tmp_path / "a.csv")) < 400 and "first line" in said


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_arrays_on_one_line_and_many(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"text": text} for text in LINES]
    (tmp_path / name).write_text(json.dumps(records, indent=indent))
    assert texts(load(tmp_path / name)) == set(LINES)
    (tmp_path / name).write_text("\n \n" + json.dumps(records, indent=indent))  # blank lines come first
    assert texts(load(tmp_path / name)) == set(LINES)


def test_csv_fields_may_be_larger_than_pythons_limit(tmp_path: Path) -> None:
    (tmp_path / "d.tsv").write_text(f"text\tn\n{'x' * 200_000}\t1\nshort, yes\t2\n")
    assert {len(text) for text in texts(load(tmp_path / "d.tsv"))} == {200_000, 10}


def test_csv_refuses_a_column_named_twice(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,a,text\nx,y,z\n")
    assert message(tmp_path / "d.csv") == f"{tmp_path / 'd.csv'}: the column 'text' appears twice. Rename one."
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "d.parquet")
    assert message(tmp_path / "d.parquet") == f"{tmp_path / 'd.parquet'}: the column 'text' appears twice. Rename one."


@pytest.mark.parametrize(
    ("content", "where", "reason"),
    [
        ("text,label\na,b\nc\n", 3, "wrong number of fields: 1, the header has 2"),
        ("text,label\na,b\nc,d,e\n", 3, "wrong number of fields: 3, the header has 2"),
        ("text,label\na,\n", 2, "'label' must be a number or non-empty text, not ''"),
    ],
)
def test_bad_csv_records(tmp_path: Path, content: str, where: int, reason: str) -> None:
    (tmp_path / "d.csv").write_text(content)
    assert message(tmp_path / "d.csv", True).startswith(f"{tmp_path / 'd.csv'}:{where}: {reason}")


def test_a_bad_byte_in_a_quoted_csv_field_costs_only_its_record(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes(b'text\ngood\n"bad \xff\nline"\nfine\n')
    corpus = load(tmp_path / "d.csv", on_bad_record="skip")
    assert texts(corpus) == {"good", "fine"}
    assert "d.csv:3: character 5 of 'text' is unreadable" in corpus.notes[0]


def test_a_quote_that_is_not_closed_names_the_lines_that_it_costs(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text('text,n\na,1\n"b,2\nc,3\nd "e",4\nf,5\n')
    assert f"{tmp_path / 'q.csv'}:3: not CSV up to line 5 (" in message(tmp_path / "q.csv")
    assert texts(load(tmp_path / "q.csv", on_bad_record="skip")) == {"a", "f"}
    (tmp_path / "q.csv").write_text('text,n\na,1\nb,2\n"c,3\n' + "d,4\n" * 1000)
    with pytest.raises(UserError, match="a quote in line 4 is not closed up to the end"):
        load(tmp_path / "q.csv", on_bad_record="skip")  # else most of the file would be lost as one record


def test_parquet_in_batches(tmp_path: Path) -> None:
    count = ROWS_AT_ONCE * 2 + 5
    table = pa.table(
        {"text": [f"t{i}" for i in range(count)], "label": [i // 2 for i in range(count)], "other": [0.5] * count}
    )
    pq.write_table(table, tmp_path / "d.parquet")
    found = all_documents(load(tmp_path / "d.parquet", labelled=True))
    assert len(found) == count
    assert found["d.parquet:1"]["text"] == "t0"
    assert found[f"d.parquet:{count}"]["label"] == str((count - 1) // 2)


def test_damaged_parquet(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no such thing PAR1")
    assert "d.parquet: cannot be read as Parquet after row 0" in message(tmp_path / "d.parquet")
    raw = pa.array([b"one", b"t\xff", b"three"], pa.binary())
    broken = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": broken}), tmp_path / "d.parquet")
    assert "d.parquet: cannot be read as Parquet after row 0: 'utf-8' codec" in message(tmp_path / "d.parquet")


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a", "b"], "n": [1, 2]}), tmp_path / "d.parquet")
    assert "d.parquet:1: no column 'text'; the columns are body, n" in message(tmp_path / "d.parquet")


def test_text_by_line(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n \r\nthree\r\n")
    found = all_documents(load(tmp_path / "d.txt", sample_by="line"))
    assert {source: d["text"] for source, d in found.items()} == {
        "d.txt:1": "one",
        "d.txt:2": "two",
        "d.txt:5": "three",
    }


def test_text_carries_no_label(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("one")
    assert "d.txt: no column 'label'; the columns are text." in message(tmp_path / "d.txt", labelled=True)


# Bad records


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a", "label": ', "not JSON"),
        ("[1]", "not a JSON object but list"),
        ('{"label": 1, "body": "x"}', "no column 'text'; the columns are label, body"),
        ('{"text": null, "label": 1}', "'text' must be text, not None"),
        ('{"text": 5, "label": 1}', "'text' must be text, not 5"),
        ('{"text": [5], "label": 1}', "'text' must be text, not [5]. A function can read it (docs/forking.md)"),
        ('{"text": "a\\u0000b", "label": 1}', "character 2 of 'text' is unreadable"),
        ('{"text": "a\\ud800b", "label": 1}', "character 2 of 'text' is unreadable"),
        ('{"text": "a", "label": "\\ud800"}', "character 1 of 'label' is unreadable"),
        ('{"text": "a"}', "no column 'label'; the columns are text"),
        ('{"text": "a", "label": null}', "'label' must be a number or non-empty text, not None"),
        ('{"text": "a", "label": -Infinity}', "'label' must be a number or non-empty text, not -inf"),
        ('{"text": "a", "label": NaN}', "'label' must be a number or non-empty text, not nan"),
        ('{"text": "a", "label": [1]}', "'label' must be a number or non-empty text, not [1]"),
    ],
)
def test_a_bad_record_is_refused_or_skipped(jsonl: Write, line: str, reason: str) -> None:
    path = jsonl({"text": "first", "label": 0}, line, {"text": "third", "label": 0})
    refusal = message(path, True)
    assert refusal.startswith(f"{path}:2: {reason}")
    assert refusal.endswith("--on_bad_record skip.")
    corpus = load(path, True, on_bad_record="skip")
    assert texts(corpus) == {"first", "third"}
    assert f"{path}:2" in corpus.notes[0]


def test_bad_bytes_name_line_and_character(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n{"text": "c"}\n')
    assert (
        "d.jsonl:2: character 1 of 'text' is unreadable: NUL, half a surrogate pair, or a byte. If the file"
        in message(tmp_path / "d.jsonl")
    )
    (tmp_path / "d.txt").write_bytes(b"one\ntwo\xff\n")
    assert "d.txt: character 8 of 'text' is unreadable" in message(tmp_path / "d.txt")
    (tmp_path / "n.txt").write_bytes(b"one\0")
    assert "n.txt: character 4 of 'text' is unreadable" in message(tmp_path / "n.txt")


def test_skipped_records_are_counted_with_the_first(jsonl: Write) -> None:
    path = jsonl({"text": "a"}, "{", {"x": 1}, "{", "{", "{", {"text": "b"}, {"text": " "})
    corpus = load(path, on_bad_record="skip")
    assert corpus.notes[0].startswith(f"skipped 5 bad records of {path}, the first {path}:2: not JSON (")
    assert corpus.notes[1] == f"skipped 1 empty document of {path}, the first {path}:8: empty document"


def test_empty_documents(jsonl: Write) -> None:
    path = jsonl({"text": "a"}, {"text": " \n"}, {"text": "b"})
    corpus = load(path)
    assert texts(corpus) == {"a", "b"}
    assert corpus.notes[0] == f"skipped 1 empty document of {path}, the first {path}:2: empty document"
    assert message(path, on_empty_document="error").startswith(f"{path}:2: empty document.")


@pytest.mark.parametrize("on_bad_record", ["error", "skip"])
def test_a_column_that_no_record_has(jsonl: Write, on_bad_record: str) -> None:
    path = jsonl({"body": "a", "y": 1}, {"body": "b", "y": 2})
    assert (
        f"{path}:1: no column 'text'; the columns are body, y. "
        "Give --text_column, --label_column (a CSV file's first line); for text files, chats see docs/data.md."
    ) in message(path, on_bad_record=on_bad_record)
    assert "no column 'label'" in message(path, True, on_bad_record=on_bad_record, text_column="body")


@pytest.mark.parametrize("lines", [(), ("",), ({"text": ""},)])
def test_nothing_to_learn_from(jsonl: Write, lines: tuple[Any, ...]) -> None:
    path = jsonl(*lines)
    assert message(path).startswith(f"{path}: no document to learn from")


# Labels


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2, 2], ["1", "2", "2"]),
        ([True, False, True], ["1", "0", "1"]),
        ([1.0, 2.0, 2], ["1", "2", "2"]),
        ([1.5, 2.0, -0.25], ["1.5", "2", "-0.25"]),
        (["b", "a", "b"], ["b", "a", "b"]),
        (["b", 1, True], ["b", "1", "1"]),
    ],
)
def test_labels_are_of_one_type(jsonl: Write, given: list[Any], expected: list[Any]) -> None:
    corpus = load(jsonl(*({"text": f"t{i}", "label": label} for i, label in enumerate(given))), labelled=True)
    found = {d["text"]: d["label"] for d in all_documents(corpus).values()}
    assert [found[f"t{i}"] for i in range(len(given))] == expected
    assert corpus.splits["train"].features == corpus.splits["validation"].features


# Splits


def test_held_out_documents_are_always_the_same_and_keep_their_order(jsonl: Write) -> None:
    path = jsonl(*({"text": f"t{i:03}"} for i in range(100)))
    first, second = load(path), load(path)
    assert first.splits["validation"]["text"][:] == second.splits["validation"]["text"][:]
    assert len(first.splits["validation"]) == 5
    assert first.splits["train"]["text"][:] == sorted(first.splits["train"]["text"][:])
    assert texts(first) == {f"t{i:03}" for i in range(100)}
    assert first.splits["validation"]["text"][:] != first.splits["train"]["text"][:5]
    assert len(load(path, validation_fraction=0.001).splits["validation"]) == 1
    assert len(load(path, validation_fraction=0.999).splits["train"]) == 1


def test_every_label_keeps_a_record_to_train_on(jsonl: Write) -> None:
    usual = ["a", "b"] * 500
    plain = load(jsonl(*({"text": f"t{i}", "label": "a"} for i in range(1000))))
    held = {int(text[1:]) for text in plain.splits["validation"]["text"][:]}
    path = jsonl(*({"text": f"t{i}", "label": label} for i, label in enumerate(usual)), name="usual.jsonl")
    assert {int(text[1:]) for text in load(path, True).splits["validation"]["text"][:]} == held
    rare = [f"rare {i}" if i in held else label for i, label in enumerate(usual)]
    first, second = sorted(held)[:2]
    rare[first] = rare[second] = "twice"
    path = jsonl(*({"text": f"t{i}", "label": label} for i, label in enumerate(rare)), name="rare.jsonl")
    corpus = load(path, True)
    assert len(corpus.splits["validation"]) == len(held) == 50
    assert set(corpus.splits["train"]["label"]) == set(rare)
    assert set(corpus.splits["validation"]["label"]) == {"a", "b", "twice"}
    assert corpus.splits["validation"]["text"][:] == load(path, True).splits["validation"]["text"][:]
    assert corpus.notes[-1] == "held out 50 of 1,000 documents for validation"


@pytest.mark.parametrize("value", [lambda number: f"{number + 0.5}", lambda number: f"{number}.25e-3"])
def test_values_are_held_out_like_any_document(value: Callable[[int], str], jsonl: Write) -> None:
    """Nothing is learned of a number by its name, so it need not stay in training."""
    plain = load(jsonl(*({"text": f"t{i}", "label": "a"} for i in range(1000))))
    labels = [value(i) if i % 2 else "0" for i in range(1000)]
    path = jsonl(*({"text": f"t{i}", "label": label} for i, label in enumerate(labels)), name="values.jsonl")
    assert load(path, True).splits["validation"]["text"][:] == plain.splits["validation"]["text"][:]


def test_codes_with_a_point_are_classes(jsonl: Write) -> None:
    codes = [f"{number % 12 + 1}.{number % 7 + 1}" if number % 50 else f"{number}.5" for number in range(400)]
    corpus = load(jsonl(*({"text": f"t{i}", "label": code} for i, code in enumerate(codes))), True)
    assert set(corpus.splits["train"]["label"]) == set(codes) and len(corpus.splits["validation"]) == 20


def test_labels_that_all_stand_once_are_refused(jsonl: Write) -> None:
    path = jsonl({"text": "x", "label": "a"}, {"text": "y", "label": "b"})
    assert message(path, True) == (
        f"{path}: each label occurs in one record only, and training needs all of these. Add records, or "
        "--validation_dataset (a function: a validation split); or take another --label_column."
    )


def test_sample_limits_come_after_the_split(jsonl: Write) -> None:
    path = jsonl(*({"text": f"t{i:03}"} for i in range(100)))
    whole, limited = load(path), load(path, max_train_samples=3, max_eval_samples=2)
    texts, held = whole.splits["train"]["text"][:], whole.splits["validation"]["text"][:]
    assert (len(texts), len(held)) == (95, 5)
    assert limited.splits["train"]["text"][:] == [texts[0], texts[31], texts[63]]  # as files may be sorted by label
    assert limited.splits["validation"]["text"][:] == [held[0], held[2]]
    assert load(path, max_train_samples=1000).splits["train"]["text"][:] == texts


def test_one_text_is_cut_at_a_line(tmp_path: Path) -> None:
    content = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "book.txt").write_text(content)
    corpus = load(tmp_path / "book.txt", validation_fraction=0.1)
    (train,), (validation,) = corpus.splits["train"]["text"][:], corpus.splits["validation"]["text"][:]
    assert train + validation == content
    assert train.endswith("\n")
    assert len(train) == pytest.approx(0.9 * len(content), abs=10)
    assert "one document" in corpus.notes[-1]


def test_one_text_without_lines_is_cut_anyway(jsonl: Write) -> None:
    corpus = load(jsonl({"text": "x" * 1000}))
    assert [len(corpus.splits["train"]["text"][0]), len(corpus.splits["validation"]["text"][0])] == [950, 50]


@pytest.mark.parametrize("text", ["Title\n" + "word " * 390, "word " * 200 + "\n" + "word " * 200])
def test_what_is_held_out_of_one_document_is_about_the_share_asked_for(jsonl: Write, text: str) -> None:
    """A break far from the place is not taken."""
    corpus = load(jsonl({"text": text}), validation_fraction=0.05)
    share = len(corpus.splits["validation"]["text"][0]) / len(text)
    assert 0.05 <= round(share, 3) <= 0.1


def test_one_document_among_files_that_are_ignored_tells_of_these(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("x")
    (tmp_path / "lease.txt").write_text("other")
    assert "too short to split or JSON: add text or a validation split. " in (said := message(tmp_path)), said
    assert "ignored 1 other file" in said


def test_documents_to_validate_on_are_not_trained_on(jsonl: Write, tmp_path: Path) -> None:
    """A folder in which they are, among others; files that it names by their splits are apart already."""
    held = jsonl({"text": "v"}, name="own/held.jsonl")
    jsonl({"text": "t"}, name="own/more.jsonl")
    folder = tmp_path / "own"
    said = message(folder, validation_dataset=held)
    assert said == f"--validation_dataset {held}: {held} would be trained on, too. Give other documents."
    assert "would be trained on" in message(held, validation_dataset=held)
    assert "would be trained on" in message(folder, validation_dataset=str(folder))
    # What a folder itself holds out is not validated on where another dataset is given.
    train = Path(jsonl({"text": "t"}, name="linked/train.jsonl"))
    (train.parent / "validation.jsonl").symlink_to(train)
    assert texts(load(train.parent, validation_dataset=jsonl({"text": "v"}, name="other.jsonl"))) == {"t", "v"}
    named = jsonl({"text": "v"}, name="split/validation.jsonl")
    jsonl({"text": "t"}, name="split/train.jsonl")
    for validation in (named, str(tmp_path / "split")):
        corpus = load(tmp_path / "split", validation_dataset=validation)
        assert [corpus.splits[name]["text"][:] for name in ("train", "validation")] == [["t"], ["v"]]


def test_too_little_for_two_splits(jsonl: Write) -> None:
    assert "too short to split or JSON" in message(jsonl({"text": "x"}))
    assert "each label occurs in one record only" in message(jsonl({"text": "x", "label": 1}), labelled=True)


def test_validation_dataset_takes_precedence(jsonl: Write, tmp_path: Path) -> None:
    path = jsonl({"text": "only"})
    other = jsonl({"text": "v1"}, {"text": " "}, {"text": "v2"}, name="other/held.jsonl")
    corpus = load(path, validation_dataset=other)
    assert corpus.splits["train"]["text"][:] == ["only"]
    assert corpus.splits["validation"]["text"][:] == ["v1", "v2"]
    assert corpus.notes == (f"skipped 1 empty document of {other}, the first {other}:2: empty document",)
    assert load(path, validation_dataset=str(Path(other).parent)).splits["validation"]["text"][:] == ["v1", "v2"]
    missing = tmp_path / "gone.jsonl"
    assert message(path, validation_dataset=str(missing)) == f"--validation_dataset {missing}: no such file or folder."


def test_the_text_of_a_text_is_no_column_that_could_be_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert texts(load(tmp_path, text_column="body")) == {"a.txt", "b.txt"}


# Folders


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="links and pipes")
def test_linked_folders_are_read_once_and_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "own", tmp_path / "other"
    for name in ("own/a.txt", "own/sub/b.txt", "other/c.txt", "other/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (folder / "linked").symlink_to(other)
    (other / "back").symlink_to(folder)  # a loop
    (folder / "again").symlink_to(folder / "sub")
    corpus = load(folder)
    assert texts(corpus) == {"own/a.txt", "own/sub/b.txt", "other/c.txt", "other/d.txt"}
    assert all_documents(corpus)["b.txt"]["source"] == str(folder / "sub/b.txt")  # not by the link before it
    (folder / "e.txt").symlink_to(tmp_path / "gone.txt")
    assert message(folder) == f"{folder / 'e.txt'}: No such file or directory."
    (folder / "e.txt").unlink()
    os.mkfifo(tmp_path / "pipe")
    (folder / "p.txt").symlink_to(tmp_path / "pipe")  # which is not waited for
    assert texts(load(folder)) == {"own/a.txt", "own/sub/b.txt", "other/c.txt", "other/d.txt"}

    scan = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("own/sub"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    (folder / "again").unlink()
    assert message(folder) == f"{folder / 'sub'}: Permission denied."


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no such names")
def test_a_name_that_is_not_utf_8_is_shown_with_its_bytes(tmp_path: Path) -> None:
    for name in (b"Vertr\xe4ge.txt", b"b.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_text(name.decode("latin-1"))
    corpus = load(tmp_path)
    assert texts(corpus) == {"Verträge.txt", "b.txt"}
    assert set(all_documents(corpus)) == {r"Vertr\udce4ge.txt", "b.txt"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_known_by_its_mark(encoding: str, tmp_path: Path) -> None:
    """So Windows writes "Unicode", and Excel its text."""
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    rows = {
        "t.txt": "Größe\r\nzwei",
        "t.csv": 'text,label\r\n"Größe\nzwei",a\r\n漢字,b\r\n',
        "t.tsv": "text\tlabel\nGröße\ta\n漢字\tb\n",
        "t.jsonl": '{"text": "Größe"}\n{"text": "漢字"}\n',
    }
    found = {}
    for name, text in rows.items():
        (tmp_path / name).write_bytes(mark + text.encode(encoding))
        found[name] = [record for _, record in readers.read_file(tmp_path / name, ("text", None))]
    assert found["t.txt"] == [{"text": "Größe\nzwei"}]
    assert [row["text"] for row in found["t.csv"]] == ["Größe\nzwei", "漢字"]
    assert [row["text"] for row in found["t.tsv"]] == [row["text"] for row in found["t.jsonl"]] == ["Größe", "漢字"]
    (tmp_path / "t.txt").write_bytes(mark + "ab\ud800c".encode(encoding, "surrogatepass"))
    assert "character 3 of 'text' is unreadable" in message(tmp_path / "t.txt")
    (tmp_path / "t.txt").write_bytes(mark + "abc".encode(encoding) + b"x")
    assert "t.txt:end: unreadable from here on: 'utf-16" in message(tmp_path / "t.txt")


def test_a_folder_of_text_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/x.md", "a.txt", "b/a.rst", "c.py", ".hidden/x.txt", "__pycache__/y.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}")
    corpus = load(tmp_path)
    assert {Path(d["source"]).relative_to(tmp_path).as_posix() for d in all_documents(corpus).values()} == {
        "a.txt",
        "b/a.rst",
        "b/x.md",
        "c.py",
    }
    assert corpus.splits["train"]["source"][:] == sorted(corpus.splits["train"]["source"][:])
    assert corpus.notes[0] == f"{tmp_path}: ignored 1 other file, read 4"


def test_records_win_over_text_and_it_is_said(jsonl: Write, tmp_path: Path) -> None:
    jsonl({"text": "a"}, {"text": "b"}, name="in/d.jsonl")
    (tmp_path / "in" / "README.md").write_text("about")
    (tmp_path / "in" / "e.csv").write_text("text\nc\n")
    corpus = load(tmp_path / "in")
    assert texts(corpus) == {"a", "b", "c"}
    assert corpus.notes[0] == f"{tmp_path / 'in'}: ignored 1 other file, read 2"
    for name in ("a.TXT", "b.md", "c.png"):
        (tmp_path / "in" / name).write_text("more")
    assert (
        load(tmp_path / "in").notes[0]
        == f"{tmp_path / 'in'}: ignored 4 other files (3 of them texts: give a folder of one kind), read 2"
    )


def test_texts_that_name_no_split_are_ignored_next_to_those_that_do(tmp_path: Path) -> None:
    for name in ("train/a.txt", "train/b.txt", "test/c.txt", "notes.txt", "LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert load(tmp_path).notes[0] == f"{tmp_path}: ignored 2 other files, read 3"


def test_a_stray_record_file_among_texts_is_named(jsonl: Write, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.txt").write_text(name)
    stray = jsonl({"text": "x"}, {"text": "y"}, name="in/index.jsonl")
    note = f"{tmp_path / 'in'}: ignored 3 other files (3 of them texts: give a folder of one kind), read 'index.jsonl'"
    assert load(tmp_path / "in").notes[0] == note
    jsonl({"title": "x"}, {"title": "y"}, name="in/index.jsonl")
    said = message(tmp_path / "in")
    assert said.startswith(f"{stray}:1: no column 'text'") and said.endswith(f" {note}.")


@pytest.mark.parametrize("validation", ["validation", "valid", "val", "dev"])
@pytest.mark.parametrize("pattern", ["{}.jsonl", "{}/x.jsonl", "{}-00000-of-00001.jsonl"])
def test_names_at_the_top_are_splits(jsonl: Write, tmp_path: Path, validation: str, pattern: str) -> None:
    for split in ("train", validation, "test"):
        jsonl({"text": split}, name=f"in/{pattern.format(split)}")
    jsonl({"text": "neither"}, name="in/other.jsonl")
    corpus = load(tmp_path / "in")
    assert [
        corpus.splits["train"]["text"][:],
        corpus.splits["validation"]["text"][:],
        corpus.splits["test"]["text"][:],
    ] == [
        ["train"],
        [validation],
        ["test"],
    ]
    assert corpus.notes == (f"{tmp_path / 'in'}: ignored 1 other file, read 3",)


@pytest.mark.parametrize(
    "names",
    [
        ("training.jsonl", "validation.jsonl", "test.jsonl"),
        ("train_data.jsonl", "validation_data.jsonl", "test_data.jsonl"),
        ("my-test-train.jsonl", "my-test-dev.jsonl", "my-test-test.jsonl"),
        ("data/train-00000-of-00001.csv", "data/valid.csv", "data/testing.csv"),
        ("wiki.Train.txt", "wiki.valid.txt", "wiki.test.txt"),
        ("training.txt", "validation.txt", "test.txt"),
    ],
)
def test_split_names_are_words_of_a_file_name(jsonl: Write, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        content = "text" if name.endswith(".csv") else ""
        jsonl(*filter(None, [content]), name if not name.endswith(".jsonl") else {"text": name}, name=f"in/{name}")
    corpus = load(tmp_path / "in")
    splits = (corpus.splits["train"], corpus.splits["validation"], corpus.splits["test"])
    assert [[text.strip() for text in split["text"][:]] for split in splits] == [[name] for name in names]
    assert corpus.notes == ()


def test_files_that_name_no_split_are_for_training_where_none_is(jsonl: Write, tmp_path: Path) -> None:
    for name in ("src/a", "src/b", "test/c", "latest", "development", "retrained", "dev"):
        jsonl({"text": name}, name=f"in/{name}.jsonl")
    corpus = load(tmp_path / "in")
    assert corpus.splits["train"]["text"][:] == ["development", "latest", "retrained", "src/a", "src/b"]
    assert [corpus.splits["validation"]["text"][:], corpus.splits["test"]["text"][:]] == [["dev"], ["test/c"]]
    told = "'dev.jsonl' for validation, 'c.jsonl' for test; all others for training"
    assert corpus.notes == (f"{tmp_path / 'in'}: by their names, {told}",)


def test_a_folder_without_anything_to_train_on_is_refused(jsonl: Write, tmp_path: Path) -> None:
    for name in ("test_1", "test_2", "test_3", "validation"):
        jsonl({"text": name}, name=f"in/{name}.jsonl")
    assert message(tmp_path / "in") == (
        f"{tmp_path / 'in'}: by their names all files are for validation or test. Rename one (train.jsonl)."
    )


def test_a_folder_to_validate_on(jsonl: Write, tmp_path: Path) -> None:
    for name in ("train", "test_1", "test_2"):
        jsonl({"text": name}, name=f"in/{name}.jsonl")
    corpus = load(jsonl({"text": "x"}), validation_dataset=str(tmp_path / "in"))
    assert (sorted(corpus.splits["validation"]["text"][:]), corpus.notes) == (["test_1", "test_2", "train"], ())
    jsonl({"text": "validation"}, name="in/valid.jsonl")
    corpus = load(jsonl({"text": "x"}), validation_dataset=str(tmp_path / "in"))
    assert corpus.splits["validation"]["text"][:] == ["validation"]


def test_a_title_of_a_text_does_not_name_a_split(tmp_path: Path) -> None:
    for name in ("test-pits.txt", "train-stations.txt", "bridges.txt"):
        (tmp_path / name).write_text(name)
    corpus = load(tmp_path)
    assert texts(corpus) == {"test-pits.txt", "train-stations.txt", "bridges.txt"}
    assert "test" not in corpus.splits


def test_an_empty_split_is_an_error(jsonl: Write, tmp_path: Path) -> None:
    jsonl({"text": "a"}, name="in/train.jsonl")
    jsonl(name="in/validation.jsonl")
    assert message(tmp_path / "in").startswith(f"the validation split of {tmp_path / 'in'}: no document")


def test_file_names_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    for name in ("a\nerror: b\x1b[31m.jsonl", "c.jsonl", "d.txt"):
        (tmp_path / name).write_text('{"text": "x"}\n{\n')
    corpus = load(tmp_path, on_bad_record="skip")
    named = [
        *corpus.notes,
        *(d["source"] for split in (corpus.splits["train"], corpus.splits["validation"]) for d in split),
    ]
    assert not {"\n", "\x1b"} & set("".join(named))
    assert any("a\\nerror: b\\x1b[31m.jsonl" in text for text in named)
    assert f"{tmp_path}: ignored 1 other file, read 2" in corpus.notes
    assert "\x1b" not in message(tmp_path)


def test_a_folder_with_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0")
    assert "no file in it ends in one of .jsonl" in message(tmp_path)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(b"")
    (tmp_path / "d.bin").write_bytes(b"")
    assert "cannot tell what it is. Decompress it first. It must" in message(tmp_path / "d.jsonl.gz")
    assert "cannot tell what it is" in message(tmp_path / "d.bin")


def test_a_name_with_a_slip_is_answered_with_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "contracts.jsonl").write_text('{"text": "a"}\n')
    assert message(tmp_path / "contrats.jsonl").endswith(f"(user/name). Is it {tmp_path / 'contracts.jsonl'}?")


def test_a_line_that_is_cut_off_and_a_column_that_no_record_has(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c')
    assert "not JSON (Unterminated string starting at column 10 (char 9))" in message(tmp_path / "cut.jsonl")
    (tmp_path / "other.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    said = message(tmp_path / "other.jsonl")
    assert "no column 'text'; the columns are body." in said and said.endswith("The same holds for all 2 records.")
    (tmp_path / "one.jsonl").write_text('{"body": "a"}\n')
    assert message(tmp_path / "one.jsonl").endswith("Correct it, or leave such records out with --on_bad_record skip.")


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c", "~no.such.user/x"])
def test_a_path_that_is_not_there_is_not_asked_from_the_hub(name: str) -> None:
    assert message(name) == f"--dataset {name}: no such file or folder, and not a name on the Hub (user/name)."


def test_unreadable_file_keeps_its_own_error(jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl({"text": "a"})

    def forbidden(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(readers, "read_file", forbidden)
    assert message(path) == f"{path}: Permission denied."


# Saved by datasets


def saved(**splits: list[dict[str, Any]]) -> datasets.DatasetDict:
    return datasets.DatasetDict({name: datasets.Dataset.from_list(records) for name, records in splits.items()})  # type: ignore


def test_a_saved_dataset_dict(tmp_path: Path) -> None:
    records = [{"text": f"t{i}", "label": i % 2, "more": 0} for i in range(3)]
    whole = saved(train=records, validation=records[:1], test=records[1:])
    whole = whole.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    whole.save_to_disk(tmp_path / "s")
    corpus = load(tmp_path / "s", labelled=True)
    assert corpus.splits["train"]["label"][:] == ["no", "yes", "no"]
    assert [len(corpus.splits["validation"]), len(corpus.splits["test"])] == [1, 2]
    assert set(corpus.splits["train"].column_names) == {"text", "label"}
    assert sorted(p.name for p in (tmp_path / "s" / "train").iterdir()) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]


def test_a_saved_dataset_that_changes_is_known_as_another(tmp_path: Path) -> None:
    known = []
    for text in ("old", "old", "new"):
        dataset = datasets.Dataset.from_list([{"text": f"{text} {i}"} for i in range(3)])
        dataset._fingerprint = "given"  # as of a generator that reads a file: the content may differ
        dataset.save_to_disk(tmp_path / "s")
        corpus = load(tmp_path / "s", validation_fraction=0.3)
        assert texts(corpus) == {f"{text} {i}" for i in range(3)}
        known.append((corpus.splits["train"]._fingerprint, corpus.splits["validation"]._fingerprint))
    assert known[0] == known[1] and not set(known[1]) & set(known[2])


def test_a_saved_dataset_without_splits(tmp_path: Path) -> None:
    saved(x=[{"text": f"t{i}"} for i in range(10)])["x"].save_to_disk(tmp_path / "s")
    assert texts(load(tmp_path / "s")) == {f"t{i}" for i in range(10)}
    saved(x=[{"text": "v"}])["x"].save_to_disk(tmp_path / "v")
    assert load(tmp_path / "s", validation_dataset=str(tmp_path / "v")).splits["validation"].num_rows == 1
    assert "would be trained on" in message(tmp_path / "s", validation_dataset=str(tmp_path / "s"))
    assert "no column 'body'; the columns are text" in message(tmp_path / "s", text_column="body")


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_the_validation_split_of_a_saved_dataset_may_have_any_usual_name(name: str, tmp_path: Path) -> None:
    splits = {"train": [{"text": f"t{i}"} for i in range(9)], name: [{"text": "v"}], "other": [{"text": "o"}]}
    saved(**splits).save_to_disk(tmp_path / "s")
    corpus = load(tmp_path / "s")
    assert corpus.splits["validation"]["text"][:] == ["v"] and len(corpus.splits["train"]) == 9
    assert list(corpus.notes) == [f"{tmp_path / 's'}: splits that are not used: other"]


def test_splits_that_a_saved_dataset_does_not_have(tmp_path: Path) -> None:
    saved(a=[{"text": "x"}], b=[{"text": "y"}]).save_to_disk(tmp_path / "s")
    assert "no split 'train'; it has a, b" in message(tmp_path / "s")
    assert "no split 'c'; it has a, b" in message(tmp_path / "s", dataset_split="a", validation_split="c")
    with pytest.raises(UsageError, match="validation_split: a is the split to train on"):
        check(
            from_values({"dataset": str(tmp_path / "s"), "dataset_split": "a", "validation_split": "a", "model": "x"})
        )
    assert "no split 'a[:1]'; it has a, b" in message(tmp_path / "s", dataset_split="a[:1]")
    assert "no split 'c'; it has a, b" in message(
        tmp_path / "s", dataset_split="a", validation_split="c", validation_dataset=str(tmp_path / "s")
    )
    corpus = load(tmp_path / "s", dataset_split="a", validation_split="b")
    assert corpus.splits["validation"]["text"][:] == ["y"]


def test_a_hidden_test_split_is_left_out(tmp_path: Path) -> None:
    whole = saved(train=[{"text": "x", "label": 0}, {"text": "y", "label": 0}], test=[{"text": "z", "label": -1}])
    whole.cast_column("label", datasets.ClassLabel(names=["no", "yes"])).save_to_disk(tmp_path / "s")
    corpus = load(tmp_path / "s", labelled=True)
    assert "test" not in corpus.splits
    assert corpus.notes[0].startswith("left out the test split:")
    good = [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}]
    saved(train=[*good, *good], test=[*good, {"text": "z", "label": None}]).save_to_disk(tmp_path / "p")
    assert "test" not in load(tmp_path / "p", labelled=True).splits  # others' data may not stop a training


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("skip", [{}, {"on_bad_record": "skip"}])
def test_files_of_a_test_split_without_labels_are_left_out(tmp_path: Path, rows: int, skip: dict[str, str]) -> None:
    """As competitions give them. One bad row among good ones is an error as elsewhere."""
    (tmp_path / "train.csv").write_text("text,label\na,0\nb,1\nc,0\nd,1\n")
    (tmp_path / "test.csv").write_text("text\n" + "e\n" * rows)
    corpus = load(tmp_path, labelled=True, **skip)
    assert set(corpus.splits) == {"train", "validation"}
    assert corpus.notes[0].startswith("left out the test split: ") and "test.csv" in corpus.notes[0]
    assert "no column 'label'" in corpus.notes[0]
    (tmp_path / "test.csv").write_text("text,label\ne,0\nf,\n")
    if not skip:
        assert "test.csv:3: 'label' must be a number or non-empty text" in message(tmp_path, labelled=True)
    (tmp_path / "test.csv").unlink()
    (tmp_path / "val.csv").write_text("text\n" + "e\n" * rows)
    assert "no column 'label'" in message(tmp_path, labelled=True, **skip)  # of others that is an error


def test_classes_of_a_parquet_file_that_datasets_wrote_keep_their_names(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": f"t{n}", "label": n % 2} for n in range(6)])
    rows = rows.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    rows.to_parquet(tmp_path / "train.parquet")
    hidden = rows.map(lambda row: {"label": -1})
    hidden.to_parquet(tmp_path / "test.parquet")
    found = load(tmp_path, labelled=True)
    labels = {d["text"]: d["label"] for split in ("train", "validation") for d in found.splits[split]}
    assert labels == {f"t{n}": ("no", "yes")[n % 2] for n in range(6)}
    assert "test" not in found.splits and "left out the test split" in found.notes[0]
    datasets.concatenate_datasets([rows, hidden]).to_parquet(tmp_path / "train.parquet")
    assert "train.parquet:7: 'label' must be" in message(tmp_path / "train.parquet", labelled=True)


def test_configurations_in_the_folder_of_a_dataset_are_named(tmp_path: Path) -> None:
    for folder in ("en", "de", "de/more"):
        for split in ("train", "validation"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{split}-00000-of-00001.jsonl").write_text('{"text": "a"}\n')
    assert f"{tmp_path}: read de, en together; give one of these folders to read it alone" in load(tmp_path).notes
    assert load(tmp_path / "en").notes == load(tmp_path / "de").notes == ()
    (tmp_path / "parts" / "train").mkdir(parents=True)
    (tmp_path / "parts" / "test").mkdir()
    for split in ("train", "test"):
        (tmp_path / "parts" / split / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert not any("together" in note for note in load(tmp_path / "parts").notes)


def test_a_saved_column_that_is_no_text_has_the_name_that_the_user_gave(tmp_path: Path) -> None:
    saved(x=[{"messages": [{"role": "user"}], "of": {"a": "b"}}])["x"].save_to_disk(tmp_path / "s")
    for column, kind in ("messages", "list"), ("of", "dict"):
        assert f"column '{column}' holds {kind};" in message(tmp_path / "s", text_column=column)


def test_a_damaged_saved_dataset(tmp_path: Path) -> None:
    saved(x=[{"text": "t"}])["x"].save_to_disk(tmp_path / "s")
    (tmp_path / "s" / "state.json").write_text("{")
    assert "cannot be loaded as saved" in message(tmp_path / "s")


# Cache


def test_a_second_call_reads_the_cache_and_a_changed_file_is_read_again(
    jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    original = readers.read_file

    def counted(path: Path, *how: Any) -> Any:
        reads.append(path.name)
        return original(path, *how)

    monkeypatch.setattr(readers, "read_file", counted)
    path = jsonl({"text": "a"}, "{", {"text": "b"})
    assert "not JSON" in message(path)
    first = load(path, on_bad_record="skip")
    second = load(path, on_bad_record="skip")
    assert reads == ["data.jsonl"]
    assert first.notes == second.notes
    assert first.splits["train"]["text"][:] == second.splits["train"]["text"][:]
    assert first.splits["train"]._fingerprint == second.splits["train"]._fingerprint
    jsonl({"text": "a"}, {"text": "c"})
    assert texts(load(path)) == {"a", "c"}
    assert len(reads) == 2


def test_a_file_replaced_by_one_of_equal_size_and_time_is_read_again(jsonl: Write) -> None:
    path = jsonl({"text": "old 1"}, {"text": "old 2"})
    times = (stat := Path(path).stat()).st_atime_ns, stat.st_mtime_ns
    assert texts(load(path)) == {"old 1", "old 2"}
    jsonl({"text": "new 1"}, {"text": "new 2"})
    os.utime(path, ns=times)
    assert texts(load(path)) == {"new 1", "new 2"}


def test_a_cache_that_cannot_be_written_names_what_to_set(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", Path("/proc/cache"))  # which not even root can make
    found = message(jsonl({"text": "a"}, {"text": "b"}))
    assert found.startswith("/proc/cache: data cannot be cached there: ")
    assert "HF_DATASETS_CACHE" in found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_cache_that_is_full_is_named_and_a_file_that_cannot_be_read_too(number: int, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "rows-1"

    def full() -> Any:
        raise OSError(number, "No space left on device")  # as Arrow raises it: without a file

    with pytest.raises(UserError, match=rf"{cache.parent}: data cannot be cached there: No space .* has room\."):
        intact(cache, full)
    for other in (ConnectionError("no net"), OSError(errno.EIO, "Input/output error")):  # of what is read
        with pytest.raises(OSError, match=r"no net|Input/output"):
            intact(cache, lambda other=other: (_ for _ in ()).throw(other))
    with pytest.raises(PermissionError, match=r"own\.txt"):
        intact(cache, lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no", str(tmp_path / "own.txt"))))


def test_a_whole_cache_that_can_only_be_read_is_used(
    jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl({"text": "a"}, {"text": "b"})
    first = texts(load(path))

    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", str(Path(config.HF_DATASETS_CACHE, "rows.lock")))

    monkeypatch.setattr(FileLock, "acquire", refused)
    assert texts(load(path)) == first == {"a", "b"}
    [arrow] = Path(config.HF_DATASETS_CACHE).glob("rows-*.arrow")
    arrow.write_bytes(arrow.read_bytes() + b" ")
    assert "data cannot be cached there: Read-only file system" in message(path)


def test_a_cache_of_another_user_that_cannot_be_read_names_what_to_set(
    jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl({"text": "a"}, {"text": "b"})
    load(path)
    real = Path.read_text

    def refused(file: Path, *args: Any, **options: Any) -> str:  # the tests may run as root, who reads everything
        if file.suffix == ".digests":
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    found = message(path)
    assert "data cannot be cached there: Permission denied. Set HF_DATASETS_CACHE" in found


def test_a_run_that_waits_for_another_ones_cache_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("train.extras.cache.SECONDS_UNTIL_TOLD", 0.1)
    is_held = threading.Event()

    def other() -> None:
        with FileLock(tmp_path / "rows-1.lock"):
            is_held.set()
            time.sleep(0.5)

    (thread := threading.Thread(target=other)).start()
    is_held.wait()
    assert intact(tmp_path / "rows-1", lambda: cast("Any", "made")) == "made"
    thread.join()
    assert "waiting for another process that makes the same data" in caplog.text
    caplog.clear()
    assert intact(tmp_path / "rows-2", lambda: cast("Any", "made")) == "made" and not caplog.text


def altered(file: Path) -> None:
    """Another word in the text of an Arrow file, which stays a whole one."""
    file.write_bytes(file.read_bytes().replace(b"document", b"DOCUMENT"))


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize("damage", [altered, truncated, Path.unlink])
@pytest.mark.parametrize("kind", ["records", "one text"])
def test_cached_rows_that_are_damaged_are_read_again(jsonl: Write, tmp_path: Path, damage: Any, kind: str) -> None:
    cache = Path(config.HF_DATASETS_CACHE)
    if kind == "one text":
        (tmp_path / "t.txt").write_text("document\n" * 2000)
        path = str(tmp_path / "t.txt")
    else:
        path = jsonl(*({"text": f"document {i}"} for i in range(50)))

    def found() -> list[list[str]]:
        corpus = load(path)
        return [corpus.splits["train"]["text"][:], corpus.splits["validation"]["text"][:]]

    known = found()
    files = list(cache.rglob("rows-*.arrow"))
    assert len(files) == (2 if kind == "one text" else 1)
    for file in files:
        damage(file)
        assert found() == known


# Flags


def test_flags_of_other_kinds_of_data(jsonl: Write, tmp_path: Path) -> None:
    """A recipe's flags for other data are left out, which a note says; not where any file needs them."""
    flags: dict[str, Any] = {"sample_by": "line", "quoting": "none", "label_column": "stars"}
    found = load(jsonl({"text": "a"}, {"text": "b"}), dataset_options={"train": 1}, **flags)
    for name, what in {
        "sample_by": "text files",
        "quoting": "CSV and TSV files",
        "label_column": "tasks with labels",
        "dataset_options": "functions",
    }.items():
        assert f"{name} is only for {what}, so it is left out" in found.notes
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree")
    (tmp_path / "table.csv").write_text('text,stars\n"a,1\nb",2\n')
    for path, labelled in (("lines.txt", False), ("table.csv", True)):
        used = load(tmp_path / path, labelled=labelled, **flags)
        assert len(used.splits["train"]) + len(used.splits["validation"]) == (2 if labelled else 3)
        left = {note.split()[0] for note in used.notes if "left out" in note}
        assert left == ({"sample_by"} if labelled else {"quoting", "label_column"})


def test_records_read_are_those_json_reads(tmp_path: Path) -> None:
    records = [{"text": "x" * i + "é\u2028\\n"} for i in range(1, 50)]
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8"
    )
    expected = {record["text"] for record in records}
    assert texts(load(tmp_path / "list.json")) == texts(load(tmp_path / "lines.jsonl")) == expected


def test_a_run_among_its_own_documents_is_refused(tmp_path: Path) -> None:
    """When it resumes it would read what it has written."""
    given = {"dataset": str(tmp_path), "output_dir": str(tmp_path / "runs" / "a"), "tokenizer": "bytes", "model": "x"}
    of_others = {**given, "dataset": "stdlib", "validation_dataset": str(tmp_path)}
    for values in (given, {**given, "output_dir": str(tmp_path)}, of_others):
        with pytest.raises(UsageError, match=r"output_dir: it lies in the dataset .*read as documents"):
            check(from_values(values))
    check(from_values({**given, "output_dir": f"{tmp_path}-runs"}))


def test_a_split_of_a_plain_folder_is_not_ignored(tmp_path: Path) -> None:
    given = {"dataset": str(tmp_path), "dataset_split": "books", "tokenizer": "bytes", "model": "x"}
    with pytest.raises(UsageError, match=r"dataset_split: .* does not have splits: leave it out"):
        check(from_values(given))
    (tmp_path / "dataset_train.json").write_text("{}")
    with pytest.raises(UsageError, match="leave it out"):
        check(from_values(given))
    saved = {"validation_dataset": str(tmp_path / "saved"), "validation_split": "dev", "dataset_split": "train"}
    check(from_values({**given, **saved}))  # of the other one
    check(from_values({**given, **saved, "validation_split": "train"}))  # which is not the one to train on
    (tmp_path / "dataset_dict.json").write_text("{}")  # as save_to_disk writes it
    check(from_values(given))
    with pytest.raises(UsageError, match=r"dataset_config: .* does not have configs: leave it out"):
        check(from_values({**given, "dataset_config": "en"}))
    (tmp_path / "held.jsonl").write_text("")
    plain = {"validation_dataset": str(tmp_path / "held.jsonl"), "validation_split": "dev"}
    with pytest.raises(UsageError, match=r"validation_split: .*held\.jsonl does not have splits: leave it out"):
        check(from_values({**given, **plain}))
