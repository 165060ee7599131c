"""The harness of the benchmarks, their pages, and what they may import."""

from __future__ import annotations

import ast
import importlib
import json
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch
from support import ROOT, takes_minutes
from working_in_turns import work_in_turns

from scripts.benchmarks import building, command_line, harness, loop_overhead, recompute, sequence_length
from scripts.benchmarks.accuracy_cases import small
from scripts.benchmarks.study.cells import sweep_from
from scripts.benchmarks.study.page import page as study_page
from scripts.benchmarks.study.tables import markdown
from train.figures import count, duration, gib

BENCHMARKS = ROOT / "scripts" / "benchmarks"
SCRIPTS = sorted(
    path
    for path in BENCHMARKS.glob("*.py")
    if re.search(r"harness\.(report|read_options)\(Options", path.read_text(encoding="utf-8"))
)
BUILDERS = {"architectures.py", "building.py", "looping.py"}
CORE = {"batching", "data", "launch", "loop", "loss", "main", "model", "optim", "outputs", "step", "tasks"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


# ---- pages and imports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_page_is_what_its_script_makes_of_the_figures(path: Path) -> None:
    if path.stem == "scaling-memory":
        pytest.skip("figures for docs/scaling.md, which test_scaling.py compares")
    script = next(script.stem for script in SCRIPTS if re.match(rf"{script.stem}(-|$)", path.stem))
    found = json.loads(path.read_text(encoding="utf-8"))
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    if "date" not in found:  # two older files have it on the page only
        text = re.sub(r"; \d{4}-\d\d-\d\d\b", "", text)
    assert importlib.import_module(f"scripts.benchmarks.{script}").page(found) == text


def test_the_page_on_the_loop_shows_the_figures_of_the_benchmark() -> None:
    found = json.loads((ROOT / "docs" / "results" / "loop_overhead-cpu.json").read_text(encoding="utf-8"))
    page = " ".join((ROOT / "docs" / "loop.md").read_text(encoding="utf-8").split())
    of = {result["workload"]["name"]: result for result in found["results"]}
    for result in of.values():
        ratios = [result["ratios"][name]["median"] for name in ("template/bare", "trainer/bare", "template/trainer")]
        assert f"| {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |" in page
        assert f"| of {result['step_ms']['template']['median']:.0f} ms (" in page
        assert result["peak_bytes"]["template"] == min(result["peak_bytes"].values())
    step_ms, ratios = of["short"]["step_ms"], of["short"]["ratios"]
    assert f"adds {step_ms['template']['median'] - step_ms['bare']['median']:.1f} ms" in page
    assert "{quartile_1:.2f} to {quartile_3:.2f} in the first column".format(**ratios["template/bare"]) in page
    assert "{quartile_1:.2f} to {quartile_3:.2f} in the last".format(**ratios["template/trainer"]) in page
    halves = [of["long"]["ratios"][name] for name in ("template/bare", "template/trainer")]
    spread = " and ".join(f"{half['quartile_1']:.2f} to {half['quartile_3']:.2f}" for half in halves)
    assert f"not show (middle halves: {spread})" in page
    assert f"version {found['versions']['template']}" in page


def test_the_readme_shows_the_figures_of_the_quickstart() -> None:
    summary = json.loads((ROOT / "docs" / "results" / "quickstart-cpu" / "summary.json").read_text(encoding="utf-8"))
    result, peak = summary["result"]["validation"], gib(summary["peak_allocated_bytes"])
    steps = f"{summary['steps']} steps, {count(summary['tokens'])} tokens in {duration(summary['training_seconds'])}"
    speed = f"{count(summary['tokens_per_second'])} tokens/s, peak memory {peak}"
    expected = (
        *(note for note in summary["notes"] if note.startswith(("device", "model", "batch"))),
        f"peaks at {peak}, predicted",
        f"loss {result['loss']:.3f}, perplexity {result['perplexity']:.1f}, accuracy {result['accuracy']:.4f}",
        f"bits per byte {result['bits_per_byte']:.3f}, examples {result['examples']}",
        f"{steps}: {speed}, first step after {summary['seconds_to_first_step']:.1f} s",
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [line for line in expected if line not in readme] == []
    # The process of a run in fp32, as the recipe says what it took, is far smaller: both places say both.
    recipe, memory = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("recipes/quickstart.yaml", "docs/memory.md")
    )
    [in_fp32] = re.findall(r"# peak: +(\d\.\d\d) GiB resident", recipe)
    in_bf16 = gib(summary["peak_resident_bytes"])
    assert summary["mixed_precision"] == "bf16" and f"in bf16 {in_bf16.removesuffix(' GiB')}" in recipe
    assert f"peaks at {in_bf16}, and in fp32 at {in_fp32}" in " ".join(memory.split())
    assert f"# time:      {duration(summary['training_seconds'])} of training, which begins" in recipe


def test_the_readers_page_shows_how_long_the_quickstart_takes_to_begin() -> None:
    found = json.loads((ROOT / "docs" / "results" / "start-cpu.json").read_text())
    whole, parts = found["whole_seconds"], found["seconds"]["nothing cached"]
    text = " ".join((ROOT / "docs" / "extras" / "readers.md").read_text().split())
    assert (
        f"its first step after {whole['nothing cached']:.0f} s, of which its 32 MB of text take "
        f"{parts['tokenizer and tokens']:.0f}, and after {whole['new run']:.0f} s where they are cached"
    ) in text
    recipe = (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    assert f"after {whole['nothing cached']:.0f} s, or {whole['new run']:.0f} s once the data is cached" in recipe


@pytest.mark.parametrize("name", ["sweep-cpu", "sweep-nvidia-h200-24gib"])
def test_the_committed_pages_of_the_study_are_made_of_its_figures(name: str) -> None:
    folder = ROOT / "docs" / "results" / name
    sweep = sweep_from(json.loads((folder / "sweep.json").read_text(encoding="utf-8")))
    assert markdown(sweep) == (folder / "sweep.md").read_text(encoding="utf-8")
    without_charts = partial(re.sub, r"<svg.*?</svg>", "", flags=re.DOTALL)  # drawn by this version of matplotlib
    assert without_charts(study_page(sweep)) == without_charts((folder / "index.html").read_text(encoding="utf-8"))


def test_the_page_of_studies_tells_how_far_the_sweep_on_a_card_got() -> None:
    folder = ROOT / "docs" / "results" / "sweep-nvidia-h200-24gib"
    sweep = sweep_from(json.loads((folder / "sweep.json").read_text(encoding="utf-8")))
    worst = max(abs(cell.error or 0.0) for cell in sweep.measured)
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    assert f"[{len(sweep.measured)} of {len(sweep.grid)} cells]" in text and f"within {100 * worst:.2f} %" in text


def test_the_package_imports_no_script() -> None:
    bad = {str(path): imports(path) for path in (ROOT / "train").rglob("*.py")}
    assert not {path for path, names in bad.items() if any(name.startswith("scripts") for name in names)}


def test_only_three_modules_call_the_core() -> None:
    for path in [*BENCHMARKS.rglob("*.py"), ROOT / "scripts" / "study.py"]:
        if path.name not in BUILDERS:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("train.")}
            assert not used & CORE, path


HEAVY = ("communication", "scaling_tables")  # import torch before they read their flags


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] * (p.stem in HEAVY)) for p in SCRIPTS]
)
def test_a_script_runs_from_any_folder(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "--write" in done.stdout and "--output_dir" in done.stdout


# ---- flags -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flags(harness.Options):
    """Of every kind."""

    number: int = 3
    share: float = 0.5
    """A share of
    100 %."""
    limit: int | None = None
    kind: Literal["a", "b"] = "a"
    kinds: tuple[Literal["x", "y"], ...] | None = None
    names: tuple[str, ...] = ("one",)
    speed: bool = True


def read(*words: str) -> Flags:
    return command_line.read(Flags, "tried.py", "What it does.", words)


def test_flags_are_read_by_their_types(tmp_path: Path) -> None:
    assert read() == Flags()
    words = ["--number=5", "--share", "2", "--limit", "7", "--kind", "b", "--kinds", "x", "y", "--names", "--no-speed"]
    assert read(*words) == Flags(number=5, share=2.0, limit=7, kind="b", kinds=("x", "y"), names=(), speed=False)
    assert read("--limit", "None", "--write", "--output-dir", str(tmp_path), "--no_speed", "--speed") == Flags(
        write=True, output_dir=tmp_path
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numbers", "3"], "unrecognized arguments: --numbers 3"),
        (["--num", "3"], "unrecognized arguments"),
        (["--number", "x"], "argument --number: 'x' is not a valid int"),
        (["--number", "None"], "'None' is not a valid int"),
        (["--kind", "c"], "argument --kind: 'c' is not one of a, b"),
        (["--kinds", "x", "z"], "argument --kinds: 'z' is not one of x, y"),
    ],
)
def test_a_wrong_flag_ends_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_help_shows_what_stands_under_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "What it does." in text
    assert "--share X A share of 100 %. (default: 0.5)" in text
    assert "--kind a|b (default: a)" in text and "Measure nothing: write the page" in text


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options(harness.Options):
    number: int = 3


