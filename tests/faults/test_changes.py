"""A run that goes on with something else than it began with: refused by name, unless it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults.processes import Ended, run
from support import checkpoint_digests, sampled, write_recipe

from train.records import EXIT_DONE, EXIT_ERROR

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
CHANGES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "dataset": ({"dataset": "OTHER"}, "training data", True),
    "changed file": ({}, "training data", True),
    "split": ({"validation_fraction": 0.4}, "training data", True),
    "length": ({"max_length": 32}, "training data", False),
    "tokenizer": ({"tokenizer": "words"}, "tokenizer", False),
    "dropout": ({"model_config": {**GPT2, "resid_pdrop": 0.3}}, "model_config", True),
    "model": ({"model_config": {**GPT2, "n_embd": 8}}, "model_config", False),
    "global batch": ({"global_batch_size": 4}, "global_batch_size", False),
    "packing": ({"packing": True}, "packing", True),
    "precision": ({"mixed_precision": "bf16"}, "mixed_precision", True),
    "weights' type": ({"dtype": "bfloat16"}, "dtype", True),
    "optimizer": ({"optimizer": "sgd"}, "optimizer", False),
    "seed": ({"seed": 1}, "seed", True),
}
"""Fields that change, the name in the message, and whether the run can go on with them if it is told to."""


def go_on(folder: Path, *flags: Any) -> Ended:
    its = ("--config", folder / "recipe.yaml", "--output_dir", folder / "run", *flags)
    [end] = run(its, folder / "logs")
    assert "Traceback" not in end.said, end.said
    return end


QUICK = ("changed file",)
SLOW = sampled([change for change in CHANGES if change not in QUICK], 2)


@pytest.mark.parametrize("change", [*QUICK, *(pytest.param(change, marks=pytest.mark.slow) for change in SLOW)])
def test_change_is_named_and_refused_unless_allowed(tmp_path: Path, change: str) -> None:
    fields, named, can_go_on = CHANGES[change]
    recipe = write_recipe(tmp_path)
    assert go_on(tmp_path, "--max_steps", 2, "--num_epochs", "None").status == EXIT_DONE
    documents = tmp_path / "documents.jsonl"
    other = tmp_path / "others.jsonl"
    other.write_text(documents.read_text().replace("document", "page"))
    if change == "changed file":
        with documents.open("a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
    values = {**yaml.safe_load(recipe.read_text()), **fields, "num_epochs": None, "max_steps": 4}
    if values["dataset"] == "OTHER":
        values["dataset"] = str(other)
    recipe.write_text(yaml.safe_dump(values))
    end = go_on(tmp_path)
    assert end.status == EXIT_ERROR
    assert "belongs to a run with other settings" in end.said and f"{named}: was " in end.said
    is_fixed = named in ("optimizer", "global_batch_size")
    assert ("--allow_changes_on_resume" in end.said) is not is_fixed
    end = go_on(tmp_path, "--allow_changes_on_resume", "True")
    assert end.status == (EXIT_DONE if can_go_on else EXIT_ERROR), end.said


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_data_that_was_moved_is_the_same_data(tmp_path: Path, packing: bool) -> None:
    """Copied to another place at another time, as to the disk of the next machine: the run is exact."""
    settings = ("--num_epochs", "None", "--packing", packing)
    for name in ("moved", "stayed"):
        (folder := tmp_path / name).mkdir()
        write_recipe(folder)
        assert go_on(folder, "--max_steps", 2, *settings).status == EXIT_DONE
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "copy.jsonl"
    copy.write_bytes((tmp_path / "moved" / "documents.jsonl").read_bytes())
    (tmp_path / "moved" / "documents.jsonl").unlink()
    for name, flags in (("moved", ("--dataset", copy)), ("stayed", ())):
        end = go_on(tmp_path / name, "--max_steps", 4, *settings, *flags)
        assert end.status == EXIT_DONE, end.said
        assert "at step 2" in end.said
    assert checkpoint_digests(tmp_path / "moved" / "run", 4) == checkpoint_digests(tmp_path / "stayed" / "run", 4)


def test_what_does_not_change_the_run_is_no_change(tmp_path: Path) -> None:
    """More steps, another learning rate, other micro-batches, evaluation, logging."""
    write_recipe(tmp_path)
    assert go_on(tmp_path, "--max_steps", 2, "--num_epochs", "None").status == EXIT_DONE
    flags = ("--learning_rate", 0.002, "--micro_batch_size", 4, "--eval_every_steps", 1, "--log_every_steps", 2)
    end = go_on(tmp_path, "--max_steps", 4, "--num_epochs", "None", *flags)
    assert end.status == EXIT_DONE, end.said
    assert "at step 2" in end.said
