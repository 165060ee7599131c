"""Every recipe builds its model, and every command of the README is one that the template understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from support import ROOT, run_for

from train.config import dump, parse, read_recipe
from train.extras.readers.own_tokenizers import build_tokenizer
from train.model import build_model
from train.tasks import load_task

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_builds_its_model(path: Path) -> None:
    config = parse(["--config", str(path)])
    task = load_task(config.data.task)
    with torch.device("meta"):
        model = build_model(run_for(config), task, build_tokenizer("bytes", ()), ("a", "b") if task.labelled else ())
    assert sum(p.numel() for p in model.parameters()) > 10_000


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_tells_its_cost_and_result(path: Path) -> None:
    header = path.read_text().split("\n\n")[0].split("task:")[0]
    for word in ("hardware:", "time:", "peak:", "result:"):
        assert word in header, word


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolved_config_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    config = parse(["--config", str(path)])
    copy = tmp_path / "config.yaml"
    copy.write_text(dump(config))
    assert parse(["--config", str(copy)]) == config
    assert read_recipe(copy).keys() >= read_recipe(path).keys()


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    return [line.split("#")[0].strip() for line in blocks.splitlines() if line.strip()]


def test_readme_shows_commands() -> None:
    assert "bash scripts/quickstart.sh" in readme_commands()
    assert sum("train/main.py" in command for command in readme_commands()) >= 2


@pytest.mark.parametrize("command", readme_commands())
def test_readme_command_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if "train/main.py" in words:
        parse(words[words.index("train/main.py") + 1 :])
    for word in words:
        if word.startswith(("scripts/", "accelerate_configs/", "recipes/", "train/")):
            assert (ROOT / word).exists(), word