def figures(options: Options) -> dict[str, Any]:
    return {"number": options.number}


def page(found: dict[str, Any]) -> str:
    return f"# {found['number']}\n\n{harness.machine_line(found)}\n"


def reported(monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["tried.py", *flags])
    monkeypatch.setattr(harness, "prepare_environment", lambda: None)
    return harness.report(Options, "", figures, page, name="tried")


def test_nothing_is_written_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reported(monkeypatch, "--number", "5", "--output_dir", str(tmp_path))
    assert found["number"] == 5 and {"date", "hardware", "versions"} < set(found)
    assert "# 5" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_figures_and_page_are_written_and_the_page_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reported(monkeypatch, "--write", "--output_dir", str(tmp_path))
    [path] = tmp_path.glob("tried-*.json")
    assert json.loads(path.read_text()) == found
    written = path.with_suffix(".md").read_text()
    assert written == page(found)
    path.with_suffix(".md").unlink()
    assert reported(monkeypatch, "--page_of", str(path)) == found
    assert path.with_suffix(".md").read_text() == written


def test_machine_line() -> None:
    found = {"hardware": {"cpu": "CPU", "cpu_cores": 2, "gpus": []}, "versions": {"python": "3", "torch": "2"}}
    assert harness.machine_line(found) == "CPU, 2 cores; python 3, torch 2"
    found |= {"date": "2026-01-01"}
    assert harness.machine_line(found, "here", ["torch"]) == "here; torch 2; 2026-01-01"
    found["hardware"] = {**found["hardware"], "gpus": [{"name": "NVIDIA X 1"}]}  # type: ignore
    assert harness.machine_line(found, names=()).startswith("NVIDIA X 1; ")
    assert harness.device_slug(found) == "nvidia-x-1"


