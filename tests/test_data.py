"""Documents and functions of one's own: what ``module:function`` may return, and what is said of anything else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from support import run_for
from transformers import AutoTokenizer

from train.config import Config, load_function
from train.data import call_function, corpus_of, prepare_data
from train.records import UserError


def corpus(found: Any, **options: Any) -> Any:
    return corpus_of(found, Config().changed(dataset="my_data:documents", **options))


def made_of(*texts: str, **columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(texts), **columns})


def test_part_of_a_single_dataset_is_held_out_and_always_the_same() -> None:
    whole = made_of(*(f"t{i}" for i in range(20)))
    first, second = corpus(whole, validation_fraction=0.25), corpus({"train": whole}, validation_fraction=0.25)
    assert len(first.splits["train"]) == 15 and len(first.splits["validation"]) == 5 and "test" not in first.splits
    assert first.splits["validation"]["text"][:] == second.splits["validation"]["text"][:]
    assert sorted([*first.splits["train"]["text"], *first.splits["validation"]["text"]]) == sorted(whole["text"])
    # By every version: a run that resumes with another would train on what it is evaluated on.
    assert sorted(first.splits["validation"]["text"]) == ["t13", "t19", "t2", "t4", "t6"]


@pytest.mark.parametrize("splits", [("train", "dev"), ("validation",), ()])
def test_splits_of_other_names_are_refused(splits: tuple[str, ...]) -> None:
    told = f"my_data:documents has {', '.join(map(str, splits))}: give train, validation, test."
    with pytest.raises(UserError, match=re.escape(told)):
        corpus({name: made_of("a", "b") for name in splits})


@pytest.mark.parametrize(("fraction", "held_out"), [(0.01, 1), (0.99, 3)])
def test_both_parts_have_a_document_at_least(fraction: float, held_out: int) -> None:
    found = corpus(made_of("a", "b", "c", "d"), validation_fraction=fraction)
    assert (len(found.splits["train"]), len(found.splits["validation"])) == (4 - held_out, held_out)


def test_splits_are_taken_as_they_are() -> None:
    splits = datasets.DatasetDict({name: made_of(name) for name in ("train", "validation", "test")})  # type: ignore
    found = corpus(splits)
    assert [
        split["text"][:] for split in (found.splits["train"], found.splits["validation"], found.splits["test"])
    ] == [
        ["train"],
        ["validation"],
        ["test"],
    ]


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


def test_a_helper_that_was_edited_is_not_taken_from_a_cache(tmp_path: Path) -> None:
    """🤗 Datasets tells functions apart by their names, where a module has them."""
    code = "import datasets\ndef word():\n    return 'one'\ndef documents():\n"
    code += f"    rows = datasets.load_dataset('json', data_files='{tmp_path}/rows.jsonl', split='train')\n"
    code += "    return rows.map(lambda row: {'text': word()})\n"
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    for other in ("one", "three"):  # of another length: Python's own cache goes by size and second
        (tmp_path / "words_for_test.py").write_text(code.replace("'one'", repr(other)))
        found = load_function(f"{tmp_path}/words_for_test.py:documents", "dataset")()
        assert found["text"][:] == [other]


@pytest.mark.parametrize(
    ("arguments", "gets"),
    [
        ("config", True),
        ("config=None", True),
        ("*, config", True),
        ("settings", True),
        ("settings, /", True),
        ("settings=None", False),
        ("*settings", False),
        ("**settings", False),
        ("", False),
    ],
)
def test_a_function_gets_the_configuration_if_it_wants_it(tmp_path: Path, arguments: str, gets: bool) -> None:
    (tmp_path / "wanting.py").write_text(f"def documents({arguments}):\n    return locals()\n")
    config = Config()
    found = call_function(f"{tmp_path}/wanting.py:documents", "dataset", config)
    assert (config in found.values()) == gets


@pytest.mark.parametrize("arguments", ["config, /", "*config"])
def test_a_function_may_take_the_configuration_by_position_only(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "placed.py").write_text(f"def documents({arguments}):\n    return config")
    assert call_function(f"{tmp_path}/placed.py:documents", "dataset", config := Config()) in (config, ())


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


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import no_such_package_of_mine", "No module named 'no_such_package_of_mine'"),
        ("import datasets; datasets.Datset", "has no attribute 'Datset'"),
        ("open('no_such_file.txt')", "No such file or directory: 'no_such_file.txt'"),
    ],
)
def test_an_error_inside_a_function_s_file_keeps_its_own_traceback(
    line: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a module, or a function, that is not there."""
    monkeypatch.chdir(tmp_path)
    Path("failing_for_test.py").write_text(f"{line}\ndef documents(): ...\n")
    Path("no_such_package_of_mine.failing.py").write_text(f"{line}\ndef documents(): ...\n")
    for source in ("failing_for_test", "failing_for_test.py", "no_such_package_of_mine.failing.py"):
        with pytest.raises((ImportError, AttributeError, OSError), match=error) as caught:
            load_function(f"{source}:documents", "dataset")
        assert Path(caught.traceback[-1].path).name in ("failing_for_test.py", source)


MARKED = """
import datasets

def documents():
    texts = ["plain", "with <|end|> in it", "<|end|><|end|>", "the last"]
    return datasets.Dataset.from_dict({"text": texts, "label": ["a", "b"] * 2})
"""


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_an_end_mark_in_a_text_is_text_to_a_classifier_that_looks_for_the_last(tmp_path: Path, tokenizer: str) -> None:
    """Bart's and T5's refuse a batch whose examples have different numbers of it; to others it is a mark as before."""
    (tmp_path / "marked.py").write_text(MARKED)
    own = {"dataset": f"{tmp_path}/marked.py:documents", "tokenizer": tokenizer, "validation_fraction": 0.25}
    for model_type, is_text in ("t5", True), ("bert", False):
        config = Config().changed(
            task="sequence_classification", model_config={"model_type": model_type}, max_length=64, **own
        )
        data = prepare_data(run_for(config))
        splits = (data.examples["train"], data.examples["validation"])
        rows = {tuple(row) for split in splits for row in split["tokens"]}
        end = data.tokenizer.eos_token_id
        assert {row.count(end) for row in rows} == ({2} if is_text else {2, 3})  # written once
        assert len(rows) == 4
        # As final/ has it, alone: the figures of the run are those of a pipeline.
        data.task.stand_alone(data.tokenizer).save_pretrained(tmp_path / model_type)
        alone = AutoTokenizer.from_pretrained(tmp_path / model_type)
        assert tuple(alone("with <|end|> in it")["input_ids"]) in rows  # type: ignore
