"""Rubbish for everything that reads what people write: an error that says so, or a count, and never a traceback.

The number of inputs is ``FUZZ_INPUTS`` for each test, from the environment.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from train.config import Config, check, dump, from_values, parse, read_recipe, to_values
from train.extras.readers import readers
from train.records import UsageError, UserError

INPUTS = int(os.environ.get("FUZZ_INPUTS", "100"))
fuzz = settings(
    max_examples=INPUTS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

FIELDS = sorted(to_values(Config()))
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["1e-4", "null", "no", "auto", "-1", "0", "nan", "inf", "../x", "causal_lm", "train:8192", "full"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@fuzz
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), PLAIN, max_size=6))
def test_values_of_any_type(values: dict[str, Any]) -> None:
    try:
        config = from_values(values)
        check(config)
    except UsageError as error:
        assert str(error)
        return
    assert from_values(yaml.safe_load(dump(config)) or {}) == config  # what is taken can be written and read again


@fuzz
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_recipes_of_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    try:
        assert isinstance(read_recipe(path), dict)
    except UsageError as error:
        assert str(path) in str(error)


YAML_PIECES = st.lists(
    st.sampled_from(
        ["task: ", "causal_lm", "\n", ": ", "- ", "&a ", "*a", "!!python/object/apply:os.system ", "[", "]", "{", "}",
         "'", '"', "? ", "|\n  ", "<<: ", "learning_rate: ", "1e-4", "0x1f", "2001-01-01", "~", "#", "\t",
         "model_config: ", "%YAML 1.1\n", "---\n"]
    ),
    max_size=25,
).map("".join)  # fmt: skip


@fuzz
@given(YAML_PIECES)
def test_recipes_that_look_like_yaml(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    try:
        check(from_values(read_recipe(path)))
    except UsageError as error:
        assert str(error)


WORDS = st.sampled_from([f"--{name}" for name in FIELDS]) | st.text(max_size=10).map("--{}".format)
ARGUMENTS = st.lists(WORDS | PLAIN.map(str) | st.text(max_size=10), max_size=6)


@settings(fuzz, max_examples=max(1, INPUTS // 4))  # each builds the whole parser
@given(ARGUMENTS)
def test_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    try:
        parse([word.replace("\0", "") for word in arguments])
    except UsageError as error:
        assert str(error)
    except SystemExit as end:
        assert end.code in (0, 2)
    capsys.readouterr()


def read_all(path: Path, read: Callable[[], readers.Found], labelled: bool) -> tuple[int, int]:
    """Records that are good and bad, each as a row that a data set can hold."""
    good = bad = 0
    for position, record in read():
        found = readers.row(record, path.name, position, ("text", "label" if labelled else None))
        assert set(found) == set(readers.FEATURES)
        for value in found.values():
            if isinstance(value, str):
                value.encode()
        if found["problem"] is None:
            assert isinstance(found["text"], str) and found["text"].strip()
            good += 1
        else:
            assert found["source"].startswith(path.name)
            bad += 1
    return good, bad


ALMOST = {
    ".jsonl": [b'{"text": "a b", "label": 1}', b"\n", b"\r\n", b"{", b"}", b"[", b"]", b'"text"', b":", b",", b"NaN",
               b"1e999", b"\\ud800", b'"', b"\xff\xfe", b"\0", b"null", b"\xef\xbb\xbf", b'{"label": true}', b" "],
    ".csv": [b"text,label\n", b"a,1\n", b'"', b",", b"\n", b"\r", b'""', b"\xff", b"\0", b"text,text\n",
             b"\xef\xbb\xbf", b" x"],
    ".txt": [b"a b\n", b"\n\n", b"\r\n", b"\xff", b"\0", b"\xef\xbb\xbf", b"\xc3", b"\x0c", b"\xf0\x9f\x98\x80"],
}  # fmt: skip
ALMOST[".json"] = [*ALMOST[".jsonl"], b'[{"text": "x"}', b'{"data": [']
ALMOST[".tsv"] = [*ALMOST[".csv"], b"text\tlabel\n", b"\t"]


def files_like(suffix: str) -> st.SearchStrategy[bytes]:
    pieces = st.lists(st.sampled_from(ALMOST[suffix]) | st.binary(max_size=4), max_size=20).map(b"".join)
    return pieces | st.binary(max_size=200)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_files_of_records(tmp_path: Path, suffix: str, labelled: bool) -> None:
    path = tmp_path / f"data{suffix}"

    @fuzz
    @given(files_like(suffix))
    def reads(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read_all(path, lambda: readers.read_file(path, ("text", "label" if labelled else None)), labelled)
        except UserError as error:
            assert str(path) in str(error)

    reads()


@pytest.mark.parametrize("sample_by", ["document", "line"])
def test_text_files(tmp_path: Path, sample_by: str) -> None:
    path = tmp_path / "data.txt"

    @fuzz
    @given(files_like(".txt"))
    def reads(content: bytes) -> None:
        path.write_bytes(content)
        read_all(path, lambda: readers.read_file(path, ("text", None), sample_by), labelled=False)

    reads()


def test_parquet_files_with_changed_bytes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole, path = tmp_path / "whole.parquet", tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": ["some text", "more", None] * 5, "label": list(range(15))}), whole)
    content = whole.read_bytes()

    @fuzz
    @given(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=4), st.integers(0, 64))
    def reads(changes: list[tuple[int, int]], cut: int) -> None:
        altered = bytearray(content)
        for place, byte in changes:
            altered[place] = byte
        path.write_bytes(bytes(altered[: len(altered) - cut]))
        try:
            read_all(path, lambda: readers.read_file(path, ("text", None)), labelled=False)
        except UserError as error:
            assert str(path) in str(error)

    reads()
