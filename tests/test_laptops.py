"""Windows and macOS, as far as a machine with neither can tell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from faults.processes import script
from support import ROOT, log_of, write_recipe
from torch import Tensor, nn

from train import main
from train.config import parse
from train.extras.activations.recompute import OffloadedInputs
from train.extras.hardware import resolve_precision
from train.extras.meter import Extra
from train.extras.meter.memory import peak_bytes
from train.records import EXIT_DONE, EXIT_STOPPED, UsageError

# Windows


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How to start a Python like one on Windows, whose texts are not UTF-8 unless someone says so."""
    if sys.platform != "linux":
        pytest.skip("made for Linux")
    folder = tmp_path_factory.mktemp("windows")
    shutil.copy(ROOT / "tests" / "like_windows.py", folder / "sitecustomize.py")
    texts = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": {**os.environ, **texts, **paths}, "stderr": subprocess.STDOUT, "encoding": "cp1252"}
    return {**options, "stdout": subprocess.PIPE}


def test_the_workflow_tests_each_python_and_each_system() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert {*matrix["os"], *(row["os"] for row in matrix["include"])} == {
        "ubuntu-latest", "macos-latest", "windows-latest"
    }  # fmt: skip
    assert workflow["jobs"]["test"]["steps"][-1]["run"] == "bash scripts/test.sh"


