"""A checkpoint of a run with other settings is refused, by the names of these."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import tokenizer_of
from support import causal_data, run_for

from train.config import Config
from train.extras.checks import Extra
from train.records import UserError

IDENTITY = {"dataset": "stdlib", "seed": 1, "optimizer": "adamw", "global_batch_size": 8}
FOLDER = Path("step-00000001")


def compare(folder: Path, own: dict[str, Any], stored: dict[str, Any], allow_changes: bool) -> list[str]:
    """What is said of it."""
    run = run_for(Config().changed(allow_changes_on_resume=allow_changes))
    Extra().check_identity(run, folder, own, stored)
    return run.outputs.notes


@pytest.mark.parametrize(
    ("present", "named"),
    [
        ({"seed": 2}, "(seed: was 1, is 2)"),
        ({"seed": None}, "(seed: was 1, is None)"),
        ({"rope_scaling": "yarn"}, "(rope_scaling: was None, is 'yarn')"),
        ({"dataset": "listops"}, "(dataset: was 'stdlib', is 'listops')"),
    ],
)
def test_a_setting_that_differs_on_either_side_is_named(present: dict[str, Any], named: str) -> None:
    own = {name: value for name, value in {**IDENTITY, **present}.items() if value is not None}
    with pytest.raises(UserError, match=re.escape(named)):
        compare(FOLDER, own, IDENTITY, allow_changes=False)
    said = compare(FOLDER, own, IDENTITY, allow_changes=True)
    assert said == [f"WARNING: step-00000001 had other settings {named}"]


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({"classes": ["neg", "pos"], "training data": "b"}, "classes: was ['neg', 'pos'], is ['pos', 'neg']"),
        ({"training data": "b"}, "classes: was 'not stored by that version', is ['pos', 'neg']"),
    ],
)
def test_no_flag_lets_classes_change_their_order(stored: dict[str, Any], told: str) -> None:
    """A trained head would mean the opposite."""
    own = {**IDENTITY, "classes": ("pos", "neg"), "training data": "a"}
    with pytest.raises(UserError, match=re.escape(told)) as error:
        compare(FOLDER, own, {**IDENTITY, **stored}, allow_changes=True)
    assert "--allow_changes_on_resume" not in str(error.value)
    for same in {}, {"classes": ["Pos", "Neg"]}:  # with other names alone
        assert compare(FOLDER, own, {**IDENTITY, "training data": "a", **same}, allow_changes=False) == []


@pytest.mark.parametrize("off", [False, None, 0])
def test_an_option_of_an_extra_that_was_deleted_counts_as_off(off: Any) -> None:
    compare(FOLDER, IDENTITY, {**IDENTITY, "packing": off}, allow_changes=False)
    with pytest.raises(UserError, match=re.escape("(packing: was ")):
        compare(FOLDER, {**IDENTITY, "packing": True}, {**IDENTITY, "packing": off}, allow_changes=False)


def test_code_that_has_changed_is_told_and_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("scale = 1.0\n")
    (tmp_path / "main.py").write_text("import torch\n")
    config = Config().changed(model=f"{tmp_path}/my_model.py:build", tokenizer="bytes")
    run = run_for(config)
    data = causal_data(config, [4])
    data = replace(data, tokenizer=tokenizer_of("bytes"))
    first = Extra().identity(run, data)
    (tmp_path / "main.py").write_text("import numpy\n")  # no part of it
    Extra().check_identity(run, FOLDER, Extra().identity(run, data), first)
    Extra().check_identity(run, FOLDER, first, {name: value for name, value in first.items() if name != "code"})
    assert run.outputs.notes == []
    (tmp_path / "my_model.py").write_text("scale = -3.0\n")
    Extra().check_identity(run, FOLDER, Extra().identity(run, data), first)
    [line] = run.outputs.notes
    what = "the code of the task, model or step, or the model's config.json,"
    assert line == f"WARNING: {what} has changed since step-00000001 was written"


@pytest.mark.parametrize("name", ["step", "loop", "optim", "batching"])
def test_an_edited_step_counts_as_changed_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth route of a fork."""
    config = Config().changed(model=str(tmp_path), tokenizer="bytes")
    run, data = run_for(config), replace(causal_data(config, [4]), tokenizer=tokenizer_of("bytes"))
    module = import_module(f"train.{name}")
    before = Extra().identity(run, data)["code"]
    (tmp_path / "edited.py").write_text(Path(str(module.__file__)).read_text() + "# edited\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "edited.py"))
    assert Extra().identity(run, data)["code"] != before


def test_a_models_config_json_that_has_changed_is_told(tmp_path: Path) -> None:
    config = Config().changed(model=str(tmp_path), tokenizer="bytes")
    run, data = run_for(config), replace(causal_data(config, [4]), tokenizer=tokenizer_of("bytes"))
    digests = []
    for activation in "silu", "silu", "relu":
        (tmp_path / "config.json").write_text(f'{{"hidden_act": "{activation}"}}')
        digests.append(Extra().identity(run, data)["code"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(("name", "value"), [("optimizer", "sgd"), ("global_batch_size", 4), ("adapter", "lora")])
def test_what_the_remaining_steps_cannot_be_made_with_is_refused_even_if_changes_are_allowed(
    name: str, value: Any
) -> None:
    said = rf".*{name}: was {IDENTITY.get(name)!r}, is {value!r}.* --resume never to start from scratch here\.$"
    with pytest.raises(UserError, match=said):
        compare(FOLDER, {**IDENTITY, name: value, "seed": 7}, IDENTITY, allow_changes=True)