def test_table() -> None:
    table = harness.Table(("", "n"), "lr")
    assert table.lines([("a", 1), ("b", "")]) == ["| | n |", "| --- | ---: |", "| a | 1 |", "| b |  |"]
    with pytest.raises(ValueError, match="2 titles, 1 alignments"):
        harness.Table(("", "n"), "l").head()


# ---- rounds and processes --------------------------------------------------------------------------------------------


def test_rounds_are_paired() -> None:
    order: list[str] = []

    def measure(name: str, value: float) -> float:
        order.append(name)
        return value * (1 + len(order) // 3)  # each round is slower than the one before it

    values = {"a": 1.0, "b": 2.0}
    announced: list[int] = []
    rounds = harness.paired_rounds(
        {name: partial(measure, name, value) for name, value in values.items()},
        20,
        lambda number, _: announced.append(number),
    )
    assert announced == list(range(1, 21))
    assert all(sorted(order[first : first + 2]) == ["a", "b"] for first in range(0, 40, 2))
    assert {"ab", "ba"} == {"".join(order[first : first + 2]) for first in range(0, 40, 2)}
    assert all(list(found) == ["a", "b"] for found in rounds)
    assert harness.ratios([{"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 6.0}], "b", "a") == [2.0, 3.0]


def test_spread() -> None:
    assert harness.spread([3.0]) == {"median": 3.0, "quartile_1": 3.0, "quartile_3": 3.0}
    assert harness.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "quartile_1": 2.0, "quartile_3": 4.0}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import json, sys; print(json.dumps({'twice': 2 * json.load(sys.stdin)}))", {"outcome": "ok", "twice": 8}),
        ("raise MemoryError('CUDA out of memory')", {"outcome": "oom", "message": "MemoryError: CUDA out of memory"}),
        ("raise ValueError('a bug')", {"outcome": "error", "message": "ValueError: a bug"}),
        ("import time; time.sleep(60)", {"outcome": "timeout"}),
    ],
)
def test_outcome_of_a_script_of_its_own(code: str, outcome: dict[str, Any]) -> None:
    assert harness.apart(["-c", code], 4, timeout_seconds=2) == outcome


def test_functions_in_processes_of_their_own() -> None:
    processes = harness.Processes(on_cpu=False)
    assert processes.call(abs, -3) == 3
    with pytest.raises(harness.EndedError, match="1"):
        processes.call(sys.exit, 1)
    with pytest.raises(TimeoutError, match="took longer than 1 s"):
        processes.call(time.sleep, 60, timeout_seconds=1)


def test_functions_take_turns(tmp_path: Path) -> None:
    processes, path = harness.Processes(on_cpu=False), tmp_path / "order"
    found = processes.in_turns(work_in_turns, {name: (path, name, 3) for name in "abc"}, Random(0))
    assert found == {"a": "aa", "b": "bb", "c": "cc"}
    lines = path.read_text().split("\n")[:-1]
    assert [line.replace("begins", "ends") for line in lines[::2]] == lines[1::2]  # nothing at the same time
    for turn in range(3):
        assert sorted(lines[6 * turn : 6 * turn + 6 : 2]) == [f"{name}{turn} begins" for name in "abc"]
    with pytest.raises(harness.EndedError, match="3"):
        processes.in_turns(work_in_turns, {"a": (path, "a", 2), "b": (path, "b", 0)}, Random(0))


def test_a_turn_has_all_its_steps() -> None:
    asked = loop_overhead.Options(workload="short", steps=30, turn_steps=15)
    [load] = loop_overhead.chosen_workloads(asked, "cpu", "no")
    assert (load.steps, load.turn_steps, load.rounds) == (30, 15, 10)
    with pytest.raises(SystemExit, match=r"multiple of turn_steps \(short\)"):
        loop_overhead.chosen_workloads(replace(asked, steps=20), "cpu", "no")


def test_traced_allocations_and_tracked_peaks_agree() -> None:
    import torch

    def step() -> None:
        torch.ones(2**20).add(1)

    held = torch.ones(1000)
    before, peak = harness.peak_bytes(step, {"parameters": [held]}, torch.device("cpu"))
    assert (before, peak) == (4000, 4000 + 2 * 4 * 2**20)
    with harness.traced_allocations(held_bytes=4000) as traced:
        step()
    assert traced.peak_bytes == pytest.approx(peak, abs=100)  # scalars are counted by one of them


def test_processes_import_this_checkout(tmp_path: Path) -> None:
    """Although another copy of the package comes first on their path."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from scripts.benchmarks import harness, looping\n"
        "import train.figures\n"
        "if __name__ == '__main__':\n"
        "    print(harness.Processes(True, ['train.figures']).call(train.figures.gib, 2**30))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "1.00 GiB\n", done.stderr


def test_a_skipped_step_is_known_although_accelerate_does_not_say_so() -> None:
    """Fused AdamW under a loss scaler skips by itself; accelerate's ``step_was_skipped`` then stays False."""
    job = small("llama", "causal_lm", 64, 1)
    training = building.build_training(job, building.random_micro_batches(job, 1))
    training.step()
    assert not training.was_skipped
    with torch.no_grad():
        next(training.network.parameters()).fill_(torch.nan)
    training.step()
    assert training.was_skipped and not training.optimizer.step_was_skipped
    training.step(mark=lambda phase: None)
    assert training.was_skipped


ON_AN_EMULATED_CARD = """
import os, sys
sys.path[:0] = ["tests"]
from emulated.card import Settings
from emulated.device import install
install(Settings(memory_bytes=16 * 2**30))
from scripts.benchmarks import optimizers, recompute
made = optimizers.llama
optimizers.llama = lambda width, layers, dtype: made(64, 2, dtype)
optimizers.KEPT = [row for row in optimizers.KEPT if "8bit" not in row[0]]
optimizers.LEARNS = optimizers.LEARNS[:1]
status = {"optimizers": optimizers, "recompute": recompute}[sys.argv.pop(1)].main()
os._exit(status)  # what is emulated does not survive the end of the interpreter
"""


def measured_on_a_card(name: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Figures of a benchmark on a card that is emulated."""
    words = [sys.executable, "-c", ON_AN_EMULATED_CARD, name, "--write", "--output_dir", str(folder), *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_padding_is_counted_again_as_the_committed_page_has_it() -> None:
    """Exactly with the same Python, whose standard library is the text."""
    found = json.loads((ROOT / "docs" / "results" / "sequence_length-cpu.json").read_text(encoding="utf-8"))
    rows = sequence_length.padding_rows()
    assert [row["way"] for row in rows] == [row["way"] for row in found["padding"]]
    shares = [row["padding"] for row in rows]
    assert min(shares) == shares[-1] < 0.01 and max(shares) == shares[0] > 0.5
    assert rows == found["padding"] or platform.python_version() != found["versions"]["python"]


@pytest.mark.slow
@takes_minutes
def test_optimizers_on_a_card_count_nothing_of_those_before(tmp_path: Path) -> None:
    rows = measured_on_a_card("optimizers", tmp_path, "--steps", "1")["kept"]
    peaks = {row["optimizer"]: row["peak_bytes_per_parameter"] for row in rows if row["weights"] == "float32"}
    assert peaks["adamw, offload"] < peaks["adamw, in backward"] < peaks["adamw"] == max(peaks.values())


@pytest.mark.slow
@takes_minutes
def test_every_rung_is_measured_on_a_card(tmp_path: Path) -> None:
    sizes = ("--hidden_size", "64", "--intermediate_size", "128", "--num_hidden_layers", "2", "--length", "4096")
    rows = measured_on_a_card("recompute", tmp_path, *sizes, "--mlp_tokens", "256", "--rounds", "1")["model"]
    peaks = {row["name"]: row["peak_bytes"] for row in rows}
    assert list(peaks) == list(recompute.RUNGS)
    assert peaks["full, offload"] < peaks["full"] < peaks["selective"] < peaks["none"]