def test_every_module_of_the_extras_can_be_loaded_as_on_windows(windows: dict[str, Any]) -> None:
    done = subprocess.run([sys.executable, "train/main.py", "--help"], timeout=60, **windows)
    assert done.returncode == 0 and "--save_in_background" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed_as_on_windows(windows: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "run"
    words = [sys.executable, "train/main.py", "--config", str(write_recipe(tmp_path)), "--output_dir", str(output)]
    words += ["--save_every_steps", "1", "--save_total_limit", "1", "--dataset", str(tmp_path / "documents.jsonl")]
    started = subprocess.Popen([*words, "--max_steps", "100000"], **windows)
    deadline = time.monotonic() + 120
    while started.poll() is None and time.monotonic() < deadline:
        if (output / "checkpoints" / "step-00000003").exists():
            started.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    said = started.communicate(timeout=60)[0]
    assert started.returncode == EXIT_STOPPED, said
    stopped = json.loads((output / "stopped.json").read_text())
    assert stopped["signal"] == "SIGINT" and stopped["step"] >= 3

    end = stopped["step"] + 3
    # Settings of another length would be another schedule, so the whole run is compared by what does not depend on it.
    resumed = subprocess.run([*words, "--max_steps", str(end)], timeout=120, **windows)
    assert resumed.returncode == EXIT_DONE, resumed.stdout
    assert f"at step {stopped['step']}" in resumed.stdout
    assert "could not be removed" not in said + resumed.stdout
    assert [path.name for path in (output / "checkpoints").iterdir()] == [f"step-{end:08d}"]
    assert [row["step"] for row in log_of(output) if row["kind"] == "train"] == list(range(1, end + 1))
    assert json.loads((output / "summary.json").read_text())["peak_resident_bytes"] > 10**8
    assert re.search(r"sample: .*\\u27ea", resumed.stdout)  # a mark that this code page lacks


@pytest.mark.slow
def test_memory_is_planned_and_predicted_as_on_windows(windows: dict[str, Any], tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    for command, expected in (("plan", "Fits: gpt2"), ("predict", "peak ")):
        words = [sys.executable, "-m", "train.memory", command, "--config", recipe, "--device", "cpu"]
        done = subprocess.run(words, timeout=120, **windows)
        assert done.returncode == 0 and expected in done.stdout, done.stdout


def test_a_folder_with_a_colon_in_its_name_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every absolute path has on Windows."""
    recipe, folder = str(write_recipe(tmp_path)), tmp_path / "C:" / "models"
    first = ["--config", recipe, "--output_dir", str(folder), "--max_steps", "1"]
    assert main.main(first) == EXIT_DONE
    own = ["--config", recipe, "--model", str(folder / "final"), "--output_dir", str(tmp_path / "second")]
    config = parse([*own, "--tokenizer", "None", "--rope_scaling", "linear"])  # neither is for a function
    assert not config.architecture.is_function
    assert main.main([*own, "--tokenizer", "None", "--max_steps", "1"]) == EXIT_DONE, capsys.readouterr().err


# macOS, whose GPUs torch calls MPS: with stand-ins, not run on one


class Metal:
    """A stand-in for torch.mps of 1,000 MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.driver = self.emptied = 0
        for name, answer in {
            "current_allocated_memory": lambda: self.allocated,
            "driver_allocated_memory": lambda: self.driver,
            "recommended_max_memory": lambda: 1000 * 2**20,
            "empty_cache": self.empty,
        }.items():
            monkeypatch.setattr(torch.mps, name, answer)

    def empty(self) -> None:
        self.driver, self.emptied = self.allocated, self.emptied + 1


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Metal:
    return Metal(monkeypatch)


def test_mps_computes_in_the_precision_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = (14, 0)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: version <= newest)
    mps = torch.device("mps")
    assert [resolve_precision(asked, mps) for asked in ("no", "fp16", "bf16")] == [
        ("no", None),
        ("fp16", None),
        ("bf16", None),
    ]
    newest = (13, 3)
    with pytest.raises(UsageError, match=r"MPS has no bf16. Use fp16"):
        resolve_precision("bf16", mps)


def test_the_peak_of_mps_is_not_the_resident_set(metal: Metal) -> None:
    metal.driver = 123
    assert peak_bytes(torch.device("mps")) == 123


def test_mps_is_metered_and_its_cache_emptied_where_the_driver_holds_too_much(
    metal: Metal, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}

    class Parts(SimpleNamespace):
        data = SimpleNamespace(label_names=["a", "b"], tokenizer=[])

    # The meter of MPS over tensors of a CPU: what it reads of torch.mps is the stand-in's.
    from train.extras.meter.cpu import MpsMeter

    monkeypatch.setattr(MpsMeter, "__init__", lambda meter, *args: made.update(args=args))
    model, optimizer = nn.Linear(64, 64), None
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("mps")),
        config=SimpleNamespace(of=lambda options: options()),
        outputs=SimpleNamespace(say=print),
    )
    extra: Any = Extra()
    parts = Parts(state=SimpleNamespace(model=model), optimizer=SimpleNamespace(optimizer=optimizer))
    extra.ready(run, parts)
    assert isinstance(extra.meter, MpsMeter) and made["args"][:2] == (torch.device("mps"), model)
    monkeypatch.undo()
    metal.__init__(monkeypatch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = MpsMeter(torch.device("cpu"), model, optimizer, 2, print)
    metal.allocated, metal.driver = 5 * 2**20, 40 * 2**20
    with meter.measure("forward", []):
        loss = model(torch.ones(1024, 64)).sum()
        metal.allocated, metal.driver = 7 * 2**20, 900 * 2**20
        meter.mark("backward")
        metal.allocated = 6 * 2**20
        loss.backward()
    figures = meter.interval()
    assert figures["peak_allocated_bytes"] == 7 * 2**20  # above the 0.3 MiB that operators were seen to take
    assert figures["peak_reserved_bytes"] == 900 * 2**20 and metal.emptied == 0
    assert figures["peak_bytes_by_phase"]["forward"] >= 1024 * 64 * 4
    assert figures["peak_bytes_by_phase"].keys() == {"forward", "backward"}
    with meter.measure("forward", []):
        metal.driver = 1001 * 2**20
    assert meter.interval()["peak_reserved_bytes"] == 1001 * 2**20
    assert (metal.emptied, metal.driver) == (1, 6 * 2**20)
    metal.allocated, metal.driver = 0, 500 * 2**20
    with meter.measure("forward", []):
        meter.mark("backward")
        metal.driver = 10 * 2**20
    last = meter.interval()
    assert last["peak_reserved_bytes"] == 500 * 2**20
    # not followed: of one that was
    assert last["peak_allocated_bytes"] == max(figures["peak_bytes_by_phase"].values())
    with meter.measure("forward", []):
        metal.driver = 1000 * 2**20  # not too much
    assert metal.emptied == 1


def test_nothing_is_offloaded_where_memory_is_the_hosts() -> None:
    """Metal has no streams that would copy it either; nor have tensors without memory, on which a loss is tried."""
    for device in ("mps", "meta"):
        tensor: Any = SimpleNamespace(is_floating_point=lambda: True, nbytes=2**30, device=torch.device(device))
        assert not OffloadedInputs(print)._moves(tensor)


def test_evaluation_asks_the_device_for_no_fp64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS has none."""
    kinds, stack = list[set[torch.dtype]](), torch.stack

    def recorded(tensors: list[Tensor], *args: Any, **options: Any) -> Tensor:
        kinds.append({tensor.dtype for tensor in tensors})
        return stack(tensors, *args, **options)

    monkeypatch.setattr(torch, "stack", recorded)
    words = ["--config", str(write_recipe(tmp_path)), "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
    assert main.main(words) == EXIT_DONE
    assert {torch.float32} in kinds and not any(torch.float64 in found for found in kinds)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="reaches into torch's C++ core")
def test_a_step_on_mps_is_predicted_with_the_scores_of_its_attention(tmp_path: Path) -> None:
    recipe, found = str(write_recipe(tmp_path)), {}
    model = json.dumps({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 1024})
    for length in (512, 1024):
        words = ["train/memory/__main__.py", "predict", "--config", recipe, "--device", "mps 16GiB", "--json"]
        words += ["--max_length", length, "--model_config", model, "--mixed_precision", "bf16"]
        done = script(words, 1, dict(os.environ))
        assert done.returncode == 0, done.stderr
        found[length] = json.loads(done.stdout)["prediction"]
    assert found[512]["attention_kernels"] == ["math"]
    assert found[1024]["reserved_bytes"] == found[1024]["peak_bytes"] > 3 * found[512]["peak_bytes"]
