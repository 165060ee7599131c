"""Whole runs of train/main.py: killed and resumed, out of memory for real and split, with a memory snapshot.

    python scripts/benchmarks/real_runs.py --write                  # on a card: Qwen2.5-0.5B's shape, 131,072 tokens
    python scripts/benchmarks/real_runs.py --model tiny             # a small model, on any machine

A run is ended by SIGKILL after its first checkpoint, and the same command resumes it: the step made twice should have
the same loss. Another run may fill memory to halfway between what half of its micro-batch and the whole are predicted
to need: it has to run out of memory, split the micro-batch, and learn what a run with room learns. On a card the
process is limited by torch's allocator and writes a memory snapshot; on a CPU by the operating system.
"""

from __future__ import annotations

import json
import pickle
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.benchmarks import building, harness, rungs
from scripts.benchmarks.study.measure import fence
from train.records import EXIT_DONE, EXIT_ERROR

MODELS: dict[str, dict[str, Any]] = {
    "0.5b": rungs.MODELS["0.5b"],
    "tiny": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
DOCUMENTS = 12
SPLIT_SIZE = 4
"""Examples of the micro-batch that does not fit."""
TOLERANCE = 2e-3
"""Relative, of losses that would be equal but for the order of sums."""
ROOM = 0.85
"""Share of a card that a micro-batch may take which has to fit."""
SLACK_BYTES = 100 * 2**20
"""Of a process on a CPU, for what it loads after its limit is set. Seen to split with -100 to 400 MiB, the latter not
always."""


@dataclass(frozen=True)
class Options(harness.Options):
    """Kills, resumes and splits real runs."""

    model: Literal["0.5b", "tiny"] = "0.5b"
    length: int | None = None
    """Tokens of an example; default: 131,072 on a card of 40 GiB or more, 32,768 on a smaller one, 1,024 on a CPU."""
    seconds: float = 400
    """After which a run is given up."""


@dataclass(frozen=True)
class Place:
    """Where the runs are made."""

    folder: Path
    model: dict[str, Any]
    length: int
    on_card: bool
    seconds: float

    def words(self, name: str, length: int, **flags: Any) -> list[str]:
        """The training command line of the run ``name``."""
        model = {**self.model, "max_position_embeddings": max(self.length, length)}
        values = {
            "task": "causal_lm",
            "dataset": self.folder / "documents.jsonl",
            "tokenizer": "bytes",
            "model_config": json.dumps(model),
            "max_length": length,
            "loss": "chunked",
            "mixed_precision": ("bf16" if building.fast_precisions(building.training_device())[1:] else "fp16")
            if self.on_card
            else "no",
            "learning_rate": 1e-4,
            "log_every_steps": 1,
            "eval_batch_size": 1,
            "output_dir": self.folder / name,
            **flags,
        }
        return [word for flag, value in values.items() for word in (f"--{flag}", str(value))]

    def start(self, name: str, words: list[str], cap_bytes: int = 0) -> subprocess.Popen[bytes]:
        """A run, which may take so many bytes if not 0; what it prints goes to a file."""
        harness.lead_processes_here()
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, __file__, "--run", str(cap_bytes), *words]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def run(self, name: str, words: list[str], cap_bytes: int = 0) -> int:
        """The exit status of a run."""
        process = self.start(name, words, cap_bytes)
        try:
            return process.wait(self.seconds)
        finally:
            process.kill()
            process.wait()

    def said(self, name: str) -> str:
        """All that a run printed."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def losses(self, name: str) -> dict[int, float]:
        """Training losses by step, as far as they are written."""
        path, found = self.folder / name / "metrics.jsonl", {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # a line that is being written
                row = json.loads(line)
                if row.get("kind") == "train" or ("learning_rate" in row and "split" not in row):
                    found[row["step"]] = row["loss"]
        return found


def write_documents(path: Path, length: int) -> None:
    """Pieces of Python's library, each a little longer than ``length`` bytes."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    size = length + 16
    text *= -(-DOCUMENTS * size // len(text))
    rows = [json.dumps({"text": text[number * size : (number + 1) * size]}) for number in range(DOCUMENTS)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def split_length(length: int) -> int:
    """Tokens of an example where several are in a micro-batch; enough that a micro-batch outweighs the libraries."""
    return max(length // 16, 2048)


def killed_and_resumed(place: Place) -> dict[str, Any]:
    """A run killed during its third step or later, and what became of the same command."""
    flags: dict[str, Any] = {"max_steps": 4, "save_every_steps": 2, "rehearse": False}
    flags["save_in_background"] = False  # else the kill may come before the checkpoint
    if place.on_card:
        flags["gradient_checkpointing"] = "full"
    words = place.words("killed", place.length, micro_batch_size=1, **flags)
    process, started = place.start("killed", words), time.perf_counter()
    while process.poll() is None and 3 not in place.losses("killed"):
        if time.perf_counter() - started > place.seconds:
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    before = place.losses("killed")
    saved = sorted(path.name for path in (place.folder / "killed" / "checkpoints").glob("step-*"))
    status = place.run("killed", words)
    after = place.losses("killed")
    same = 3 in before and 3 in after and abs(after[3] / before[3] - 1) <= TOLERANCE
    resumed = "resumed from" in place.said("killed")
    return {
        "ok": status == EXIT_DONE and resumed and same,
        "killed_after_step": max(before, default=None),
        "checkpoints_at_the_kill": saved,
        "resumed": resumed,
        "status": status,
        "loss_before": before.get(3),
        "loss_after": after.get(3),
    }


def split_and_snapshot(place: Place) -> dict[str, Any]:
    """A run that has to split its micro-batch next to one that has room."""
    from train.memory.devices import this_device

    length = split_length(place.length)
    half, whole = (needed_bytes(place, length, size) for size in (SPLIT_SIZE // 2, SPLIT_SIZE))
    while place.on_card and whole > ROOM * this_device().total_bytes:  # it has to fit once
        length //= 2
        half, whole = (needed_bytes(place, length, size) for size in (SPLIT_SIZE // 2, SPLIT_SIZE))
    flags: dict[str, Any] = {"micro_batch_size": SPLIT_SIZE, "max_steps": 2, "on_oom": "split", "rehearse": False}
    status = place.run("whole", place.words("whole", length, **flags))
    cap_bytes = (half + whole) // 2 + (0 if place.on_card else SLACK_BYTES)
    if place.on_card:
        flags["memory_snapshot"] = True
    split_status = place.run("split", place.words("split", length, **flags), cap_bytes)
    expected, found = place.losses("whole"), place.losses("split")
    same = bool(expected) and all(abs(found.get(step, 0.0) / loss - 1) <= TOLERANCE for step, loss in expected.items())
    path = place.folder / "split" / "summary.json"
    recoveries = json.loads(path.read_text(encoding="utf-8")).get("oom_recoveries") if path.exists() else None
    snapshot = snapshot_events(place.folder / "split") if place.on_card else None
    return {
        "ok": status == split_status == EXIT_DONE and bool(recoveries) and same and snapshot != 0,
        "length": length,
        "cap_bytes": cap_bytes,
        "status": split_status,
        "oom_recoveries": recoveries,
        "snapshot_events": snapshot,
        "losses_with_room": list(expected.values()),
        "losses_split": list(found.values()),
    }


def needed_bytes(place: Place, length: int, size: int) -> int:
    """What the allocator is predicted to need for a step of ``size`` examples."""
    from train.memory.devices import find_device, this_device
    from train.memory.plan import Predictions, predicted
    from train.memory.predict import Predictor
    from train.memory.question import BYTE_VOCABULARY, Question

    config = building.parsed_config(place.words("whole", length, micro_batch_size=size, gradient_accumulation_steps=1))
    device = this_device() if place.on_card else find_device("cpu")
    question = Question(config, device, place.model.get("vocab_size", BYTE_VOCABULARY))
    with Predictor() as predictor:
        return predicted(question, Predictions(predictor)).prediction.least_reserved_bytes


def snapshot_events(folder: Path) -> int:
    """Events in the memory snapshot of a run, which is deleted: it is large."""
    events = 0
    for path in folder.glob("memory_snapshot-*.pickle"):
        events += sum(map(len, pickle.loads(path.read_bytes())["device_traces"]))
        path.unlink()
    return events


CHECKS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "killed and resumed": killed_and_resumed,
    "out of memory and split": split_and_snapshot,
}


def checked(options: Options, path: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """Makes the checks that ``path`` does not have yet, or that failed, and keeps each there at once."""
    import torch

    from train.memory.devices import this_device

    on_card = torch.cuda.is_available()
    default = 1024 if not on_card else 131072 if this_device().total_bytes >= 40 * 2**30 else 32768
    length = options.length or default
    found: dict[str, Any] = {**about, "model": options.model, "length": length, "checks": {}}
    if path is not None and path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if (earlier["model"], earlier["length"]) == (options.model, length):
            found["checks"] = {name: row for name, row in earlier["checks"].items() if row["ok"]}
    row: dict[str, Any]
    for name, check in CHECKS.items():
        if name in found["checks"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = Place(Path(folder), MODELS[options.model], length, on_card, options.seconds)
            write_documents(place.folder / "documents.jsonl", max(length, split_length(length)))
            started = time.perf_counter()
            try:
                row = check(place)
            except subprocess.TimeoutExpired:
                row = {"ok": False, "status": f"took longer than {options.seconds:.0f} s"}
            row["seconds"] = time.perf_counter() - started
            if not row["ok"]:
                row["said"] = {log.stem: log.read_text(errors="replace")[-2000:] for log in place.folder.glob("*.log")}
            shutil.rmtree(place.folder, ignore_errors=True)
        found["checks"][name] = row
        print(f"{name}: {'as it should be' if row['ok'] else 'FAILED'}, {row['seconds']:.0f} s", flush=True)
        for log, text in row.get("said", {}).items():
            print(f"--- the end of {log}.log:\n{text[-1500:]}", flush=True)
        if path is not None:
            harness.write_figures(path, found)
    return found


TABLE = harness.Table(("check", "as it should be", "what was seen"), "lll")


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """A line of the page."""
    shown = {key: value for key, value in row.items() if key not in ("ok", "said")}
    shown["seconds"] = round(row["seconds"])
    return [name, "yes" if row["ok"] else "NO", "; ".join(f"{key} {value}" for key, value in shown.items())]


def page(found: dict[str, Any]) -> str:
    """The checks in Markdown."""
    lines = [
        f"# Real runs: {harness.device_of(found)}",
        "",
        f"{found['model']}, {found['length']:,} tokens. {harness.machine_line(found)}. Written by "
        "`scripts/benchmarks/real_runs.py`.",
        "",
        *TABLE.lines(cells(name, row) for name, row in found["checks"].items()),
        "",
    ]
    return "\n".join(lines)


def run_held(cap_bytes: int, words: list[str]) -> None:
    """train/main.py in this process, which may take ``cap_bytes`` more, if not 0."""
    if cap_bytes:
        import datasets  # noqa: F401 - on a CPU the limit is for what comes after the libraries
        import evaluate  # noqa: F401
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        if torch.cuda.is_available():
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes)
        else:
            fence(cap_bytes)
    sys.argv = ["train/main.py", *words]
    runpy.run_path(str(harness.ROOT / "train" / "main.py"), run_name="__main__")


def main() -> int:
    """Makes the checks; status 1 if one was not as it should be."""
    building.use_expandable_segments()
    if sys.argv[1:2] == ["--run"]:
        run_held(int(sys.argv[2]), sys.argv[3:])
        return EXIT_DONE
    options = harness.read_options(Options, __doc__)
    if harness.page_again(options, page) is not None:
        return EXIT_DONE
    about = harness.about()
    name = f"real_runs-{harness.device_slug(about)}"
    found = checked(options, options.output_dir / f"{name}.json" if options.write else None, about)
    harness.finish(options, found, page, name)
    return EXIT_DONE if all(row["ok"] for row in found["checks"].values()) else EXIT_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
