"""The shape of the house: how large it may grow, who may import whom, names that would shadow packages.

The core, ``train/*.py`` and ``train/tasks/*.py``, is what a fork reads; everything else in ``train/`` is an extra whose
folder can be deleted. A cap that hurts is a sign to simplify.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, printed_and_imported

from train import extras
from train.config import Config, parse, to_values

TRAIN = ROOT / "train"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(TRAIN.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
CORE = [name for name, path in FILES.items() if path.parent in (TRAIN, TRAIN / "tasks")]
IN_ONE_SITTING = ("main", "step", "loop", "model", "data")
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.y*ml"))
RECIPES = sorted((ROOT / "recipes").glob("*.y*ml"))


# Caps


def lines(name: str) -> list[str]:
    return FILES[name].read_text(encoding="utf-8").splitlines()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters without self; ``*args`` and ``**kwargs`` do not count."""
    own = function.args
    return sum(a.arg not in ("self", "cls") for a in (*own.posonlyargs, *own.args, *own.kwonlyargs))


def is_fixed_by_a_library(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    header = lines(name)[function.lineno - 1 : function.body[0].lineno]
    return any("# fixed by" in line for line in header)


def test_the_core_has_at_most_3000_lines_in_20_files() -> None:
    sizes = {name: len(lines(name)) for name in CORE}
    assert sum(sizes.values()) <= 3000, sizes
    assert len(CORE) <= 20, CORE


def test_the_product_has_at_most_16000_lines() -> None:
    """The package and the scripts that a person runs, without tests and benchmarks."""
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh")]
    sizes = [len(lines(name)) for name in FILES] + [len(path.read_text().splitlines()) for path in scripts]
    assert sum(sizes) <= 16000


def test_the_heart_of_the_core_has_at_most_900_lines() -> None:
    sizes = {name: len(lines(f"train.{name}")) for name in IN_ONE_SITTING}
    assert sum(sizes.values()) <= 900, sizes


def test_files_have_at_most_400_lines() -> None:
    assert {name: len(lines(name)) for name in FILES if len(lines(name)) > 400} == {}


def test_functions_have_at_most_60_lines() -> None:
    sizes = {
        f"{name}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for name, tree in TREES.items()
        for function in functions(tree)
    }
    assert {where: size for where, size in sizes.items() if size > 60} == {}


def test_functions_have_at_most_6_parameters() -> None:
    wide = {
        f"{name}: {function.name}": num_parameters(function)
        for name, tree in TREES.items()
        for function in functions(tree)
        if num_parameters(function) > 6 and not is_fixed_by_a_library(name, function)
    }
    assert wide == {}


def test_folders_of_train_are_the_core_or_extras() -> None:
    for name, path in FILES.items():
        first = path.relative_to(TRAIN).parts[0]
        assert first.endswith(".py") or first in ("tasks", "extras", "memory"), name
    assert not any(path.is_dir() for path in (TRAIN / "tasks").iterdir() if path.name != "__pycache__")


# Who imports whom


def module_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those of functions or of ``if TYPE_CHECKING``."""
    return statements(tree, in_functions=False)


def statements(tree: ast.AST, in_functions: bool = True) -> Iterator[ast.stmt]:
    """Statements that can run: not those of ``if TYPE_CHECKING``, and those of functions if asked for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not in_functions:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (n for n in node.orelse if isinstance(n, ast.stmt))
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from statements(node, in_functions)


def modules_of(nodes: Iterator[ast.AST], where: str) -> set[str]:
    """Modules of ``train`` that these nodes import; of ``from a import b`` the module a.b if there is one, else a."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{where}: relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & set(FILES) or {node.module}
    return {module for module in found if module == "train" or module.startswith("train.")}


def imports(name: str) -> set[str]:
    """Modules of ``train`` that the module ``name`` imports anywhere: in functions and for types too."""
    return modules_of(ast.walk(TREES[name]), name)


def imports_at_import(name: str) -> set[str]:
    """Those that it imports when it is imported itself."""
    return modules_of(module_level(TREES[name]), name)


def imports_when_run(name: str) -> set[str]:
    """Those that it may import at some time, which leaves out the ones for types alone."""
    return modules_of(statements(TREES[name]), name)


def below(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_room(module: str) -> bool:
    """Whether the module belongs to an extra: ``from train import extras``, which only joins them, does not count."""
    return below(module, "train.memory") or module.startswith("train.extras.")


def test_the_reader_of_imports_sees_them() -> None:
    assert {"train.config", "train.records", "train.extras"} <= imports_at_import("train.main")
    assert "train.model" in imports_when_run("train.main") - imports_at_import("train.main")
    assert "train.data" in imports("train.extras") - imports_when_run("train.extras")  # for types alone
    code = "from train import extras\ndef f():\n    from train.extras import meter\n    import train.memory.plan"
    assert {m for m in modules_of(ast.walk(ast.parse(code)), "code") if is_room(m)} == {
        "train.extras.meter",
        "train.memory.plan",
    }


def test_the_core_imports_no_extra() -> None:
    found = {name: sorted(filter(is_room, imports(name))) for name in CORE}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_the_core_names_no_extra_to_import() -> None:
    """``import_module("train.memory…")`` would be an import, too: only ``train/extras/__init__.py`` does that."""
    for name in CORE:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                assert not any(is_room(str(a.value)) for a in node.args if isinstance(a, ast.Constant)), name


ALLOWED = {
    "train.records": set(),
    "train.config": {"train.extras", "train.launch", "train.records"},
    "train.launch": set(),
    "train.batching": {"train.config", "train.records"},
    "train.step": {"train.config", "train.records"},
    "train.optim": {"train.batching", "train.config", "train.records"},
    "train.tasks": {"train.config", "train.records"},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_ground_floor_imports_nothing_above_it(name: str) -> None:
    assert imports_when_run(name) - {"train.records", "train"} <= ALLOWED[name]


def test_tasks_and_readers_know_no_model_and_models_no_reader() -> None:
    for name in FILES:
        if below(name, "train.tasks", "train.extras.readers"):
            assert not any(below(module, "train.model", "train.loop") for module in imports(name)), name
    for name in ("train.model", "train.step"):
        assert not any(below(module, "train.extras", "train.checkpoint") for module in imports(name)), name


def test_the_loop_is_handed_what_is_built_elsewhere() -> None:
    built = ("train.tasks", "train.model", "train.checkpoint", "train.extras", "train.main")
    assert not any(below(module, *built) for module in imports_when_run("train.loop"))


def test_nothing_imports_the_composition_root() -> None:
    for name in FILES:
        assert name == "train.main" or "train.main" not in imports_when_run(name), name


def test_no_import_goes_in_a_circle() -> None:
    graph = {name: imports_when_run(name) & set(FILES) for name in FILES}  # in functions, too
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


# One step, and tasks that nobody names


def test_there_is_one_step() -> None:
    """Recovery, DeepSpeed, the rehearsal and the planner call it; none has a step of its own."""
    steps = []
    for name, tree in TREES.items():
        for function in functions(tree):
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            called = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            if {"backward", "zero_grad"} <= called or function.name == "optimizer_step":
                steps.append(f"{name}: {function.name}")
    assert [step for step in steps if step != "train.step: optimizer_step"] == []
    assert len(steps) == 1


def test_tasks_are_named_by_their_folder_and_the_default_alone() -> None:
    told, tasks = {}, {path.stem for path in (TRAIN / "tasks").glob("[!_]*.py")}
    assert len(tasks) >= 3  # a fork has tasks of its own
    for name, tree in TREES.items():
        if not below(name, "train.tasks", "train.config"):
            found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & tasks
            told |= {name: found} if found else {}
    assert told == {}


def test_every_folder_of_extras_is_joined_and_defines_only_what_is_called() -> None:
    """One that is not in NAMES would do nothing, nor would a method with a misspelt name."""
    folders = {path.parent.name for path in (TRAIN / "extras").glob("*/__init__.py")}
    assert folders <= {*extras.NAMES.split()}, "add it to NAMES in train/extras/__init__.py"
    for name, found in extras.classes().items():
        own = {method for method, value in vars(found).items() if callable(value) and method[0] != "_"}
        assert own <= {*vars(extras.Extra)}, f"{name}: nothing calls such a method; one of its own begins with _"


# Names and files


def test_no_file_of_train_shadows_a_package() -> None:
    """``accelerate launch train/main.py`` puts the folder first on ``sys.path``."""
    installed = {name.lower() for name in importlib.metadata.packages_distributions()} - {"train"}
    assert {"datasets", "accelerate", "torch"} <= installed
    for path in TRAIN.iterdir():
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
    launch, scaling = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("launch.md", "scaling.md"))
    assert f"| `{path.name}` |" in launch
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
    printed, imported = printed_and_imported("train/main.py", "--help")
    assert "--micro_batch_size" in printed
    assert "train.config" in imported
    assert not imported & set(HEAVY)


def test_what_takes_long_to_import_and_few_runs_need_is_imported_where_it_is_used() -> None:
    slow = {"evaluate", "matplotlib", "peft", "bitsandbytes", "deepspeed", "torch.nn.attention.varlen"}

    def imported(node: ast.stmt) -> set[str]:
        if isinstance(node, ast.ImportFrom):
            return {node.module or "", (node.module or "").partition(".")[0]}
        return {
            part
            for a in getattr(node, "names", ())
            if isinstance(node, ast.Import)
            for part in (a.name, a.name.partition(".")[0])
        }

    found = {name: {m for node in module_level(tree) for m in imported(node)} & slow for name, tree in TREES.items()}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_every_option_is_read_by_something() -> None:
    code = "\n".join(path.read_text() for path in TRAIN.rglob("*.py") if path.name != "config.py")
    unread = [name for name in to_values(Config()) if not re.search(rf"\.{name}\b|\"{name}\"", code)]
    assert unread == []
