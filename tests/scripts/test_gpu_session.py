"""Half an hour on a card: what runs when, what is kept, and each piece's small equivalent on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ROOT, sampled, takes_minutes

from scripts.benchmarks import building, gpu_session, harness
from train.records import EXIT_DONE, EXIT_ERROR, EXIT_STOPPED

SESSION = ROOT / "scripts" / "gpu_session.sh"
ENOUGH = ("torch", "transformers", "accelerate", "numpy")
"""Packages that a machine with a card has, and what they need."""


def others(*packages: str) -> set[str]:
    """Modules of all packages that are installed here, except ``ENOUGH`` and what they need, and ``packages``."""
    there, waiting = {named(package) for package in packages}, list(ENOUGH)
    while waiting:
        name = named(waiting.pop())
        if name not in there:
            there.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                needed = [requirement for requirement in metadata.requires(name) or [] if "extra ==" not in requirement]
                waiting += needed
    kept, found = {"train"}, set[str]()
    for distribution in metadata.distributions():
        is_there = named(distribution.metadata["Name"]) in there
        (kept if is_there else found).update(modules_of(distribution))
    return found - kept


def modules_of(distribution: metadata.Distribution) -> set[str]:
    """The names that it can be imported by; Python 3.10 itself knows those of some only."""
    files = [file for file in distribution.files or () if file.suffix in (".py", ".so") and ".." not in file.parts]
    return {file.parts[0].partition(".")[0] for file in files}


def named(package: str) -> str:
    """A package's name without version and as the index spells it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", package)[0].lower())


class Card:
    """Runs nothing, and says how each piece ended and how long it took.

    Args:
        statuses: by a part of the script's name: exit statuses in turn; None: it took too long.
        seconds: of each.
    """

    def __init__(self, statuses: dict[str, list[int | None]], seconds: float = 40.0) -> None:
        self.now, self.seconds, self.statuses = 0.0, seconds, statuses
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.limits: list[float] = []

    def clock(self) -> float:
        return self.now

    def run(self, command: list[str], log: Any, environment: dict[str, str], seconds: float) -> int | None:
        self.commands.append(command)
        self.environments.append(environment)
        self.limits.append(seconds)
        found = next((left for word, left in self.statuses.items() if word in command[1]), [])
        status = found.pop(0) if found else EXIT_DONE
        self.now += seconds if status is None else min(self.seconds, seconds)
        return status

    def names(self) -> list[str]:
        return [Path(part).stem for command in self.commands for part in command[1:2]]


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> gpu_session.Options:
    found = {"card": "nvidia-h100", "gib": "79.1", "half": "bf16"}
    monkeypatch.setattr(gpu_session, "card", lambda: found)
    monkeypatch.delenv("OUT", raising=False)
    return gpu_session.Options(folder=tmp_path / "kept")


def go(options: gpu_session.Options, card: Card) -> int:
    chosen = [piece for piece in gpu_session.pieces() if not options.only or piece.name in options.only]
    return gpu_session.Session(options, card.run, card.clock).go(chosen)


def test_the_pieces_fit_into_half_an_hour_and_each_into_a_call() -> None:
    pieces = gpu_session.pieces()
    assert len({piece.name for piece in pieces}) == len(pieces)
    assert sum(piece.seconds for piece in pieces) <= 30 * 60
    assert all(piece.seconds < 8 * 60 - gpu_session.BETWEEN_SECONDS for piece in pieces)
    for piece in pieces:  # what they run is there, and has their flags
        files = [word for word in (*piece.words, *(piece.small or ())) if word.endswith(".py")]
        assert files and all((ROOT / file).exists() for file in files)


