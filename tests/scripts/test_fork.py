"""A fork: a copy with some extras alone trains, lints, and runs its own tests; wrong names get a message."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.processes import script
from support import ROOT, printed_and_imported, sampled

from scripts import fork
from train import extras
from train.config import parse, read_recipe

# An editable installation of this repository would lend the copy what it was forked without.
OWN_IMPORTS = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
DATA = """
import datasets


def documents(config):
    return datasets.Dataset.from_dict({"text": [f"document {n}: " + "abc def " * (n % 7) for n in range(25)]})
"""
PROGRAM = """
import sys
import train
from train.main import main

print("package:", train.__file__)
sys.exit(main(sys.argv[1:]))
"""
SHAPE = {"n_embd": 16, "n_layer": 2, "n_head": 2}
MODEL = f"""
from transformers import AutoModelForCausalLM, GPT2Config


def build():
    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=259, **{SHAPE}))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The fork that some flags make; each is made once."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*words: str) -> Path:
        if words not in made:
            made[words] = tmp_path_factory.mktemp("forks") / "my project"
            assert fork.main([str(made[words]), *words]) == 0
        return made[words]

    return make


def run_in(folder: Path, scratch: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a fork, which finds no other copy of the template."""
    (scratch / "sitecustomize.py").write_text(OWN_IMPORTS)
    path = os.pathsep.join([str(folder), str(scratch)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


FORKS = [("--only",), ()]
"""The smallest and the largest."""
WITHOUT = [("--without", *names) for names in (("parallelism", "report"), ("activations",), ("meter",))]


@pytest.mark.slow
@pytest.mark.parametrize("words", [*FORKS, WITHOUT[0]])
def test_no_link_of_a_fork_leads_nowhere(words: tuple[str, ...], forked: Callable[..., Path]) -> None:
    folder = forked(*words)
    pages = [*(folder / "docs").rglob("*.md"), folder / "README.md"]
    links = [(page, found[2]) for page in pages for found in fork.LINK.finditer(page.read_text())]
    assert [(page.name, to) for page, to in links if not (page.parent / to).exists()] == []
    about_extras = {path.stem for path in (folder / "docs" / "extras").glob("*.md")}
    gone = {"--only": set(extras.ORDER), "": set()}.get(words[0] if words else "", {"parallelism", "report"})
    assert about_extras == set(extras.ORDER) - gone


@pytest.mark.parametrize(
    "words", [FORKS[0], *(pytest.param(w, marks=pytest.mark.slow) for w in sampled([*FORKS[1:], *WITHOUT], 2))]
)
def test_three_steps_train_in_the_fork(words: tuple[str, ...], forked: Callable[..., Path], tmp_path: Path) -> None:
    from train.extras.readers.own_tokenizers import build_tokenizer

    folder, of_gpt2 = forked(*words), {"model_type": "gpt2", **SHAPE}
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my_model.py").write_text(MODEL)
    build_tokenizer("bytes", ()).save_pretrained(tmp_path / "tokenizer")
    flags = {
        "task": "causal_lm",
        "dataset": "my_data:documents",
        "tokenizer": tmp_path / "tokenizer",
        **({"model": "my_model:build"} if words == ("--only",) else {"model_config": json.dumps(of_gpt2)}),
        "max_length": 64,
        "max_steps": 3,
        "output_dir": tmp_path / "run",
        **({} if words == ("--only",) else {"cpu_threads": 1}),
        **({"predict_memory": False} if (folder / "train" / "memory").exists() else {}),  # a planner takes seconds
    }
    (tmp_path / "program.py").write_text(PROGRAM)
    command = (tmp_path / "program.py", *(f"--{name}={value}" for name, value in flags.items()))
    path = os.pathsep.join([str(folder), str(tmp_path)])
    done = script(command, 1, {**os.environ, "PYTHONPATH": path}, folder, alone=True)
    assert done.returncode == 0, done.stderr
    assert f"package: {folder / 'train' / '__init__.py'}" in done.stdout
    gone = (*words[1:], *({"memory"} if {"meter", "hardware"} & {*words} else ()))
    kept = [] if words == ("--only",) else [name for name in extras.ORDER if name not in gone]
    assert f"extras: {', '.join(kept) or 'none'}" in done.stdout.splitlines()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


@pytest.mark.parametrize(
    "words",
    [FORKS[0], WITHOUT[0], *(pytest.param(f, marks=pytest.mark.slow) for f in (FORKS[1], *WITHOUT[1:]))],
    ids=" ".join,
)
def test_the_fork_is_clean(words: tuple[str, ...], forked: Callable[..., Path], tmp_path: Path) -> None:
    folder = forked(*words)
    for command in (["check"], ["format", "--check"]):
        done = run_in(folder, tmp_path, "-m", "ruff", *command, "--no-cache", ".")
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", sampled([*FORKS, *WITHOUT], 6), ids=" ".join)
def test_the_tests_of_the_fork_are_found(words: tuple[str, ...], forked: Callable[..., Path], tmp_path: Path) -> None:
    done = run_in(forked(*words), tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", sampled([FORKS[0], WITHOUT[2]], 2), ids=" ".join)
def test_the_types_of_a_fork_are_checked(words: tuple[str, ...], forked: Callable[..., Path], tmp_path: Path) -> None:
    command = ("-m", "pyrefly", "check", "--python-interpreter-path", sys.executable)
    done = run_in(forked(*words), tmp_path, *command)
    assert done.returncode == 0 and "Invalid" not in done.stderr, done.stdout + done.stderr
    wrong = forked(*words) / "scripts" / "wrong.py"
    wrong.write_text('number: int = "one"\n')
    said = run_in(forked(*words), tmp_path, *command, "--output-format", "min-text").stdout
    wrong.unlink()
    assert "wrong.py:1:15" in said


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (FORKS[0], ["tests/extras/test_combinations.py"]),
        pytest.param(FORKS[1], ["tests/extras/readers/test_corpora_tables.py"], marks=pytest.mark.slow),
        pytest.param(WITHOUT[0], ["tests/test_config.py", "tests/test_architecture.py"], marks=pytest.mark.slow),
    ],
)
def test_tests_of_the_fork_pass(
    words: tuple[str, ...], more: list[str], forked: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "tests.py").write_text("import pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))\n")
    command = (tmp_path / "tests.py", "-p", "no:cacheprovider", "tests/test_step.py", *more)
    done = script(command, 1, {**os.environ, "PYTHONPATH": str(forked(*words))}, forked(*words), alone=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout or re.search(r"\.{5,}", done.stdout)


def test_the_largest_fork_has_all_but_the_histories(forked: Callable[..., Path]) -> None:
    folder = forked()
    for path in (ROOT / "train").rglob("*.py"):
        assert (folder / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert read_recipe(folder / path.relative_to(ROOT)) == read_recipe(path)
    for name in ("pyproject.toml", "constraints.txt", "LICENSE", ".gitignore", "scripts/test.sh"):
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()
    for name in (
        "CHANGELOG.md",
        ".git",
        "docs/results",
        "scripts/benchmarks",
        "scripts/study.py",
        "tests/scripts/test_study.py",
    ):
        assert not (folder / name).exists(), name
    assert os.access(folder / "scripts" / "test.sh", os.X_OK) == os.access(ROOT / "scripts" / "test.sh", os.X_OK)
    assert f"Extras: {', '.join(extras.ORDER)}." in (folder / "README.md").read_text()


def test_the_smallest_fork_has_nothing_of_an_extra(forked: Callable[..., Path]) -> None:
    folder = forked("--only")
    assert not (folder / "train" / "memory").exists() and not (folder / "tests" / "memory").exists()
    rooms = {path.name for path in (folder / "train" / "extras").iterdir() if path.is_dir()}
    assert rooms <= {"__pycache__"}
    helpers = {path.name for path in (folder / "train" / "extras").glob("*.py")}
    assert helpers == {"__init__.py", "cache.py"}  # the last is for recipes
    launch_files = {path.stem for path in (folder / "accelerate_configs").iterdir()}
    assert launch_files == {"cpu", "ddp", "ddp_multi_node", "fsdp2", "fsdp2_multi_node", "fsdp2_offload", "single_gpu"}
    kept = [path.name for path in (folder / "recipes").glob("*.yaml")]
    assert sorted(kept) == [
        "modernbert_base_8k_t4.yaml",
        "qwen3_0.6b_chat_t4.yaml",
    ]  # all others read text or make a tokenizer
    configs = [parse(["--config", str(folder / "recipes" / name)]) for name in sorted(kept)]
    assert [config.data.max_length for config in configs] == [8192, 16384]
    assert not (folder / "scripts" / "quickstart.sh").exists()
    assert "Extras: none." in (folder / "README.md").read_text()
    for path in {*(folder / "tests").rglob("*.py")} - {folder / "tests" / "faults" / "preload.py"}:
        gone = "|".join(extras.ORDER.values()).replace(".", r"\.")
        assert not re.search(rf"\b({gone})\b", path.read_text()), path
    assert "predict_memory" not in (folder / "tests" / "support.py").read_text()


def test_a_file_of_tests_loses_those_that_need_what_is_gone_and_keeps_the_others(forked: Callable[..., Path]) -> None:
    def names(folder: Path, file: str) -> set[str]:
        return {*re.findall(r"^def (test_\w+)", (folder / "tests" / file).read_text(), re.MULTILINE)}

    fork_without_memory = forked("--without", "memory")
    lost = set[str]()
    for file in ("test_config.py", "test_evaluation.py", "test_checkpoint.py", "test_loop.py"):
        every, kept = names(ROOT, file), names(fork_without_memory, file)
        assert kept <= every and len(kept) > 0.7 * len(every), every - kept
        lost |= every - kept
    assert lost


def test_only_tests_and_imports_with_a_sign_of_what_is_gone_are_cut() -> None:
    text = """import math
import os, re
from a import (
    b,
    c as d,
)

ROOT = os.getcwd()


@mark("gone")
def test_one():
    assert math.pi and d(re)


def test_two():
    assert b


def helper():
    return "gone" * 0
"""
    cut = fork.without_tests(text, re.compile("gone"))
    assert "test_one" not in cut and "math" not in cut and "d" not in re.findall(r"\w+", cut)
    assert cut.startswith("import os\nfrom a import b\n\nROOT = os.getcwd()\n")
    assert "def test_two():\n    assert b\n" in cut and "helper" not in cut
    used = text.replace("assert b", "assert helper()")
    assert "def helper" in fork.without_tests(used, re.compile("gone"))  # for which the whole file stays behind
    assert fork.without_tests(text, re.compile("absent")) == text


def test_recipes_lose_the_keys_of_what_is_gone(forked: Callable[..., Path]) -> None:
    folder = forked("--without", "activations")
    own, copied = (read_recipe(root / "recipes" / "quickstart.yaml") for root in (ROOT, folder))
    assert own.pop("gradient_checkpointing") == "full"
    assert copied == own
    assert parse(["--config", str(folder / "recipes" / "quickstart.yaml")]).data.dataset == "stdlib"
    assert not (folder / "tests" / "extras" / "activations").exists()
    assert (folder / "tests" / "extras" / "readers").exists()


def test_a_recipe_stays_behind_with_what_makes_it_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fork.main([str(tmp_path / "new"), "--without", "adapters", "long_sequences", "optimizers"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert said == [
        "recipes/llama_3.1_8b_80gib.yaml needs optimizers: left out",
        "recipes/llama_3.1_8b_qlora_64k_24gib.yaml needs adapters: left out",
        "recipes/qwen3_0.6b_131k_24gib.yaml needs long_sequences: left out",
    ]


@pytest.mark.slow
def test_a_recipe_stays_behind_with_the_extra_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fork.main([str(tmp_path / "new"), "--without", "readers", "losses"]) == 0
    said = capsys.readouterr().out.splitlines()
    for name, extra in (("quickstart.yaml", "readers"), ("dpo.py", "losses")):
        assert f"recipes/{name} needs {extra}: left out" in said
        assert not (tmp_path / "new" / "recipes" / name).exists()
    assert (tmp_path / "new" / "recipes" / "chat.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line", "has_memory"),
    [
        (["--without", "meter"], "memory needs meter: left out, too", False),
        (["--only", "memory"], "memory needs hardware, meter: kept, too", True),
    ],
)
def test_memory_needs_the_meter(
    words: list[str], line: str, has_memory: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fork.main([str(tmp_path / "new"), *words]) == 0
    assert line in capsys.readouterr().out.splitlines()
    for name in ("memory", "extras/meter"):
        assert (tmp_path / "new" / "train" / name).exists() == has_memory


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--without", "reprot"], "invalid choice: 'reprot' (choose from "),
        (["--only", "Meter"], "invalid choice: 'Meter' (choose from "),
        (["--only", "meter", "--without", "report"], "not allowed with argument"),
        (["--without"], "expected at least one argument"),
    ],
)
def test_wrong_names_end_with_a_message(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fork.main([str(tmp_path / "new"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_target_that_is_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "notes.txt", ROOT / "train" / "new"):
        with pytest.raises(SystemExit) as ended:
            fork.main([str(target), "--only"])
        assert ended.value.code == 2
        assert f"{target} is not empty, or inside the template" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert fork.main([str(empty), "--only"]) == 0


def test_help_imports_nothing_heavy() -> None:
    printed, imported = printed_and_imported("scripts/fork.py", "--help")
    assert "--without" in printed and "train.extras" in imported
    assert not imported & {"torch", "transformers", "datasets", "accelerate"}
