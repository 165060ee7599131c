"""Every recipe builds its model, and every command of the README is one that the template understands."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support import ROOT, run_for, sampled, takes_minutes

from train.config import dump, parse, read_recipe
from train.extras.readers.own_tokenizers import build_tokenizer
from train.memory.__main__ import main as plan
from train.memory.__main__ import read_request
from train.model import build_model
from train.tasks import load_task

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PLANNED = [path for path in RECIPES if "# plan:" in path.read_text(encoding="utf-8")]
"""Recipes for cards that people own, of models on the Hub: their headers have the planner's figures."""
FIGURE = r"([\d.]+) GiB"


def local(model: str, folder: Path) -> str:
    """A folder in place of a model's Hub name: with its published configuration, and without weights."""
    target = folder / model.rpartition("/")[2]
    target.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "recipes" / "configs" / f"{target.name}.json", target / "config.json")
    return str(target)


def header_of(path: Path) -> str:
    """The comment that a recipe begins with; lines that end with a backslash are joined."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return "\n".join(line[1:].strip() for line in lines).replace("\\\n", "")


def planned_by(path: Path, folder: Path) -> list[str]:
    """The arguments of ``python -m train.memory`` that the header gives, for the configuration in ``folder``."""
    [command] = re.findall(r"^plan: +python -m train\.memory (.+)$", header_of(path), re.MULTILINE)
    words = shlex.split(command)
    assert words[words.index("--config") + 1] == str(path.relative_to(ROOT))
    return [*words, "--model", local(parse(["--config", str(path)]).architecture.name, folder)]


def hold_to_the_plan(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares a header with what the planner says now; versions of transformers may differ by a little."""
    header = header_of(path)
    assert plan(planned_by(path, folder)) == 0
    said = capsys.readouterr().out
    assert said.startswith("Fits: "), said

    def printed(label: str) -> str:
        [line] = [line for line in said.splitlines() if line.startswith(label)]
        return line

    figures = re.search(rf"peak: +predicted, not run: {FIGURE} of tensors, {FIGURE} needed of {FIGURE}", header)
    assert figures is not None
    for figure, label in zip(map(float, figures.groups()), ("peak", "needed", "room"), strict=True):
        assert figure == pytest.approx(float(printed(label).split()[1]), rel=0.01), label
    hosts = re.findall(rf"host {FIGURE}", header)
    assert hosts or "host memory" not in said
    for host in hosts:
        assert float(host) == pytest.approx(float(printed("host memory").split()[2]), rel=0.01)
    time = re.search(r"time: +predicted, not run: (.+) for a micro-batch, ([\d.]+k?) tokens/s", header)
    assert time is not None
    spent, speed = re.sub(r".*estimated +", "", printed("time, estimated")).split("  forward and backward of a ")
    assert seconds_of(time[1]) == pytest.approx(seconds_of(spent), rel=0.05)
    rate = re.search(r"([\d.]+)(k?) tokens/s", speed)
    assert rate is not None
    assert time[2].endswith("k") == (rate[2] == "k")
    assert float(time[2].rstrip("k")) == pytest.approx(float(rate[1]), rel=0.05)


def seconds_of(text: str) -> float:
    """Of a duration such as ``1 min 34 s``."""
    return sum(float(number) * {"min": 60, "s": 1}[unit] for number, unit in re.findall(r"([\d.]+) (min|s)\b", text))


def test_the_table_of_recipes_has_the_figures_of_their_headers() -> None:
    page = (ROOT / "docs" / "long_sequences.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| \[([\w.]+)\]\(\.\./recipes/.*\| ([\d.]+ of [\d.]+) GiB", page, re.MULTILINE))
    found = {path.stem: re.findall(r"([\d.]+) GiB needed of ([\d.]+) GiB", header_of(path))[0] for path in PLANNED}
    assert told == {name: " of ".join(figures) for name, figures in found.items()}


def test_there_are_recipes_for_the_cards_that_people_own() -> None:
    assert [path.stem for path in PLANNED] == [
        "llama_3.1_8b_80gib",
        "llama_3.1_8b_qlora_64k_24gib",
        "llama_3.2_1b_fsdp2_2x24gib",
        "modernbert_base_8k_t4",
        "qwen3_0.6b_131k_24gib",
        "qwen3_0.6b_chat_t4",
    ]


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_header_of_a_planned_recipe_can_be_read(path: Path, tmp_path: Path) -> None:
    header, words = header_of(path), planned_by(path, tmp_path)
    request = read_request(words[0], words[1:])
    assert request.question.config == request.question.config.changed(model=words[-1])
    assert "predicted, not run" in header and "result:    not run" in header
    launches = re.findall(r"^accelerate launch (.+)$", header, re.MULTILINE)
    assert len(launches) == 1
    command = shlex.split(launches[0])
    assert (ROOT / command[command.index("--config_file") + 1]).exists()
    parse(command[command.index("train/main.py") + 1 :])


@pytest.mark.slow
@pytest.mark.parametrize("path", sampled(PLANNED, 2), ids=lambda path: path.stem)
def test_the_plan_of_a_recipe_is_in_its_header(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold_to_the_plan(path, tmp_path, capsys)


@pytest.mark.slow
@takes_minutes
def test_a_header_tells_what_is_needed_without_a_technique(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "recipes" / "qwen3_0.6b_131k_24gib.yaml"
    [offloaded] = re.findall(rf"needs gradient_checkpointing_offload \(without it {FIGURE}\)", header_of(path))
    [tiled] = re.findall(rf"without tiled_mlp it would need {FIGURE}", header_of(path))
    for flag, figure in (("gradient_checkpointing_offload", offloaded), ("tiled_mlp", tiled)):
        plan(["predict", *planned_by(path, tmp_path)[1:], f"--{flag}", "False"])
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("needed")]
        assert float(figure) == pytest.approx(float(line.split()[1]), rel=0.01), flag


# These take long; planning them builds them too.
LARGE = ("llama_3.1_8b_qlora_64k_24gib", "llama_3.1_8b_80gib", "qwen3_0.6b_131k_24gib")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in LARGE else []) for path in RECIPES],
    ids=lambda path: path.stem,
)
def test_recipe_builds_its_model(path: Path, tmp_path: Path) -> None:
    config = parse(["--config", str(path)])
    if path in PLANNED:  # without weights there is nothing to keep in 4 bits
        adapter = "none" if config.get("adapter") == "none" else "lora"
        config = config.changed(model=local(config.architecture.name, tmp_path), adapter=adapter)
    task, names = load_task(config.data.task), ("a", "b")
    tokenizer = build_tokenizer("bytes", ())
    with torch.device("meta"):
        model = build_model(run_for(config), task, tokenizer, names if task.labelled else (), path not in PLANNED)
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