def test_dry_run_shows_the_pieces_and_their_limits() -> None:
    words = ["bash", str(SESSION), "--dry_run"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    for piece in gpu_session.pieces():
        assert f"| {piece.name} |" in done.stdout
    assert "30 minutes in all, 8 a call: 4 calls or more." in done.stdout


def test_calls_go_on_where_the_last_one_stopped(on_a_card: gpu_session.Options) -> None:
    card = Card({"memory_accuracy": [EXIT_STOPPED, EXIT_DONE]}, seconds=170.0)
    seen = []
    while go(on_a_card, card) == EXIT_STOPPED:
        card.now += 1000.0
        seen.append(len(card.commands))
        assert len(seen) < 10
    assert card.names() == [
        "-m", "attention_kernels", "memory_accuracy", "ladder",
        "memory_accuracy", "real_runs", "long_sequence", "ladder",
        "loss_kernels", "recompute", "optimizers",
        "ladder", "study",
    ]  # fmt: skip
    assert all(before < after for before, after in pairwise(seen))  # each call got further
    commands = len(card.commands)
    assert go(on_a_card, card) == EXIT_DONE and len(card.commands) == commands


def test_a_call_ends_in_time(on_a_card: gpu_session.Options) -> None:
    card = Card({"": [None] * 20})
    assert go(on_a_card, card) != EXIT_DONE
    assert card.now <= 60 * on_a_card.minutes - gpu_session.BETWEEN_SECONDS
    for command, limit in zip(card.commands, card.limits, strict=True):
        for budget in (word for flag, word in pairwise(command) if flag == "--budget_seconds"):
            assert float(budget) <= limit - gpu_session.CLOSING_SECONDS


def test_a_failed_piece_is_said_and_the_others_run(
    on_a_card: gpu_session.Options, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card({"attention_kernels": [EXIT_ERROR]}, seconds=1.0)
    assert go(replace(on_a_card, minutes=60), card) == EXIT_ERROR
    assert "attention: FAILED with status 1" in capsys.readouterr().out
    assert len(card.commands) == sum(piece.seconds > 0 for piece in gpu_session.pieces())
    again = Card({})
    assert go(replace(on_a_card, again=("attention",)), again) == EXIT_DONE
    assert again.names() == ["attention_kernels"]
    more = Card({}, seconds=1.0)
    assert go(replace(on_a_card, more=True), more) == EXIT_DONE
    assert more.names() == ["ladder", "ladder", "long_sequence", "-m", "ladder"]
    assert ["--cap_gib" in command for command in more.commands] == [True, False, False, False, False]


def test_a_large_card_is_held_to_a_small_one_and_a_small_one_is_not(
    on_a_card: gpu_session.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(on_a_card, only=("ladder_24", "sweep"))
    card = Card({}, seconds=1.0)
    assert go(options, card) == EXIT_DONE
    assert card.commands[0][-2:] == ["--cap_gib", "24"]
    assert [environment[building.CAP] for environment in card.environments] == ["24", "24"]
    assert any("sweep-nvidia-h100-24gib" in word for word in card.commands[1])
    assert "bf16" in card.commands[1] and "{" not in "".join(w for w in card.commands[1] if "model_type" not in w)
    monkeypatch.setattr(gpu_session, "card", lambda: {"card": "tesla-t4", "gib": "14.6", "half": "fp16"})
    small = Card({}, seconds=1.0)
    assert go(replace(options, again=options.only), small) == EXIT_DONE
    assert "--cap_gib" not in small.commands[0] and "fp16" in small.commands[1]
    assert all(building.CAP not in environment for environment in small.environments)


def test_a_piece_without_its_packages_is_left_out_and_not_a_failure(
    on_a_card: gpu_session.Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    card = Card({}, seconds=1.0)
    assert go(replace(on_a_card, minutes=60), card) == EXIT_DONE
    assert "-m" not in card.names() and "real_runs" not in card.names() and "ladder" in card.names()
    assert "tests: left out, needs datasets, not installed" in capsys.readouterr().out


def test_results_come_back_as_one_archive(
    on_a_card: gpu_session.Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    (on_a_card.folder / "sweep").mkdir(parents=True)
    (on_a_card.folder / "sweep" / "index.html").write_text("page")
    (on_a_card.folder / "site").mkdir()
    (on_a_card.folder / "site" / "package.json").write_text("{}")
    assert go(replace(on_a_card, only=("optimizers",)), Card({})) == EXIT_DONE
    [path] = out.iterdir()
    with tarfile.open(path) as archive:
        names = {Path(name).relative_to("gpu_session").as_posix() for name in archive.getnames()}
    assert names == {"session.json", "optimizers.log", "sweep/index.html"}


def test_results_of_a_folder_here_are_kept_in_docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "docs" / "results")
    folder = tmp_path / "runs" / "gpu_session"
    (folder / "sweep").mkdir(parents=True)
    for name in ("session.json", "check.log", "ladder-h100.json", "sweep/sweep.md"):
        (folder / name).write_text("")
    gpu_session.publish(folder, is_result=False)
    assert not harness.RESULTS.exists()
    gpu_session.publish(folder)
    kept = {path.relative_to(harness.RESULTS).as_posix() for path in harness.RESULTS.rglob("*") if path.is_file()}
    assert kept == {"ladder-h100.json", "sweep/sweep.md"}


def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    """A measurement that is given up must not keep the card for itself."""
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)"
    log = tmp_path / "log"
    with log.open("wb") as file:
        words = [sys.executable, "-c", f"{parent}; import time; time.sleep(60)"]
        assert gpu_session.ended(words, file, dict(os.environ), 5) is None
    [pid], deadline = log.read_text().split(), time.monotonic() + 20
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_wheels_are_those_of_the_constraints() -> None:
    command = gpu_session.Download(Path("wheels"), ("bitsandbytes",)).command()
    assert "--no-deps" in command and "--python-version" in command
    assert command[-2:] == ["liger-kernel>=0.8,<0.9", "bitsandbytes"]
    header = SESSION.read_text().split("\nset ")[0].replace("\n#", "")
    for name in gpu_session.WHEELS:
        assert name.split(">")[0] in header


# ---- a machine without these packages --------------------------------------------------------------------------------


def python_without(hidden: set[str], folder: Path) -> dict[str, str]:
    """Variables of a Python that lacks the modules ``hidden``, and knows nothing of the packages that have them."""
    folder.mkdir()
    packages = {d.metadata["Name"] for d in metadata.distributions() if modules_of(d) and modules_of(d) <= hidden}
    (folder / "sitecustomize.py").write_text(
        f"""
import importlib.abc, importlib.machinery, sys
HIDDEN, PACKAGES = {hidden!r}, {packages!r}

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in HIDDEN:
            path = [entry for entry in sys.path if "site-packages" not in entry]
        return super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **options):
        return (d for d in super().find_distributions(*args, **options) if d.metadata["Name"] not in PACKAGES)

sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""
    )
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**known, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """Variables of a Python that has torch, transformers, accelerate, numpy and what these need, and nothing else."""
    hidden = others()
    lacks = {"datasets", "evaluate", "pyarrow", "xxhash", "multiprocess", "dill", "matplotlib", "pytest", "pandas"}
    assert hidden.issuperset(lacks)
    assert hidden.isdisjoint({"torch", "transformers", "accelerate", "numpy", "yaml", "tqdm", "psutil", "filelock"})
    return python_without(hidden, tmp_path / "hides")


def small(name: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = ["--small", "--minutes", "30", "--only", name, "--folder", str(folder)]
    script = str(ROOT / "scripts" / "benchmarks" / "gpu_session.py")
    run = [sys.executable, script, *words]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=550)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        for name in sampled(("check", "attention", "loss_kernels", "recompute", "sweep", "optimizers"), 6)
    ],
)
def test_a_piece_starts_without_them(name: str, without: dict[str, str], tmp_path: Path) -> None:
    done = small(name, tmp_path / "kept", without)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: done" in done.stdout
    assert list((tmp_path / "kept").rglob("*.md"))


@pytest.mark.slow
@takes_minutes
def test_a_rung_is_predicted_and_measured_without_them(without: dict[str, str]) -> None:
    """The ladder's two kinds of process: the planner's, and the one that makes a step."""
    program = """
import sys
sys.path.insert(0, "tests/scripts")
from scripts.benchmarks import harness, ladder_search, rungs
from train.memory.devices import find_device
from train.memory.plan import Predictions
from train.memory.predict import Predictor
harness.lead_processes_here()
job = rungs.question_of(rungs.Rung("0.5b", "nothing", {}), find_device("cpu"), 64)
job = job.job(job.asked)
tiny = {**job.values["model_config"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
from dataclasses import replace
job = replace(job, values={**job.values, "model_config": tiny}, vocab_size=300)
with Predictor() as predictor:
    print("predicted", predictor.predict(job).peak_bytes > 0)
print("measured", ladder_search.tried_apart(job, "template", 300)["outcome"])
found = {name: str(sys.modules.get(name, "stand_ins")) for name in ("datasets", "evaluate", "tyro")}
print("real", [name for name, module in found.items() if "stand_ins" not in module])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=without, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "predicted True" in done.stdout and "measured ok" in done.stdout, done.stdout
    assert "real []" in done.stdout


@pytest.mark.slow
@takes_minutes
def test_real_runs_are_killed_resumed_and_split(tmp_path: Path) -> None:
    """With what the wheels bring and nothing else: reports are written without charts."""
    environment = python_without(others(*gpu_session.WHEELS), tmp_path / "hides")
    done = small("runs", tmp_path / "kept", environment)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = (tmp_path / "kept").glob("real_runs-*.json")
    checks = json.loads(path.read_text())["checks"]
    assert checks["killed and resumed"]["loss_before"] == checks["killed and resumed"]["loss_after"]
    assert checks["out of memory and split"]["oom_recoveries"] >= 1


def test_a_stand_in_can_be_named_and_not_used(tmp_path: Path) -> None:
    folder = harness.STAND_INS / "datasets"
    spec = importlib.util.spec_from_file_location("stand_in", folder / "datasets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not isinstance([], module.Dataset) and module.Dataset is module.Dataset
    with pytest.raises(ImportError, match="Dataset needs the package"):
        module.Dataset()
