"""The shape of the house: who may import whom, names that would shadow packages, files that must parse."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.config import Config, parse, to_values

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "train").rglob("*.py"))
}
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.y*ml"))
RECIPES = sorted((ROOT / "recipes").glob("*.y*ml"))


def module_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those of functions or of ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (n for n in node.orelse if isinstance(n, ast.stmt))
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from module_level(node)


def imports(name: str, everywhere: bool = True) -> set[str]:
    """Modules of ``train`` that the module ``name`` imports, in functions and for types too if ``everywhere``."""
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if everywhere else module_level(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(FILES)
            found |= submodules or {node.module}
    return {module for module in found if module == "train" or module.startswith("train.")}


def below(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_reader_of_imports_sees_them() -> None:
    assert {"train.config", "train.errors", "train.tasks"} <= imports("train.main", everywhere=False)
    assert "train.model" in imports("train.main") - imports("train.main", everywhere=False)
    assert imports("train.extras.readers.corpus") >= {"train.extras.readers.files", "train.records", "train.config"}
    assert "train.config" not in imports("train.extras.readers.corpus", everywhere=False)  # for types alone


ALLOWED = {
    "train.errors": set(),
    "train.records": {"train.errors"},
    "train.config": {"train.errors"},
    "train.extras.parallelism.vocabulary": {"train.records"},
    "train.cross_entropy": {"train.records"},
    "train.extras.losses.chunked": {"train.records", "train.cross_entropy", "train.extras.parallelism.vocabulary"},
    "train.extras.losses.fused": {"train.records", "train.cross_entropy", "train.extras.losses.chunked"},
    "train.extras.losses.answering_head": {
        "train.cross_entropy",
        "train.extras.losses.chunked",
        "train.extras.parallelism.vocabulary",
    },
    "train.loss": {
        "train.errors",
        "train.cross_entropy",
        "train.extras.losses.chunked",
        "train.extras.losses.fused",
        "train.extras.losses.answering_head",
        "train.extras.parallelism.vocabulary",
    },
    "train.extras.parallelism.context": {"train.records", "train.errors"},
    "train.step": {"train.records", "train.loss", "train.extras.parallelism.context", "train.config", "train.errors"},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_ground_floor_imports_nothing_above_it(name: str) -> None:
    assert imports(name) <= ALLOWED[name]


def test_tasks_and_corpora_know_no_model_and_models_neither() -> None:
    for name in FILES:
        if below(name, "train.tasks", "train.extras.readers.corpus"):
            assert not any(below(module, "train.model") for module in imports(name)), name
    assert not any(below(module, "train.tasks", "train.extras.readers.corpus") for module in imports("train.model"))


def test_the_loop_is_handed_what_is_built_elsewhere() -> None:
    built = (
        "train.data",
        "train.tasks",
        "train.extras.readers.corpus",
        "train.model",
        "train.checkpoint",
        "train.extras.report",
    )
    assert not any(below(module, *built) for module in imports("train.loop"))


def test_nothing_imports_the_composition_root() -> None:
    for name in FILES:
        if not below(name, "train.main", "train.memory"):
            assert "train.main" not in imports(name), name


def test_the_core_works_without_the_memory_branch() -> None:
    for name in FILES:
        if not below(name, "train.memory", "train.main"):
            assert not any(below(module, "train.memory") for module in imports(name)), name
    assert not any(below(module, "train.memory") for module in imports("train.main", everywhere=False))


def test_no_import_goes_in_a_circle() -> None:
    graph = {name: imports(name, everywhere=False) & set(FILES) for name in FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path, name))
        if name not in done:
            for module in graph[name]:
                if module != name.rpartition(".")[0]:  # a package is there before its modules
                    visit(module, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_file_of_train_shadows_a_package() -> None:
    installed = {name.lower() for name in importlib.metadata.packages_distributions()} - {"train"}
    for path in (ROOT / "train").iterdir():
        name = path.stem.lower()
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert name not in sys.stdlib_module_names, path.name
            assert name not in installed, path.name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_parses(path: Path) -> None:
    config = parse(["--config", str(path)])
    assert config.architecture.model or config.architecture.model_config


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_accelerate_configuration_loads(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).to_dict()["num_processes"] >= 1


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_accelerate_configuration_is_explained(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    readme, scaling = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/scaling.md"))
    assert f"| `{path.name}` |" in readme
    assert path.stem == "cpu" or f"`{path.stem}`" in scaling


def test_there_are_recipes_and_configurations_to_test() -> None:
    assert RECIPES and YAMLS


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


HEAVY = ("torch", "transformers", "datasets", "accelerate", "evaluate")


def test_configuration_imports_nothing_heavy() -> None:
    done = python("-c", f"import sys, train.config; print([m for m in {HEAVY} if m in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_help_answers_without_importing_anything_heavy() -> None:
    done = python("-X", "importtime", "train/main.py", "--help")
    assert done.returncode == 0
    assert "--micro-batch-size" in done.stdout.replace("_", "-")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "train.config" in imported
    assert not imported & set(HEAVY)


def test_every_option_is_read_by_something() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "train").rglob("*.py") if path.name != "config.py")
    unread = [name for name in to_values(Config()) if not re.search(rf"\.{name}\b|\"{name}\"", code)]
    assert unread == []
