"""The cells of ``notebooks/``, from top to bottom, as a notebook on a machine without a GPU runs them."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import ROOT, write_recipe

NOTEBOOK = json.loads((ROOT / "notebooks" / "colab.ipynb").read_text(encoding="utf-8"))
COPIED = ("train", "recipes", "accelerate_configs")


class Notebook:
    """Runs cells: Python, ``!`` lines in a shell at a terminal as IPython does, ``%cd`` and ``%%writefile``."""

    def __init__(self, environment: dict[str, str], **variables: Any) -> None:
        self._environment, self._variables = environment, variables
        self.names: dict[str, Any] = {}
        self.said: list[str] = []

    def run(self, source: str) -> Any:
        """The value of the last line, as a notebook shows it."""
        if source.startswith("%%writefile "):
            name, _, text = source.removeprefix("%%writefile ").partition("\n")
            return Path(name).write_text(text, encoding="utf-8")
        python = re.sub(r"^[!%].*$", lambda line: f"_run({line[0]!r})", source, flags=re.MULTILINE)
        tree, self.names["_run"] = ast.parse(python), self._command
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore
        exec(compile(tree, "cell", "exec"), self.names)
        self.names |= {name: value for name, value in self._variables.items() if name in self.names}
        return last and eval(compile(last, "cell", "eval"), self.names)

    def _command(self, line: str) -> None:
        words = line[1:].format_map(self.names)
        if line.startswith("%cd "):
            os.chdir(words.removeprefix("cd "))
            return
        reader, terminal = pty.openpty()
        shell = subprocess.Popen(words, shell=True, stdout=terminal, stderr=terminal, env=self._environment)
        os.close(terminal)
        said = bytearray()
        while shell.poll() is None or said[-1:] != b"":
            try:
                piece = os.read(reader, 2**16)
            except OSError:  # the last program has closed the terminal
                break
            if not piece:
                break
            said += piece
        os.close(reader)
        self.said.append(said.decode())
        assert shell.wait() == 0, self.said[-1]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    folder = tmp_path / "copy"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    display: Any = ModuleType("IPython.display")
    display.HTML = display.Image = lambda shown: SimpleNamespace(shown=shown)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    more = f"--dataset {tmp_path}/documents.jsonl --tokenizer bytes --max_length 128 --validation_fraction 0.2"
    yield Notebook(environment, FOLDER=str(folder), INSTALL="echo", STEPS=2, MORE=more)


@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom(notebook: Notebook) -> None:
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    shown = [notebook.run(cell) for cell in cells]
    page, picture = (value.shown for value in shown if isinstance(value, SimpleNamespace))
    assert page.lstrip().lower().startswith("<!doctype html") and Path(picture).stat().st_size > 10_000
    for name in ("first", "mine", "two"):
        summary = json.loads((Path("runs") / name / "summary.json").read_text(encoding="utf-8"))
        assert (summary["steps"], summary["world_size"]) == (2, 2 if name == "two" else 1)
    text = "".join(notebook.said)
    assert "2/2 [" in text and "validation: loss" in text
    assert "Traceback" not in text
    # A carriage return rewrites the line, which notebooks show as one; other codes they would print.
    assert not re.findall(r"\x1b\[[^m]*.|\x1b[^\[]|[\x00-\x08]", text)


def test_a_notebook_is_committed_without_outputs_and_says_little() -> None:
    for cell in NOTEBOOK["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        else:
            assert len(re.findall(r"[.:?] |[.:?]$", text)) <= 4, text
