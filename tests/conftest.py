"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, Run, forget_device, write_recipe

from train.extras import classes

# Read when a test file first imports a library:
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait would take the cores that other tests need
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are small: a second thread costs more than it computes
# Scripts that tests start import from test files, which lie in folders like those of what they test.
_FOLDERS = sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts})
os.environ["PYTHONPATH"] = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
LLAMA = (
    "  {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, tie_word_embeddings: true}"
)
LONG = (
    "faults",
    "scripts",
    "extras/endurance",
    "extras/parallelism",
    "memory",
    "test_recipes",
    "test_emulated",
    "test_fsdp2",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few tests that take long come first, so that no process is left with them at the end."""
    items.sort(key=lambda item: not str(item.path.relative_to(ROOT / "tests")).startswith(LONG))


def pytest_collection_finish() -> None:
    """Garbage collection runs seldom: that saves about a tenth of the time."""
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def _collections_skip_what_earlier_files_left() -> None:
    """Imported modules above all: a run collects at its steps, and each time would visit a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_network_and_own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is fetched, and what 🤗 datasets caches goes with the test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        import datasets.config

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(os.environ["HF_DATASETS_CACHE"]))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(autouse=True)
def _environment_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets.map`` with several processes puts a copy in its place, which functions imported before do not see."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture(autouse=True)
def _device_of_its_own() -> Iterator[None]:
    """accelerate keeps device and precision of a process's first Accelerator; each test begins without one."""
    forget_device()
    yield
    forget_device()


@pytest.fixture(autouse=True)
def _no_charts_and_samples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take half of a small run's time; tests that look at them are marked ``charts``."""
    if request.node.get_closest_marker("charts") is None and (report := classes().get("report")):
        monkeypatch.setattr(f"{report.__module__}.charts.svg", lambda *arguments, **options: "<svg></svg>")
        monkeypatch.setattr(f"{report.__module__}.sample.sample", lambda *arguments: None)


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """A run that was stopped within a test leaves SIGTERM ignored, which processes of later tests would inherit."""
    before = {number: signal.getsignal(number) for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1")}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def planner_from_scratch() -> Iterator[Any]:
    """A process that predicts takes seconds to load its libraries; a fork has them. Yields how a user's starts."""
    with pytest.MonkeyPatch.context() as patch:
        plain = None
        if memory := classes().get("memory"):
            predictor = import_module(f"{memory.__module__}.predict").Predictor

            def start(one: Any) -> Any:  # imported here, since it imports torch; a fork without memory has no such file
                return import_module("faults.predictors").start(one)

            plain = predictor.start
            patch.setattr(predictor, "start", start)
        yield plain


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that trains in a second: 25 documents of different lengths, dropout on, a short last window."""
    return write_recipe(tmp_path)


@pytest.fixture
def llama_recipe(recipe: Path) -> Path:
    """The common recipe with a model whose tensors and sequences can be divided."""
    lines = recipe.read_text().splitlines()
    where = next(number for number, line in enumerate(lines) if "model_type: gpt2" in line)
    recipe.write_text("\n".join([*lines[:where], LLAMA, *lines[where + 1 :]]) + "\n")
    return recipe


@pytest.fixture
def run_main() -> Run:
    """Runs ``train/main.py`` as a process of its own, as a user would, or by the command in ``prefix``."""

    def run(*arguments: Any, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Any:
        words, environment = (ROOT / "train" / "main.py", *arguments), {**os.environ, **(env or {})}
        if not prefix:
            from faults.processes import script  # here: it imports torch

            return script(words, 1, environment)
        return subprocess.run(
            [*prefix, *map(str, words)], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
        )

    return run
