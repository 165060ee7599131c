"""What several test files import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

from train.launch import Launch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train import records
    from train.batching import Loading
    from train.config import Config
    from train.records import MicroBatch

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE_LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
"""``accelerate launch``, whether or not it is on the PATH."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]
EVERY_CASE = os.environ.get("EVERY_CASE") == "1"
"""Whether slow tests try all of their cases; else a sample of them."""
RECIPE = """
task: causal_lm
dataset: {data}
tokenizer: bytes
max_length: 64
validation_fraction: 0.2
model_config:
  {{model_type: gpt2, n_embd: 16, n_layer: 2, n_head: 2, resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.0}}
micro_batch_size: 2
global_batch_size: 8
num_epochs: 2
learning_rate: 0.01
log_every_steps: 1
cpu_threads: 1
predict_memory: false
"""


takes_minutes = pytest.mark.skipif(not EVERY_CASE, reason="takes minutes: EVERY_CASE=1 runs it")
"""For what is made of parts that shorter tests try."""


def sampled(cases: Iterable[Any], one_of: int) -> list[Any]:
    """The first of each ``one_of`` cases, or all of them if ``EVERY_CASE``."""
    return [*cases][:: 1 if EVERY_CASE else one_of]


def write_recipe(folder: Path) -> Path:
    """A recipe that trains in a second: 25 documents of different lengths, dropout on, a short last window."""
    path = folder / "recipe.yaml"
    if path.exists():  # a rewritten file would be other data to a run that resumes
        return path
    documents = folder / "documents.jsonl"
    with documents.open("w") as file:
        for number in range(25):
            file.write(json.dumps({"text": f"document {number}: " + "abc def " * (number % 7)}) + "\n")
    path.write_text(RECIPE.format(data=documents))
    return path


def checkpoint_digests(output: Path, step: int) -> dict[str, str]:
    """Digests of a checkpoint's tensors, by file."""
    manifest = json.loads((output / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: file["digest"] for name, file in manifest["files"].items() if name != "state.json"}


def final_files(output: Path) -> dict[str, str]:
    """Digests of ``final/``."""
    return json.loads((output / "summary.json").read_text())["final_files"]


def log_of(output: Path) -> list[dict[str, Any]]:
    """What of the log's rows does not depend on the process that wrote them, as times and peaks do."""
    exact = ("kind", "step", "split", "epoch", "loss", "accuracy", "learning_rate", "grad_norm", "tokens_seen")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines() if line]
    return [{name: row.get(name) for name in exact} for row in rows]


needs_transformers_5_23 = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"), reason="balances experts in another way, or not at all"
)


def forget_device() -> None:
    """The next Accelerator of this process may be on another device than those before it, which are of no use then."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def run_for(config: Config, accelerator: Accelerator | None = None, launch: Launch = Launch()) -> records.Run:  # noqa: B008
    """What ``main`` makes before it loads the data: all extras joined, nothing shown, on the CPU unless told."""
    from accelerate import Accelerator  # here: conftest imports this file before it sets what libraries read
    from accelerate.state import PartialState

    from train import extras
    from train.outputs import Outputs
    from train.records import Run

    # A process has one device: where a test for a card has begun on that, accelerate refuses another.
    device = PartialState().device if PartialState._shared_state else None
    is_on_card = device is not None and device.type != "cpu"
    accelerator = accelerator or Accelerator(cpu=not is_on_card)
    outputs = Outputs(config, accelerator, is_silent=True)
    return Run(config, launch, accelerator, extras.join(), outputs, [])


def evaluation_batches(examples: Any, loading: Loading, size: int, world: int = 1, rank: int = 0) -> list[MicroBatch]:
    """A rank's part of a held-out split in batches of ``size``."""
    from train.config import Config
    from train.data import PreparedData

    unused: Any = None
    data = PreparedData(unused, unused, unused, unused, loading)
    outputs = SimpleNamespace(bar=None, is_main=False)
    run: Any = SimpleNamespace(
        config=Config().changed(micro_batch_size=size), launch=Launch(world, rank), outputs=outputs
    )
    return list(data.evaluation_batches(run, examples))


def causal_data(config: Config, validation: list[int], train: list[int] = [1], test: list[int] | None = None) -> Any:  # noqa: B006
    """Prepared data of causal_lm whose examples have these lengths."""
    from datasets import Dataset

    from train.batching import Loading
    from train.data import PreparedData
    from train.tasks import load_task

    def split(lengths: list[int]) -> Dataset:
        return Dataset.from_dict({"tokens": [[3] * (n + 1) for n in lengths], "length": lengths})

    unused: Any = None
    task = load_task("causal_lm")(config)
    given = {"train": train, "validation": validation, "test": test}
    examples = {name: split(rows) for name, rows in given.items() if rows is not None}
    return PreparedData(task, unused, unused, examples, Loading(partial(task.collate, pad_id=0)))


class Driver:
    """A stand-in for the CUDA runtime that page-locks host memory."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: list[int] = []  # bytes of each piece that was ever locked
        self.places: set[int] = set()  # addresses of what is locked now
        self._refuses = refuses

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self._refuses:
            return 2  # cudaErrorMemoryAllocation
        self.locked.append(num_bytes)
        self.places.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.places.remove(address)
        return 0


def printed_and_imported(*words: str) -> tuple[str, set[str]]:
    """What Python prints when it runs ``words`` from the root, and the modules that it imports; it has to succeed."""
    python = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(python, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.stdout, {line.rpartition("|")[2].strip() for line in lines}
