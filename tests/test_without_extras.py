"""The template with any one extra deleted, and with all of them: it trains, and says what is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from faults.processes import script
from support import ROOT, sampled, write_recipe

from train import extras
from train.config import from_values
from train.extras.readers.own_tokenizers import build_tokenizer
from train.launch import Launch
from train.records import EXIT_DONE, EXIT_USAGE, UsageError

DATA = """
import datasets


def documents(config):
    return datasets.Dataset.from_dict({"text": [f"document {n}: " + "abc def " * (n % 7) for n in range(25)]})
"""
MODEL = """
from transformers import AutoModelForCausalLM, GPT2Config


def build():
    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=259, n_embd=16, n_layer=2, n_head=2))
"""
# Refused flags first, then the run, all in one process.
PROGRAM = """
import sys
import train
from train.main import main

flags, run = sys.argv[1].split(), sys.argv[2:]
print("package:", train.__file__)
for flag in flags:
    print("refused:", flag, main([*run, flag]))
print("trained:", main(run))
"""


def copy_without(names: Sequence[str], folder: Path) -> Path:
    """A copy of the repository's code and recipes from which the extras ``names`` are deleted."""
    for part in ("train", "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in names:
        shutil.rmtree(place := folder / extras.ORDER[name].replace(".", "/"))
        (place / "__pycache__").mkdir(parents=True)  # as git leaves it with whoever pulls the deletion
    (folder / "program.py").write_text(PROGRAM)
    (folder / "my_data.py").write_text(DATA)
    (folder / "my_model.py").write_text(MODEL)
    return folder


def flags_of(names: Sequence[str]) -> list[str]:
    """A flag of each extra that has any."""
    options = extras.options()
    found = [fields(options[name])[0] for name in names if name in options]
    return [f"--{field.name}={field.default}" for field in found]


def train_without(names: Sequence[str], folder: Path, *refused: str) -> tuple[list[str], str]:
    """Trains three steps in a copy without ``names``, after each of their flags and of ``refused`` was tried.

    Returns:
        The standard output's lines, and the errors.
    """
    copy, recipe = copy_without(names, folder / "copy"), write_recipe(folder)
    if {"memory", "meter", "hardware"} & set(names):  # without these two, memory counts as missing
        recipe.write_text(recipe.read_text().replace("predict_memory: false\n", ""))
    if "hardware" in names:
        recipe.write_text(recipe.read_text().replace("cpu_threads: 1\n", ""))
    run = ["--config", str(recipe), "--max_steps", "3", "--output_dir", str(folder / "run")]
    if "readers" in names:  # then data is a function's, and the tokenizer that of a folder
        build_tokenizer("bytes", ()).save_pretrained(folder / "tokenizer")
        run += ["--dataset", "my_data:documents", "--tokenizer", str(folder / "tokenizer")]
    if "new_models" in names:  # then the model is a function's
        run += ["--model", "my_model:build"] + ["--tokenizer", "bytes"] * ("readers" not in names)
    words = ("program.py", " ".join([*flags_of(names), *refused]), *run)
    done = script(words, 1, {**os.environ, "PYTHONPATH": str(copy)}, copy, alone=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"package: {copy / 'train' / '__init__.py'}" in lines
    assert f"trained: {EXIT_DONE}" in lines, done.stderr
    assert (folder / "run" / "final" / "model.safetensors").exists()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 3 and ("meter" in names or summary["peak_allocated_bytes"] > 0)
    return lines, done.stderr


def joined(lines: Sequence[str]) -> list[str]:
    """The extras that each run of ``lines`` says it has."""
    (line,) = {line.removeprefix("extras: ") for line in lines if line.startswith("extras: ")}
    return [] if line == "none" else line.split(", ")


AUTO = {
    f"--micro_batch_size=auto {EXIT_USAGE}": "micro_batch_size: auto needs train/memory/",
    f"--gradient_checkpointing=auto {EXIT_USAGE}": "give none, selective or full",
}
"""What memory would choose, the exit status without it, and the message."""


ALONE = ("checks", "gradients", "endurance", "selection", "report")
"""Nothing else imports one of these, so what fails without it would fail without any."""


@pytest.mark.parametrize("name", ALONE)
def test_an_extra_by_itself_is_imported_by_no_other(name: str) -> None:
    for path in (ROOT / "train").rglob("*.py"):
        its = ROOT / "train" / "extras" / name, ROOT / "train" / "extras" / "__init__.py"  # which joins them
        if not any(path.is_relative_to(own) for own in its):
            assert not re.search(rf"\bextras(\.| import .*\b){name}\b", path.read_text(encoding="utf-8")), path


THIRDS = (
    ("memory", "adapters", "readers", "new_models"),
    ("hardware", "meter", "activations", "parallelism"),
    ("long_sequences", "losses", "optimizers"),
)


def test_each_extra_is_left_out_once() -> None:
    assert sorted([*ALONE, *(name for third in THIRDS for name in third)]) == sorted(extras.ORDER)


@pytest.mark.parametrize(
    "names", [*THIRDS, *(pytest.param((name,), marks=pytest.mark.slow) for name in sampled(extras.ORDER, 2))]
)
def test_trains_without_extras_and_names_them_when_asked_for_them(names: tuple[str, ...], tmp_path: Path) -> None:
    left_open = AUTO if "memory" in names else {}
    lines, errors = train_without(names, tmp_path, *(asked.split()[0] for asked in left_open))
    gone = {*names, *(other for other, cls in extras.classes().items() if set(names) & set(cls.needs))}
    assert joined(lines) == [other for other in extras.ORDER if other not in gone]
    for flag in flags_of(names):
        assert f"refused: {flag} {EXIT_USAGE}" in lines
        assert f"unknown flag {flag.partition('=')[0]}" in errors
        assert f"without the extras {', '.join(other for other in extras.ORDER if other in gone)} and" in errors
    for asked, message in left_open.items():
        assert f"refused: {asked}" in lines and message in errors
    assert "Traceback" not in errors


def test_trains_without_any_extra(tmp_path: Path) -> None:
    names = list(extras.ORDER)
    lines, errors = train_without(names, tmp_path)
    left = [path.relative_to(tmp_path) for path in (tmp_path / "copy" / "train" / "extras").glob("*/*.py")]
    assert not left
    assert joined(lines) == []
    for flag in flags_of(names):
        assert f"refused: {flag} {EXIT_USAGE}" in lines
        assert f"unknown flag {flag.partition('=')[0]}" in errors
    assert f"without the extras {', '.join(names)} and" in errors


PLANNER = """
import sys
from train.memory.__main__ import main

assert main(["plan", *sys.argv[1:], "--json"]) == main(["predict", *sys.argv[1:]]) == 0
"""


def ask_the_planner(names: Sequence[str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What plan and predict say of the tests' recipe in a copy without ``names``."""
    copy, recipe = copy_without(names, folder / "copy"), write_recipe(folder)
    recipe.write_text(recipe.read_text().replace("predict_memory: false\n", ""))
    (copy / "planner.py").write_text(PLANNER)
    words = ("planner.py", "--config", str(recipe), "--vocab_size", "259", *words)
    return script(words, 1, {**os.environ, "PYTHONPATH": str(copy)}, copy, alone=True)


@pytest.mark.slow
def test_plans_with_no_extra_but_the_two_that_it_needs(tmp_path: Path) -> None:
    needed = ("memory", "meter", "hardware", "new_models")  # the last for the tests' recipe alone
    asked = ask_the_planner([name for name in extras.ORDER if name not in needed], tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert "checkpointing none, precision fp32, loss full" in asked.stdout  # there is nothing to choose


@pytest.mark.parametrize("name", ["meter", "hardware"])
def test_the_planner_names_the_extra_that_it_needs(tmp_path: Path, name: str) -> None:
    asked = ask_the_planner([name], tmp_path)
    assert asked.returncode == EXIT_USAGE and f"train/extras/{name}/" in asked.stderr
    assert "Traceback" not in asked.stderr


def test_imports_are_sorted_for_ruff_whatever_extra_a_fork_has_deleted(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for part in ("train", "tests", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("activations", "readers", "losses"):
        shutil.rmtree(tmp_path / "train" / "extras" / name)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_an_optimizer_needs_some_extra_that_builds_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's own, or one of a fork that has deleted it."""
    config, here = from_values({"model": "x", "optimizer": "sgd"}), extras.classes()
    monkeypatch.setattr(extras, "classes", lambda: {name: here[name] for name in ("meter", "report")})
    with pytest.raises(UsageError, match="optimizer: sgd needs train/extras/optimizers/: use adamw"):
        extras.check(config, Launch())
    own = type("Extra", (extras.Extra,), {"build_optimizer": lambda self, config, groups, device: None})
    monkeypatch.setattr(extras, "classes", lambda: {"lion": own})
    extras.check(config, Launch())


def test_an_extra_of_another_installed_copy_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable installation of the template would lend a fork what the fork was made without."""
    found = importlib.util.find_spec("train.extras.report")
    assert found is not None and extras.is_here("train.extras.report")
    found.origin = str(tmp_path / "train" / "extras" / "report" / "__init__.py")
    monkeypatch.setattr(extras, "find_spec", lambda module: found)
    assert not extras.is_here("train.extras.report")
